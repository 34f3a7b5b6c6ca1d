"""Attention on one rank's arrays: how they are handed to the kernels, and the operation that needs no message."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hpcpar import kernels
from hpcpar.kernels import AttentionDropout, Visible
from hpcpar.layout.layout import LayoutError
from hpcpar.layout.sequence import Window, positions, visible_pairs
from hpcpar.ops.attention_layouts import NAME, AttentionLayouts, attention_layouts
from hpcpar.ops.core import Op, Rule
from hpcpar.signature import Signature


class Sight(NamedTuple):
    """What decides which keys a query sees, as far as it is the same in every call: part of the rule of the operation.

    Attributes
    ----------
    turns : int
        Among how many ranks the tokens are laid out in zigzag; 1 is the natural order.
    documents, mask : bool
        Whether there are such operands.
    compute_dtype : str
        In which operands are multiplied.
    """

    causal: bool = False
    window: Window = None
    turns: int = 1
    documents: bool = False
    mask: bool = False
    compute_dtype: str = "float32"


class Numbers(NamedTuple):
    """What may change from call to call: the factor of the scores; seed, stream and probability of dropout."""

    scale: float
    dropout: tuple[int, int, float] | None


class AttentionPlan:
    """Where the queries and keys of this rank are, and how kernels get them: all dims before the heads as one.

    Attributes
    ----------
    scores : (int, int, int, int)
        Global shape of the scores (samples, heads, queries, keys).
    samples : list of (slice, int)
        Runs of the samples at hand that follow each other globally, and the global number of the first.
    """

    def __init__(self, lay: AttentionLayouts, sight: Sight) -> None:
        self.sight, self.heads, self.out = sight, lay.heads, lay.out
        query, key = lay.moves[:2]
        self._lead = query.local_shape[:-3]
        self.scores = (prod(query.shape[:-3]), *query.shape[-3:-1], key.shape[-2])
        self.samples = _sample_runs(query.shape[:-3], query.box[:-3])
        self.first_head, self.key_heads = query.box[-3][0], key.local_shape[-3]
        self.queries = query.box[-2]
        self.q_positions = self.positions_of(query.shape[-2], self.queries)
        self.k_positions = self.positions_of(key.shape[-2], key.box[-2])

    def positions_of(self, n: int, block: tuple[int, int]) -> np.ndarray | None:
        """Positions of a block of tokens; None for all of them in the natural order."""
        whole = block == (0, n) and self.sight.turns == 1
        return None if whole else positions(n, self.sight.turns)[slice(*block)]

    def flat(self, array: Any) -> Any:
        """Return (..., H, L, E) as (samples, H, L, E)."""
        if len(self._lead) == 1:
            return array
        return array.reshape(prod(self._lead), *array.shape[-3:])

    def unflat(self, array: Any) -> Any:
        """Inverse of `flat`."""
        return array if len(self._lead) == 1 else array.reshape(*self._lead, *array.shape[1:])

    def operands(self, arrays: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Return query, key and value with the heads in use, documents, mask; None where there is none."""
        query, key, value, *rest = arrays
        documents = rest.pop(0) if self.sight.documents else None
        mask = rest.pop(0) if self.sight.mask else None
        key, value = (self.heads.take(self.flat(a)) for a in (key, value))
        return self.flat(query), key, value, documents, mask

    def visible(self, documents: Any, mask: Any) -> Visible:
        """The conditions for the keys at hand."""
        mine = None if documents is None else documents[:, slice(*self.queries)]
        return Visible(self.sight.causal, self.sight.window, self.q_positions, self.k_positions, mine, documents, mask)

    def gradients(self, dq: Any, dk: Any, dv: Any, dmask: Any, count: int) -> list[Any]:
        """Return the gradients of all `count` operands; that of the mask, the last, may be None."""
        grads = [dq, *[self.heads.give_back(a, self.key_heads) for a in (dk, dv)]]
        return [*map(self.unflat, grads), *[None] * (count - 4), dmask][:count]

    def parts(self, numbers: Numbers) -> list[tuple[slice, AttentionDropout | None]]:
        """The samples, all at once; with dropout in runs, each with the dropout of the kernels."""
        if numbers.dropout is None:
            return [(slice(None), None)]
        return [
            (run, AttentionDropout(*numbers.dropout, self.scores, (first, self.first_head)))
            for run, first in self.samples
        ]


