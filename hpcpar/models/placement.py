"""How a network lies on a mesh: which axes split samples, channels, space or the tokens of a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh, MeshError
from hpcpar.names import did_you_mean, nearest
from hpcpar.nn import Module
from hpcpar.ops.attention import ORDERS
from hpcpar.ops.context import CONTEXTS
from hpcpar.parallel import parallelize
from hpcpar.parallel.plan import Entry
from hpcpar.signature import two_meshes

Axes = tuple[str, ...]

SCHEMES = ("switch", *CONTEXTS)
"""What `Spread.context` may be; a model serves `CONTEXTS` of them, or says which by an attribute `contexts`."""


@dataclass(frozen=True)
class Spread:
    """The axes that split samples, the channels of weights, and the extent of a sample; and how transformers use them.

    Attributes
    ----------
    batch, channels : tuple of str
    space : tuple of (tuple of str)
        For depth, height and width.
    sequence : tuple of str
        For the tokens of a text.
    sequence_parallel : bool
        Between the split parts of a block, tokens are split by `channels` too: all-gathers and reduce-scatters take
        the place of all-reduces, with the same bytes, and activations there take 1/p of the memory.
    context : {"auto", "ring", "all_to_all", "gather", "switch"}
        How attention serves a split of the tokens; see `functional.scaled_dot_product_attention`. ``"switch"`` is
        `SpaceTime`'s.
    order : {"natural", "zigzag"}
        The order in which tokens lie; zigzag gives each rank of a split sequence equal work in causal attention.
    shard_weights : bool
        Weights are also split by `batch` and `sequence`, and gathered where they are used.

    Raises
    ------
    TypeError, ValueError
        A field that is none of these, or an axis that would split two dims of one array.
    """

    batch: Axes = ("batch",)
    channels: Axes = ("model",)
    space: tuple[Axes, ...] = (("depth",), ("height",), ("width",))
    sequence: Axes = ("sequence",)
    sequence_parallel: bool = False
    context: str = "auto"
    order: str = "natural"
    shard_weights: bool = False

    def __post_init__(self) -> None:
        for field, axes in self._fields():
            if not isinstance(axes, tuple) or not all(isinstance(a, str) for a in axes):
                hint = f"({axes!r},)" if isinstance(axes, str) else '("batch",)'
                raise TypeError(f"Spread: {field} is a tuple of names of axes, like {hint}, got {axes!r}")
        for fields in (("batch", "space"), ("batch", "sequence")):
            uses = Counter(a for field, axes in self._fields() if field.split("[")[0] in fields for a in axes)
            twice = [a for a, n in uses.items() if n > 1]
            if twice:
                places = " and ".join(fields)
                raise ValueError(f"Spread: the axis {twice[0]!r} is named twice in {places}; an axis splits one dim")
        for name, choices in (("context", SCHEMES), ("order", ORDERS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"Spread: {name} is one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("sequence_parallel", "shard_weights"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Spread: {name} is True or False, got {getattr(self, name)!r}")

    def _fields(self) -> Iterator[tuple[str, Any]]:
        """Each field that holds axes, by name, and each of its dims."""
        if not isinstance(self.space, tuple) or len(self.space) != 3:
            raise TypeError(f"Spread: space is three tuples of axes, of depth, height and width, got {self.space!r}")
        yield from (("batch", self.batch), ("channels", self.channels), ("sequence", self.sequence))
        yield from ((f"space[{d}]", axes) for d, axes in enumerate(self.space))

    def on(self, mesh: Mesh) -> Spread:
        """Return the same without axes that the mesh does not have."""

        def there(axes: Axes) -> Axes:
            return tuple(a for a in axes if a in mesh.shape)

        return replace(
            self,
            batch=there(self.batch),
            channels=there(self.channels),
            space=tuple(there(s) for s in self.space),
            sequence=there(self.sequence),
        )

    @property
    def volume(self) -> Layout:
        """Layout of (N, C, D, H, W) whose channels are whole."""
        return Layout(self.batch, None, *self.space)

    @property
    def labels(self) -> Layout:
        """Layout of (N, D, H, W)."""
        return Layout(self.batch, *self.space)

    @property
    def tokens(self) -> Layout:
        """Layout of texts (N, S)."""
        return Layout(self.batch, self.sequence)

    @property
    def samples(self) -> Layout:
        """Layout of an array whose samples alone are split."""
        return Layout(self.batch)

    def parts(self, mesh: Mesh) -> tuple[int, ...]:
        """Return into how many blocks each spatial dim is split."""
        return tuple(prod(mesh.shape[a] for a in axes) for axes in self.space)


class Placeable(Protocol):
    """A network that says in one place how its layers lie."""

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return patterns of module names with their layouts."""
        ...


def place(model: Module, mesh: Mesh, spread: Spread | None = None) -> list[str]:
    """Lay `model` on `mesh` by its own plan, and return what the plan decided, in words.

    Parameters
    ----------
    model : Module
        With a method ``placements(mesh, spread)``.
    spread : Spread, optional
        The usual axis names by default; those of them that the mesh does not have split nothing.

    Raises
    ------
    MeshError
        `spread` names an axis that the mesh does not have, and that is none of the usual.
    ValueError
        A scheme of attention that the model does not serve.
    LayoutError
        The model lies on another mesh. All of these are raised on all ranks, before anything is changed.
    """
    spread = spread or Spread()
    _check(model, mesh, spread)
    spread = spread.on(mesh)
    plan = model.placements(mesh, spread)
    if plan:
        parallelize(model, plan)
    return [f"{name or type(model).__name__}: {entry!r}" for name, entry in plan.items()]


def _check(model: Module, mesh: Mesh, spread: Spread) -> None:
    """Refuse what a plan would not notice, or notice at the first step."""
    kind = type(model).__name__
    if not hasattr(model, "placements"):
        raise TypeError(f"place: a {kind} has no plan of its own, placements(mesh, spread); use parallelize")
    usual = {a for _, axes in Spread()._fields() for a in axes}
    for field, axes in spread._fields():
        for axis in axes:
            if axis not in mesh.shape and axis not in usual:
                has, hint = ", ".join(mesh.axes), did_you_mean(nearest(axis, mesh.axes))
                raise MeshError(f"place: Spread.{field} names the axis {axis!r}, the mesh has {has}{hint}")
    served = getattr(model, "contexts", CONTEXTS)
    if spread.context not in served:
        raise ValueError(f"place: context of a {kind} is one of {', '.join(served)}, got {spread.context!r}")
    for name, parameter in model.named_parameters():
        if parameter.mesh is not mesh:
            raise LayoutError(f"place: {two_meshes(name, parameter.mesh, 'the plan', mesh)}")
