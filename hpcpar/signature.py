"""Signature: (shape, layout, mesh) as one interned object, the key by which operations cache their rules."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

import numpy as np

from hpcpar.layout.blocks import owned
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh


class Signature:
    """Shape and layout of a logical array on a mesh, seen from this rank; made by `signature`, compared by identity.

    Attributes
    ----------
    shape : tuple of int
        Global shape.
    dims : tuple of tuple of str
        For each dim the axes longer than 1 that split it.
    partial : tuple of str
        Axes longer than 1 over which the value is a sum, in mesh order.
    box : tuple of (int, int)
        The half-open interval of each dim that this rank owns.
    local_shape : tuple of int
        Shape of the shard.
    """

    __slots__ = (
        "_resolved", "box", "dims", "layout", "local_shape", "mesh", "partial", "plans", "rules", "shape", "split_axes"
    )  # fmt: skip

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], layout: Layout) -> None:
        self.mesh = mesh
        self.shape = shape
        self.layout = layout
        self.dims = tuple(layout.entry(d) for d in range(len(shape)))
        self.partial = layout.partial
        self.split_axes = tuple(a for entry in self.dims for a in entry)
        self.box = tuple(self.interval(d, mesh.coords) for d in range(len(shape)))
        self.local_shape = tuple(b - a for a, b in self.box)
        self._resolved: Signature | None = None
        # kept here so that they end with the mesh, which ends its signatures
        self.plans: dict[Signature, object] = {}  # repartitions from here, of hpcpar.primitives
        self.rules: dict[Hashable, object] = {}  # of operations whose first operand lies so, of hpcpar.ops

    def parts(self, dim: int) -> int:
        """Return into how many blocks `dim` is split."""
        return prod(self.mesh.shape[a] for a in self.dims[dim])

    def part_index(self, dim: int, coords: dict[str, int]) -> int:
        """Return the row-major index, over the axes of `dim`, of the rank at `coords`."""
        index = 0
        for axis in self.dims[dim]:
            index = index * self.mesh.shape[axis] + coords[axis]
        return index

    def interval(self, dim: int, coords: dict[str, int]) -> tuple[int, int]:
        """Return the interval of `dim` owned by the rank at `coords`."""
        return owned(self.shape[dim], self.parts(dim), self.part_index(dim, coords))

    def box_at(self, coords: dict[str, int]) -> tuple[tuple[int, int], ...]:
        """Return the box owned by the rank at `coords`."""
        return tuple(self.interval(d, coords) for d in range(len(self.shape)))

    @property
    def resolved(self) -> Signature:
        """The same array without partial axes."""
        if self._resolved is None:
            self._resolved = self if not self.partial else signature(self.mesh, self.shape, Layout(*self.dims))
        return self._resolved

    def with_layout(self, layout: Layout) -> Signature:
        """Return the signature of the same array under another layout."""
        return signature(self.mesh, self.shape, layout)

    def with_partial(self, partial: tuple[str, ...]) -> Signature:
        """Return the signature with the given partial axes instead."""
        if partial == self.partial:
            return self
        return signature(self.mesh, self.shape, Layout(*self.dims, partial=partial))

    def with_shape(self, shape: tuple[int, ...], dims: tuple[tuple[str, ...], ...] | None = None) -> Signature:
        """Return the signature of another shape (and other dims) with the same partial axes."""
        return signature(self.mesh, shape, Layout(*(self.dims if dims is None else dims), partial=self.partial))

    @property
    def size(self) -> int:
        """Number of elements of the global array."""
        return prod(self.shape)

    @property
    def local_size(self) -> int:
        """Number of elements of the shard."""
        return prod(self.local_shape)

    def __copy__(self) -> Signature:
        return self  # compared by identity

    def __deepcopy__(self, memo: dict) -> Signature:
        return self

    def __repr__(self) -> str:
        return f"{self.shape} {self.layout!r}"


def signature(mesh: Mesh, shape: tuple[int, ...], layout: Layout) -> Signature:
    """Return the one signature object of (shape, layout, mesh).

    Raises
    ------
    LayoutError
        When the layout names an unknown axis or more dims than the array has.
    TypeError
        When it is none.
    """
    key = (shape, layout)
    try:
        found = mesh._signatures.get(key)
    except TypeError:  # a list in place of a layout
        found = None
    if found is None:
        if not isinstance(layout, Layout):
            entries = layout if isinstance(layout, tuple | list) else (layout,)
            raise TypeError(f"a layout is a Layout, like Layout({', '.join(map(repr, entries))}), got {layout!r}")
        if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape):
            raise LayoutError(f"a shape is a tuple of lengths, got {shape!r}")
        normal = layout.on(shape, mesh.shape)
        shape = tuple(int(n) for n in shape)
        found = mesh._signatures.get((shape, normal))
        if found is None:
            found = mesh._signatures[shape, normal] = Signature(mesh, shape, normal)
        mesh._signatures[key] = found
    return found


def two_meshes(first: str, here: Mesh, second: str, there: Mesh) -> str:
    """Return the words for two things that should lie on one mesh and do not: on which each is, and what to do."""
    shown = [f"{mesh!r}{_cut(mesh)}" for mesh in (here, there)]
    if shown[0] == shown[1]:
        shown[1] = f"another {shown[1]}: two calls of Mesh make two meshes, also where their axes are equal"
    return (
        f"{first} lies on {shown[0]}, {second} on {shown[1]}; make one mesh and everything on it, inside `with mesh:` "
        "or by mesh=..."
    )


def _cut(mesh: Mesh) -> str:
    """Where in a larger mesh a mesh was cut out."""
    return f", the part at {', '.join(f'{a}={at}' for a, at in mesh.fixed.items())} of a larger mesh" * bool(mesh.fixed)
