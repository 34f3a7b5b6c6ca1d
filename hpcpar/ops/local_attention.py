"""Attention on one rank's arrays: how they are handed to the kernels, and the operation that needs no message."""

from __future__ import annotations

from collections.abc import Sequence
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
    """

    causal: bool = False
    window: Window = None
    turns: int = 1
    documents: bool = False
    mask: bool = False


class Numbers(NamedTuple):
    """What may change from call to call: the factor of the scores; seed, stream and probability of dropout."""

    scale: float
    dropout: tuple[int, int, float] | None


class AttentionPlan:
    """Where the queries and keys of this rank are, and how they are handed to the kernels."""

    def __init__(self, lay: AttentionLayouts, sight: Sight) -> None:
        self.sight, self.heads, self.out = sight, lay.heads, lay.out
        query, key = lay.moves[:2]
        self.scores = (*query.shape[:3], key.shape[2])
        self.offset = (query.box[0][0], query.box[1][0])
        self.queries, self.key_heads = query.box[2], key.local_shape[1]
        self.q_positions = self.positions_of(query.shape[2], self.queries)
        self.k_positions = self.positions_of(key.shape[2], key.box[2])

    def positions_of(self, n: int, block: tuple[int, int]) -> np.ndarray | None:
        """Positions of a block of tokens; None for all of them in the natural order."""
        whole = block == (0, n) and self.sight.turns == 1
        return None if whole else positions(n, self.sight.turns)[slice(*block)]

    def operands(self, arrays: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Return query, key and value with the heads in use, documents, mask; None where there is none."""
        query, key, value, *rest = arrays
        documents = rest.pop(0) if self.sight.documents else None
        mask = rest.pop(0) if self.sight.mask else None
        return query, self.heads.take(key), self.heads.take(value), documents, mask

    def visible(self, documents: Any, mask: Any) -> Visible:
        """The conditions for the keys at hand."""
        mine = None if documents is None else documents[:, slice(*self.queries)]
        return Visible(self.sight.causal, self.sight.window, self.q_positions, self.k_positions, mine, documents, mask)

    def dropout(self, numbers: Numbers) -> AttentionDropout | None:
        """The dropout of the kernels."""
        return None if numbers.dropout is None else AttentionDropout(*numbers.dropout, self.scores, self.offset)


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
        visible, dropout = plan.visible(documents, mask), plan.dropout(extra)
        out, lse = kernels.attention_forward(query, key, value, extra.scale, visible, dropout)
        return out, (*arrays, out, lse, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        plan: AttentionPlan = rule.plan
        *arrays, out, lse, extra = saved
        query, key, value, documents, mask = plan.operands(arrays)
        visible, dropout = plan.visible(documents, mask), plan.dropout(extra)
        wanted = plan.sight.mask and needs[-1]
        dq, dk, dv, *dmask = kernels.attention_backward(
            g, query, key, value, out, lse, extra.scale, visible, dropout, wanted
        )
        grads = [dq, plan.heads.give_back(dk, plan.key_heads), plan.heads.give_back(dv, plan.key_heads)]
        grads += [None] * (len(needs) - 3)
        if wanted:
            grads[-1] = dmask[0].astype(mask.dtype, copy=False)
        return grads

    def flops(self, rule: Rule) -> int:
        """Of the pairs that causal and window leave; two products a pair."""
        (n, h, length, keys), sight = rule.plan.scores, rule.plan.sight
        pairs = visible_pairs(length, keys, sight.causal, sight.window)
        return 2 * n * h * pairs * (rule.grads[0].shape[3] + rule.out.shape[3])


local_attention = Attention()
