"""Ring attention over the tokens of a grid: as over a sequence, with the blocks of the grid in place of its parts.

Keys and values of a block travel past the queries of all others. Blocks have as many tokens as the product of their
lengths says, so they may differ by more than one; which tokens they are does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from hpcpar.kernels import Visible
from hpcpar.layout.sequence import routes
from hpcpar.ops.core import Rule
from hpcpar.ops.local_attention import Numbers, Sight
from hpcpar.ops.ring_attention import RingAttention
from hpcpar.primitives.ring import Ring, places
from hpcpar.signature import Signature


class GridRingPlan:
    """The blocks of a grid (N, H, *grid, E) and their ways: what `RingAttention` asks of its plan.

    Attributes
    ----------
    sight : Sight
        That of tokens which all see each other.
    sizes : list of int
        Tokens of each block, row-major over the axes of the grid.
    part : int
        This rank's block.
    """

    def __init__(self, query: Signature, compute_dtype: str) -> None:
        self.sight = Sight(compute_dtype=compute_dtype)
        mesh, stack = query.mesh, grid_axes(query)
        self._own = query.local_shape[2:-1]
        places_of = [dict(zip(stack, at, strict=True)) for at in product(*[range(mesh.shape[a]) for a in stack])]
        boxes = [query.box_at({**mesh.coords, **at})[2:-1] for at in places_of]
        self.sizes = [prod(b - a for a, b in box) for box in boxes]
        self.part = places_of.index({a: mesh.index(a) for a in stack})
        self.blocks = [slice(0, size) for size in self.sizes]
        # blocks without tokens neither travel nor ask
        self.needs = [[mine > 0 and theirs > 0 for theirs in self.sizes] for mine in self.sizes]
        ways = routes(self.needs, self.sizes)
        self.ring = Ring(mesh.comm(*stack), places(mesh, stack), self.part, ways, self.needs)

    def needed(self, j: int | None) -> bool:
        """Whether block `j` is looked at here."""
        return j is not None and self.needs[self.part][j]

    def sight_of(self, j: int, documents: Any, mask: Any) -> Visible:
        """Every key is seen."""
        return Visible()

    def parts(self, numbers: Numbers) -> list[tuple[slice, None]]:
        """All samples at once."""
        return [(slice(None), None)]

    def flat(self, a: Any) -> Any:
        """(N, H, *grid, E) as (N, H, S, E)."""
        return flat_tokens(a)

    def unflat(self, a: Any) -> Any:
        """Inverse of `flat`."""
        return a.reshape(*a.shape[:2], *self._own, a.shape[-1])

    def operands(self, arrays: Sequence[Any]) -> tuple[Any, Any, Any, None, None]:
        """Query, key and value; neither documents nor mask."""
        query, key, value = map(flat_tokens, arrays)
        return query, key, value, None, None

    def gradients(self, dq: Any, dk: Any, dv: Any, dmask: None, count: int) -> list[Any]:
        """Gradients in the shapes of the operands."""
        return [self.unflat(d) for d in (dq, dk, dv)]


class GridRingAttention(RingAttention):
    """Attention whose queries and keys are blocks of one grid."""

    name = "grid_ring_attention"

    def rule(self, sigs: tuple[Signature, ...], compute_dtype: str) -> Rule:
        q = sigs[0].resolved
        moves = [sig.with_layout(q.layout) for sig in sigs]
        out = q.with_shape((*q.shape[:-1], sigs[2].shape[-1]))
        return Rule(out, moves, moves, sigs, GridRingPlan(q, compute_dtype))

    def flops(self, rule: Rule) -> int:
        return attention_flops(rule)


def attention_flops(rule: Rule) -> int:
    """Two products a pair of tokens, of all samples and heads."""
    n, h, *grid, e = rule.grads[0].shape
    return 2 * n * h * prod(grid) ** 2 * (e + rule.out.shape[-1])


def grid_axes(sig: Signature) -> tuple[str, ...]:
    """Return the axes that split the grid of (N, H, *grid, E)."""
    return tuple(a for stack in sig.dims[2:-1] for a in stack)


def flat_tokens(a: Any) -> Any:
    """Return local (N, H, *grid, E) as (N, H, S, E)."""
    return a.reshape(*a.shape[:2], prod(a.shape[2:-1]), a.shape[-1])


grid_ring_attention = GridRingAttention()