def _sample_runs(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> list[tuple[slice, int]]:
    """Cut a box of samples, the dims before the heads, into runs that follow each other globally."""
    split = [d for d, (n, (a, b)) in enumerate(zip(shape, box, strict=True)) if (a, b) != (0, n)]
    inner = split[-1] if split else 0  # whole rows behind the last dim that is split
    length = prod(b - a for a, b in box[inner:])
    runs = []
    for i, index in enumerate(np.ndindex(*[b - a for a, b in box[:inner]])):
        first = 0
        for n, (a, _), at in zip(shape, box, (*index, *[0] * (len(shape) - inner)), strict=True):
            first = first * n + a + at
        runs.append((slice(i * length, (i + 1) * length), first))
    return runs or [(slice(0, 0), 0)]


def _joined(parts: Sequence[Any]) -> Any:
    """Samples one behind the other; (N, H, L, E) lies (N, L, H, E) in memory."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim < 4:
        return np.concatenate(parts)
    return np.concatenate([a.transpose(0, 2, 1, 3) for a in parts]).transpose(0, 2, 1, 3)


class Attention(Op):
    """Attention of queries to keys that are all here, whole or not needed elsewhere: no message."""

    name = "attention"
    linear = "value"

    def rule(self, sigs: tuple[Signature, ...], sight: Sight) -> Rule:
        lay = attention_layouts(sigs, sight.documents, sight.mask)
        if lay.keys_split:
            raise LayoutError(f"{NAME}: the tokens of key and value are split: {sigs[1]!r}; gather them first")
        return Rule(lay.out, lay.moves, lay.grads, sigs, AttentionPlan(lay, sight))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Numbers) -> tuple[Any, Any]:
        plan: AttentionPlan = rule.plan
        query, key, value, documents, mask = plan.operands(arrays)
        visible = plan.visible(documents, mask)
        found = [
            kernels.attention_forward(
                query[n], key[n], value[n], extra.scale, visible, dropout, plan.sight.compute_dtype
            )
            for n, dropout in plan.parts(extra)
        ]
        out, lse = (_joined(parts) for parts in zip(*found, strict=True))
        return plan.unflat(out), (*arrays, out, lse, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        plan: AttentionPlan = rule.plan
        *arrays, out, lse, extra = saved
        query, key, value, documents, mask = plan.operands(arrays)
        visible, wanted, g = plan.visible(documents, mask), plan.sight.mask and needs[-1], plan.flat(g)
        found = [
            kernels.attention_backward(
                g[n], query[n], key[n], value[n], out[n], lse[n], extra.scale, visible, dropout, wanted,
                plan.sight.compute_dtype,
            )  # fmt: skip
            for n, dropout in plan.parts(extra)
        ]
        dq, dk, dv = (_joined(parts) for parts in list(zip(*found, strict=True))[:3])
        dmask = sum(parts[3] for parts in found).astype(mask.dtype, copy=False) if wanted else None
        return plan.gradients(dq, dk, dv, dmask, len(needs))

    def rounding(self, rule: Rule) -> float:
        return kernels.ROUNDINGS[rule.plan.sight.compute_dtype]

    def flops(self, rule: Rule) -> int:
        """Of the pairs that causal and window leave; two products a pair."""
        (n, h, length, keys), sight = rule.plan.scores, rule.plan.sight
        pairs = visible_pairs(length, keys, sight.causal, sight.window)
        return 2 * n * h * pairs * (rule.grads[0].shape[-1] + rule.out.shape[-1])


local_attention = Attention()
