"""The grid behind a mesh: named axes, positions of ranks, who shares an axis; pure arithmetic, no communicators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcpar.signature import Signature

_stack: list[Grid] = []


class MeshError(ValueError):
    """A mesh that does not fit its ranks, or an axis that a mesh does not have."""


@dataclass(frozen=True)
class Node:
    """Where this rank sits: `rank` of `size` inside node `index` of `count`; `hosts` names the node of each rank."""

    rank: int
    size: int
    index: int
    count: int
    hosts: tuple[str, ...]


class Grid:
    """Ranks as a grid with named axes, seen from one of them; base of `hpcpar.Mesh` and of meshes that only plan.

    A subclass makes communicators (`_make_comm`), sub-meshes (`_make_part`) and finds out nodes (`_find_node`).

    Attributes
    ----------
    shape : dict of str to int
        Length of each axis, in order; the last varies fastest with the rank.
    axes : tuple of str
    rank, size : int
    fixed : dict of str to int
        Coordinates at which a mesh was cut out of a larger one.
    virtual : bool
        Whether there are no other ranks: messages are counted and not sent, arrays have no storage.
    """

    virtual = False

    def __init__(self, shape: Mapping[str, int], rank: int, fixed: Mapping[str, int]) -> None:
        self.shape: dict[str, int] = dict(shape)
        self.axes: tuple[str, ...] = tuple(self.shape)
        self.rank = rank
        self.size = prod(self.shape.values())
        self.fixed: dict[str, int] = dict(fixed)
        self._coords = dict(zip(self.axes, unravel(rank, tuple(self.shape.values())), strict=True))
        self._comms: dict[tuple[str, ...], Any] = {}
        self._subs: dict[tuple[tuple[str, int], ...], Any] = {}
        self._signatures: dict[tuple, Signature] = {}
        self._node: Node | None = None
        self._order = {axis: position for position, axis in enumerate(self.axes)}

    # ---- positions

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along `axis`."""
        self._check((axis,))
        return self._coords[axis]

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate along every axis."""
        return dict(self._coords)

    def length(self, *axes: str) -> int:
        """Return the number of ranks along the given axes together."""
        self._check(axes)
        return prod(self.shape[a] for a in axes)

    def sort(self, axes: tuple[str, ...] | set[str] | frozenset[str] | list[str]) -> tuple[str, ...]:
        """Return `axes` in mesh order: the only order in which axes are ever walked through."""
        return tuple(sorted(axes, key=self._order.__getitem__))

    def _check(self, axes: tuple[str, ...]) -> None:
        for axis in axes:
            if axis not in self.shape:
                raise MeshError(f"mesh has no axis {axis!r}; its axes are {', '.join(self.axes)}")

    # ---- communicators

    def comm(self, *axes: str) -> Any:
        """Return the communicator along one axis, or along the union of several.

        Parameters
        ----------
        *axes : str
            Their order does not matter: ranks are row-major in mesh order. Without axes: this rank alone.

        Notes
        -----
        The first call for a set of axes is collective over the ranks that differ only along these axes.
        """
        self._check(axes)
        key = tuple(a for a in self.axes if a in axes and self.shape[a] > 1)
        comm = self._comms.get(key)
        if comm is None:
            comm = self._comms[key] = self._make_comm(key)
        return comm

    def members(self, *axes: str) -> list[int]:
        """Return the ranks that differ from this one along `axes` only, in the order of ``comm(*axes)``."""
        self._check(axes)
        return self._members(tuple(axes))

    def _members(self, free: tuple[str, ...]) -> list[int]:
        """Ranks that share this rank's coordinates on all axes but `free`, in row-major order."""
        ranks = [0]
        for axis in self.axes:
            choices = range(self.shape[axis]) if axis in free else (self._coords[axis],)
            ranks = [r * self.shape[axis] + c for r in ranks for c in choices]
        return ranks

    @property
    def world(self) -> Any:
        """The communicator over the whole mesh."""
        return self.comm(*self.axes)

    def sub(self, **fixed: int) -> Any:
        """Return the mesh without the given axes, at the given coordinates (one pipeline stage, say).

        It has its own communicator. Collective over the ranks at these coordinates; ``None`` on the others.
        """
        self._check(tuple(fixed))
        key = tuple(sorted(fixed.items()))
        if key not in self._subs:
            self._subs[key] = self._make_sub(fixed)
        return self._subs[key]

    def _make_sub(self, fixed: Mapping[str, int]) -> Any:
        for axis, at in fixed.items():
            if not 0 <= at < self.shape[axis]:
                raise MeshError(f"coordinate {at} is outside axis {axis!r} of length {self.shape[axis]}")
        if any(self._coords[axis] != at for axis, at in fixed.items()):
            return None
        return self._make_part(tuple(a for a in self.axes if a not in fixed), {**self.fixed, **fixed})

    def _make_comm(self, key: tuple[str, ...]) -> Any:
        """Return the communicator over the ranks that differ from this one along the axes `key` only."""
        raise NotImplementedError

    def _make_part(self, free: tuple[str, ...], fixed: Mapping[str, int]) -> Any:
        """Return the mesh over the axes `free` at this rank's coordinates along the others."""
        raise NotImplementedError

    def _find_node(self) -> Node:
        """Return this rank's place in its node."""
        raise NotImplementedError

    # ---- copies

    def __copy__(self) -> Any:
        return self  # ranks cannot be copied: a copy of what lies on a mesh lies on the same one

    def __deepcopy__(self, memo: dict) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} and what lies on it cannot be pickled: another process has other ranks; save arrays "
            "(x.numpy(), model.state_dict(numpy=True)), or a checkpoint (hpcpar.checkpoint)"
        )

    # ---- nodes and printing

    @property
    def node(self) -> Node:
        """This rank's place in its node. On a sub-mesh the first access is collective over it."""
        if self._node is None:
            self._node = self._find_node()
        return self._node

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{a}={n}' for a, n in self.shape.items())})"

    def __str__(self) -> str:
        """Who sits where, by node. No message; a sub-mesh knows its nodes once `node` was read."""
        lines = [f"{self!r}: {self.size} rank{'s' * (self.size != 1)}"]
        sizes = tuple(self.shape.values())
        hosts = self._node.hosts if self._node else None
        for rank in range(self.size):
            if hosts and (rank == 0 or hosts[rank] != hosts[rank - 1]):
                lines.append(f"  node {hosts[rank]}")
            place = " ".join(f"{a}={c}" for a, c in zip(self.axes, unravel(rank, sizes), strict=True))
            lines.append(f"    rank {rank}: {place}")
        return "\n".join(lines)

    def describe(self) -> str:
        """Return who sits where, by node. Collective."""
        _ = self.node
        return str(self)

    def __enter__(self) -> Any:
        _stack.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        del _stack[len(_stack) - 1 - _stack[::-1].index(self)]  # the innermost use


