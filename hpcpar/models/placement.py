"""How a network for volumes lies on a mesh: which axes split samples, channels and space."""

from __future__ import annotations

from dataclasses import dataclass
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
    """The axes that split samples, the channels of weights, and the spatial dims.

    Attributes
    ----------
    batch, channels : tuple of str
    space : tuple of (tuple of str)
        For depth, height and width.
    """

    batch: Axes = ("batch",)
    channels: Axes = ("model",)
    space: tuple[Axes, ...] = (("depth",), ("height",), ("width",))

    def on(self, mesh: Mesh) -> Spread:
        """Return the same without axes that the mesh does not have."""

        def there(axes: Axes) -> Axes:
            return tuple(a for a in axes if a in mesh.shape)

        return Spread(there(self.batch), there(self.channels), tuple(there(s) for s in self.space))

    @property
    def volume(self) -> Layout:
        """Layout of (N, C, D, H, W) whose channels are whole."""
        return Layout(self.batch, None, *self.space)

    @property
    def labels(self) -> Layout:
        """Layout of (N, D, H, W)."""
        return Layout(self.batch, *self.space)

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
    return [f"{name}: {entry!r}" for name, entry in plan.items()]
