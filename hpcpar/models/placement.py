"""How a network lies on a mesh: which axes split samples, channels, space or the tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.nn import Module
from hpcpar.parallel import parallelize
from hpcpar.parallel.plan import Entry

Axes = tuple[str, ...]


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
    context : {"auto", "ring", "all_to_all", "gather"}
        How attention serves a split of the tokens; see `functional.scaled_dot_product_attention`.
    order : {"natural", "zigzag"}
        The order in which tokens lie; zigzag gives each rank of a split sequence equal work in causal attention.
    shard_weights : bool
        Weights are also split by `batch` and `sequence`, and gathered where they are used.
    """

    batch: Axes = ("batch",)
    channels: Axes = ("model",)
    space: tuple[Axes, ...] = (("depth",), ("height",), ("width",))
    sequence: Axes = ("sequence",)
    sequence_parallel: bool = False
    context: str = "auto"
    order: str = "natural"
    shard_weights: bool = False

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
        The usual axis names by default; axes that the mesh does not have split nothing.
    """
    spread = (spread or Spread()).on(mesh)
    plan = model.placements(mesh, spread)
    if plan:
        parallelize(model, plan)
    return [f"{name or type(model).__name__}: {entry!r}" for name, entry in plan.items()]