def resolve_lengths(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the length of every axis, -1 being what is left of `ranks`; a MeshError where they do not multiply."""
    for axis, n in axes.items():
        if isinstance(n, bool) or not isinstance(n, int) or (n < 1 and n != -1):
            raise MeshError(f"axis {axis!r} has length {n!r}; lengths are integers of at least 1, or one -1")
    open_axes = [a for a, n in axes.items() if n == -1]
    known = prod(n for n in axes.values() if n != -1)
    shown = " x ".join(f"{a}={n}" for a, n in axes.items())
    if len(open_axes) > 1:
        raise MeshError(f"only one axis may be -1, got {shown}")
    if open_axes:
        if ranks % known:
            cure = f"start a multiple of {known}, or change an axis"
            raise MeshError(f"{ranks} ranks cannot be divided by {known} of mesh {shown}; {cure}")
        return {a: ranks // known if n == -1 else n for a, n in axes.items()}
    if known != ranks:
        raise MeshError(f"mesh {shown} needs {known} ranks, there are {ranks}; start {known} or change an axis to -1")
    return dict(axes)


def unravel(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinates of a rank in a grid of `sizes`, row-major."""
    place = []
    for n in reversed(sizes):
        place.append(rank % n)
        rank //= n
    return tuple(reversed(place))
