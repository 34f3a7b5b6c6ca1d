"""Ring attention: keys and values travel past the queries, their gradients travel home.

See `hpcpar.ops.context`. At each step a rank attends to the block of keys it holds while the block goes on to the next
rank; what the blocks give is merged by the logarithms of their sums. Messages progress only inside MPI calls, so while
some are under way the work is cut by heads and samples, with a test between the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hpcpar import kernels
from hpcpar.kernels import AttentionDropout, Visible, array_module
from hpcpar.layout.blocks import owned
from hpcpar.layout.sequence import Routes, intervals, routes, sees
from hpcpar.ops.attention_layouts import AttentionLayouts, attention_layouts
from hpcpar.ops.core import Rule
from hpcpar.ops.local_attention import Attention, AttentionPlan, Numbers, Sight
from hpcpar.ops.overlap import overlapping
from hpcpar.primitives.ring import Homecoming, Passing, Ring, places
from hpcpar.signature import Signature

PIECES = 8
"""Into how many pieces, about, the work on a block is cut while messages are under way."""


def ring_needs(lay: AttentionLayouts, sight: Sight) -> list[list[bool]]:
    """Return which part of the queries sees any key of which part, by causal and window."""
    n, keys, parts = lay.out.shape[-2], lay.moves[1].shape[-2], lay.parts
    order = "natural" if sight.turns == 1 else "zigzag"
    queries, blocks = ([intervals(m, parts, r, order) for r in range(parts)] for m in (n, keys))
    return [[sees(q, k, sight.causal, sight.window) for k in blocks] for q in queries]


def ring_routes(lay: AttentionLayouts, sight: Sight) -> tuple[Routes, list[int]]:
    """Return how far the block of each part travels, and its number of keys."""
    keys, parts = lay.moves[1].shape[-2], lay.parts
    bounds = [owned(keys, parts, r) for r in range(parts)]
    sizes = [b - a for a, b in bounds]
    return routes(ring_needs(lay, sight), sizes), sizes


class Piece(NamedTuple):
    """A part of the work on one block: samples, heads of the query and of the key, and their dropout."""

    samples: slice
    heads: slice
    groups: slice
    dropout: AttentionDropout | None

    @property
    def query(self) -> tuple[slice, slice]:
        """Index of arrays (N, H, ...)."""
        return self.samples, self.heads

    @property
    def key(self) -> tuple[slice, slice]:
        """Index of arrays (N, G, ...)."""
        return self.samples, self.groups


class RingPlan(AttentionPlan):
    """Where the keys of every part are, and their ways."""

    def __init__(self, lay: AttentionLayouts, sight: Sight) -> None:
        super().__init__(lay, sight)
        mesh, stack, keys, count = lay.out.mesh, lay.tokens, lay.moves[1].shape[-2], lay.parts
        self.part = lay.out.part_index(len(lay.out.shape) - 2, mesh.coords)
        self.needs = ring_needs(lay, sight)
        self.ways, self.sizes = ring_routes(lay, sight)
        self.ring = Ring(mesh.comm(*stack), places(mesh, stack), self.part, self.ways, self.needs)
        self.blocks = [slice(*owned(keys, count, j)) for j in range(count)]
        self.positions = [self.positions_of(keys, (b.start, b.stop)) for b in self.blocks]

    def needed(self, j: int) -> bool:
        """Whether a query here sees any key of block `j`."""
        return self.needs[self.part][j]

    def sight_of(self, j: int, documents: Any, mask: Any) -> Visible:
        """The conditions for the keys of block `j`."""
        block = self.blocks[j]
        visible = replace(self.visible(documents, mask), k_positions=self.positions[j])
        if documents is not None:
            visible = replace(visible, k_documents=documents[:, block])
        if mask is not None and mask.shape[3] > 1:
            visible = replace(visible, mask=mask[..., block])
        return visible


class Packed:
    """Keys and values (or gradients) of one block as one message: (N, S, G, E), and behind it (N, S, G, V)."""

    def __init__(self, key: Any, value: Any, sizes: Sequence[int]) -> None:
        n, g, _, e = key.shape
        self._lead, self._widths = (n, g), (e, value.shape[3])
        self.words = [n * size * g * (e + value.shape[3]) for size in sizes]
        self._sizes = sizes

    def views(self, flat: Any, j: int) -> tuple[Any, Any]:
        """Key and value (N, G, S, E) and (N, G, S, V) of the packed block `j`."""
        (n, g), size, start = self._lead, self._sizes[j], 0
        found = []
        for width in self._widths:
            stop = start + n * size * g * width
            found.append(flat[start:stop].reshape(n, size, g, width).transpose(0, 2, 1, 3))
            start = stop
        return found[0], found[1]

    def pack(self, key: Any, value: Any, j: int) -> Any:
        """One array of both."""
        flat = array_module(key).empty((self.words[j],), key.dtype)
        for view, array in zip(self.views(flat, j), (key, value), strict=True):
            view[...] = array
        return flat

    def zeros(self, like: Any, dtype: np.dtype, j: int) -> Any:
        """Zeros in the place of block `j`."""
        return array_module(like).zeros((self.words[j],), dtype)


class RingAttention(Attention):
    """Attention whose keys are split over the same ranks as its queries."""

    def rule(self, sigs: tuple[Signature, ...], sight: Sight) -> Rule:
        lay = attention_layouts(sigs, sight.documents, sight.mask)
        return Rule(lay.out, lay.moves, lay.grads, sigs, RingPlan(lay, sight))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Numbers) -> tuple[Any, Any]:
        plan: RingPlan = rule.plan
        query, key, value, documents, mask = plan.operands(arrays)
        packed = Packed(key, value, plan.sizes)
        own = packed.pack(key, value, plan.part)
        result = _Result(plan, query, value.shape[3], extra)
        for _, here, moving in plan.ring.visits(own, packed.words, overlapping()):
            for _, j, flat in here:
                if plan.needed(j):
                    result.add(*packed.views(flat, j), plan.sight_of(j, documents, mask), moving)
        out, lse = result.done(key, value, query.dtype)
        return plan.unflat(out), (*arrays, out, lse, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        plan: RingPlan = rule.plan
        *arrays, out, lse, extra = saved
        query, key, value, documents, mask = plan.operands(arrays)
        work = _Gradient(plan, (plan.flat(g), query, out, lse), extra, mask if plan.sight.mask and needs[-1] else None)
        packed = Packed(key, value, plan.sizes)
        own = packed.pack(key, value, plan.part)
        coming = Homecoming(plan.ring, packed.words, packed.zeros(own, work.dtype, plan.part))
        for t, here, moving in plan.ring.visits(own, packed.words, overlapping()):
            sums: dict[int, Any] = {}
            for d, j, flat in here:
                if plan.needed(j):
                    into = packed.zeros(own, work.dtype, j) if t else coming.total
                    visible = plan.sight_of(j, documents, mask)
                    both = [m for m in (moving, coming.under_way) if m is not None]
                    work.add(packed.views(flat, j), packed.views(into, j), visible, plan.blocks[j], both)
                    sums[d] = into
            coming.hand_over(t, sums)
        dk, dv = packed.views(coming.finish().astype(key.dtype, copy=False), plan.part)
        dmask = None if work.dmask is None else work.dmask.astype(mask.dtype, copy=False)
        return plan.gradients(work.dq.astype(query.dtype, copy=False), dk, dv, dmask, len(needs))


def _pieces(plan: RingPlan, numbers: Numbers, query: Any, groups: int, under_way: bool) -> Iterator[Piece]:
    """Cut samples and groups of heads, which do not depend on each other, into a few pieces; dropout wants runs."""
    n, heads = query.shape[:2]
    per_key = heads // groups if groups else 1
    by_group = max(min(groups, PIECES), 1) if under_way else 1
    by_sample = max(min(n, PIECES // by_group), 1) if under_way else 1
    for run, dropout in plan.parts(numbers):
        start, stop, _ = run.indices(n)
        for i in range(by_sample):
            a, b = owned(stop - start, by_sample, i)
            for k in range(by_group):
                c, d = owned(groups, by_group, k)
                own = None
                if dropout is not None:
                    own = replace(dropout, offset=(dropout.offset[0] + a, dropout.offset[1] + c * per_key))
                yield Piece(slice(start + a, start + b), slice(c * per_key, d * per_key), slice(c, d), own)


def _visible_of(visible: Visible, piece: Piece) -> Visible:
    """The conditions for a piece."""
    changed: dict[str, Any] = {}
    if visible.q_documents is not None:
        changed = {"q_documents": visible.q_documents[piece.samples], "k_documents": visible.k_documents[piece.samples]}
    if visible.mask is not None:
        changed["mask"] = visible.mask[_mask_index(visible.mask, piece)]
    return replace(visible, **changed) if changed else visible


def _mask_index(mask: Any, piece: Piece) -> tuple[slice, slice]:
    return tuple(s if n > 1 else slice(None) for s, n in zip(piece.query, mask.shape, strict=False))


class _Result:
    """The running result of the forward pass, to which blocks of keys are added."""

    def __init__(self, plan: RingPlan, query: Any, width: int, numbers: Numbers) -> None:
        self._plan, self._query, self._numbers = plan, query, numbers
        n, h, length, _ = query.shape
        dtype = np.float32 if query.dtype.itemsize == 2 else query.dtype
        make = array_module(query).empty
        self._out = make((n, length, h, width), dtype).transpose(0, 2, 1, 3)
        self._lse = make((n, h, length), dtype)
        self._any = False

    def add(self, key: Any, value: Any, visible: Visible, moving: Passing | None) -> None:
        """Attend to one more block of keys."""
        query, out, lse = self._query, self._out, self._lse
        for piece in _pieces(self._plan, self._numbers, query, key.shape[1], moving is not None and moving.busy):
            q, k, v, seen = query[piece.query], key[piece.key], value[piece.key], _visible_of(visible, piece)
            found = kernels.attention_forward(
                q, k, v, self._numbers.scale, seen, piece.dropout, self._plan.sight.compute_dtype
            )
            if self._any:
                found = kernels.attention_merge(out[piece.query], lse[piece.query], *found)
            out[piece.query], lse[piece.query] = found
            if moving is not None:
                moving.test()
        self._any = True

    def done(self, key: Any, value: Any, dtype: np.dtype) -> tuple[Any, Any]:
        """Return the result, in `dtype`, and the logarithms of the sums."""
        if not self._any:  # no query here sees any key
            self.add(key[:, :, :0], value[:, :, :0], Visible(), None)
        return self._out.astype(dtype, copy=False), self._lse


class _Gradient:
    """The running gradient of the queries (and of the mask) in the backward pass."""

    def __init__(self, plan: RingPlan, given: tuple[Any, Any, Any, Any], numbers: Numbers, mask: Any) -> None:
        self._plan, self._numbers = plan, numbers
        self._g, self._query, self._out, self._lse = given
        n, h, length, e = self._query.shape
        self.dtype = np.dtype(np.float32) if self._query.dtype.itemsize == 2 else self._query.dtype
        make = array_module(self._query).zeros
        self.dq = make((n, length, h, e), self.dtype).transpose(0, 2, 1, 3)
        self.dmask = None if mask is None else make(mask.shape, self.dtype)

    def add(
        self, block: tuple[Any, Any], into: tuple[Any, Any], visible: Visible, keys: slice, moving: list[Passing]
    ) -> None:
        """Add what one block of keys gives to dq and, in `into`, to the gradients of the block."""
        (key, value), (dk, dv) = block, into
        for piece in _pieces(self._plan, self._numbers, self._query, key.shape[1], any(m.busy for m in moving)):
            mine = [a[piece.query] for a in (self._g, self._query, self._out, self._lse)]
            dq, one, other, *dmask = kernels.attention_backward(
                mine[0], mine[1], key[piece.key], value[piece.key], mine[2], mine[3], self._numbers.scale,
                _visible_of(visible, piece), piece.dropout, self.dmask is not None, self._plan.sight.compute_dtype,
            )  # fmt: skip
            self.dq[piece.query] += dq
            dk[piece.key] += one
            dv[piece.key] += other
            if self.dmask is not None:
                index = (*_mask_index(self.dmask, piece), slice(None), keys if self.dmask.shape[3] > 1 else slice(None))
                self.dmask[index] += dmask[0]
            for m in moving:
                m.test()


ring_attention = RingAttention()
