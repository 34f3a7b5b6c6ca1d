"""Attention over tokens that are split: context parallelism.

Three schemes with one result, on the N parts of the tokens. With M the elements of the whole query (or result), K those
of the whole key (or value), all of the samples and heads at hand, a rank sends in the forward pass

================ ============================================ =============================================
`context`        elements a rank sends                        messages
================ ============================================ =============================================
``"ring"``       2 K (N-1)/N, or less where not all are seen  N-1 to the next rank, behind the computation
``"all_to_all"`` (2 M + 2 K r) / N (N-1)/N                    4 all-to-alls
``"gather"``     2 K (N-1)/N                                  2 all-gathers
================ ============================================ =============================================

and in the backward pass

- ``"ring"``: twice that, keys and values once more and their gradients (in float32 where they are half precision);
- ``"all_to_all"``: the same again;
- ``"gather"``: the same again, as two reduce-scatters.

``"ring"`` (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889): keys and values travel, partial results are merged by the
logarithms of their sums. A rank holds three blocks of keys. Those that no query of a rank can see, by causal or window,
are not computed there, and go no further than to the last rank that needs them: causal, in natural order, that is half
of the words in all, but the last rank has 2 N - 1 times the work of the first. ``order="zigzag"`` gives all the same.

``"all_to_all"`` (Jacobs et al. 2023, arXiv:2309.14509, "Ulysses"): heads are split in place of tokens by an all-to-all
each of query, key, value and result; each rank then attends with its heads over all tokens. Heads follow the block
rule: N need not divide them, and ranks may have none. Where groups share fewer key heads than N, the heads of key and
value are repeated r times first, the least that gives every query head its key head on the same rank (G r a multiple of
N, else r = H / G).

``"gather"``: each rank holds all keys and values, forward and until the gradient.

``"auto"`` is ``"all_to_all"`` where the heads divide evenly and it sends no more than the ring, or where the ring would
leave ranks idle (causal without a window, tokens in natural order); else ``"ring"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.layout.sequence import zigzag
from hpcpar.ops.attention_layouts import AttentionLayouts, attention_layouts
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.local_attention import Numbers, Sight, local_attention
from hpcpar.ops.repartition import repartition
from hpcpar.ops.ring_attention import ring_attention, ring_routes
from hpcpar.ops.shape import Permute
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor

__all__ = ["CONTEXTS", "attend", "zigzag"]

CONTEXTS = ("auto", "ring", "all_to_all", "gather")


def attend(operands: Sequence[Tensor], sight: Sight, numbers: Numbers, order: str, context: str) -> Tensor:
    """Return attention of (query, key, value, [documents], [mask]), by a scheme where tokens are split."""
    if not any(t.sig.dims[-2] for t in operands[:3]):
        return local_attention(tuple(operands), (sight,), numbers)
    lay = _layouts(operands, sight)
    if order == "zigzag":
        sight = sight._replace(turns=lay.parts)
    if not lay.keys_split:
        return local_attention(tuple(operands), (sight,), numbers)
    scheme = choose(lay, sight) if context == "auto" else context
    if scheme == "ring":
        return ring_attention(tuple(operands), (sight,), numbers)
    return (_by_heads if scheme == "all_to_all" else _gathered)(operands, lay, sight, numbers)


def _layouts(operands: Sequence[Tensor], sight: Sight) -> AttentionLayouts:
    """The layouts of attention, remembered as rules are."""
    sigs = tuple(t.sig for t in operands)
    key = ("attention layouts", sight, sigs)
    found: Any = sigs[0].rules.get(key)
    if found is None:
        found = sigs[0].rules[key] = attention_layouts(sigs, sight.documents, sight.mask)
    return found


def choose(lay: AttentionLayouts, sight: Sight) -> str:
    """Return the scheme of ``context="auto"``, from layouts alone."""
    out, (query, key, value), parts = lay.out, lay.moves[:3], lay.parts
    if out.shape[-3] % _head_parts(lay):
        return "ring"
    if sight.causal and sight.window is None and sight.turns == 1:
        return "all_to_all"
    routes, sizes = ring_routes(lay, sight)
    hops = sum((f + b) * size for f, b, size in zip(routes.forward, routes.backward, sizes, strict=True))
    width = (key.shape[-1] + value.shape[-1]) * key.shape[-3] / prod(out.mesh.shape[a] for a in key.dims[-3])
    heads = out.shape[-3] / prod(out.mesh.shape[a] for a in lay.split_heads)
    moved = key.shape[-2] * width * repeats(lay) + out.shape[-2] * heads * (query.shape[-1] + out.shape[-1])
    return "all_to_all" if moved * (parts - 1) / parts <= hops * width else "ring"


def repeats(lay: AttentionLayouts) -> int:
    """Return how many times key heads are repeated before they are split over the ranks that shared the tokens."""
    h, g, parts = lay.out.shape[-3], lay.moves[1].shape[-3], _head_parts(lay)
    per_key = h // g if g else 1
    return next((r for r in range(1, per_key) if per_key % r == 0 and g * r % parts == 0), per_key)


def _head_parts(lay: AttentionLayouts) -> int:
    """Into how many blocks heads are split once they are in place of the tokens."""
    return prod(lay.out.mesh.shape[a] for a in (*lay.split_heads, *lay.tokens))


def _gathered(operands: Sequence[Tensor], lay: AttentionLayouts, sight: Sight, numbers: Numbers) -> Tensor:
    """Keys and values are all-gathered along the tokens; autograd reduce-scatters their partial gradients."""
    key, value = (repartition(t, lay.moves[1].layout.replace(t.ndim - 2, None)) for t in operands[1:3])
    return local_attention((operands[0], key, value, *operands[3:]), (sight,), numbers)


def _by_heads(operands: Sequence[Tensor], lay: AttentionLayouts, sight: Sight, numbers: Numbers) -> Tensor:
    """Heads are split in place of tokens, and back."""
    heads = (*lay.split_heads, *lay.tokens)
    whole = Layout(*lay.lead, heads)
    query, key, value, *rest = operands
    times = repeats(lay)
    if times > 1:
        key, value = (_repeat_heads((t,), (times,)) for t in (key, value))
    query, key, value = (_moved(t, whole) for t in (query, key, value))
    if sight.documents:
        rest[0] = repartition(rest[0], Layout(lay.lead[0]))
    if sight.mask:
        n, h = rest[-1].shape[:2]
        rest[-1] = repartition(rest[-1], Layout(lay.lead[0] if n > 1 else None, heads if h > 1 else None))
    out = local_attention((query, key, value, *rest), (sight,), numbers)
    return _moved(out, lay.out.layout)


class _Turn(Permute):
    """Dims in another order, on the way to a move."""

    logged = False


class _RepeatHeads(Op):
    """(..., G, S, E) with each head repeated r times: (..., G r, S, E)."""

    name = "repeat_heads"
    linear = "each"
    logged = False

    def rule(self, sigs: tuple[Signature, ...], times: int) -> Rule:
        x = sigs[0].resolved
        *lead, g, length, width = x.shape
        out = x.with_shape((*lead, g * times, length, width))
        return Rule(out, [x], [x], sigs, times)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return np.repeat(arrays[0], rule.plan, axis=arrays[0].ndim - 3), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        *lead, heads, length, width = g.shape
        return (g.reshape(*lead, heads // rule.plan, rule.plan, length, width).sum(axis=len(lead) + 1),)


_turn, _repeat_heads = _Turn(), _RepeatHeads()


def _moved(x: Tensor, layout: Layout) -> Tensor:
    """x (..., H, L, E) under another layout, lying (..., L, H, E) in memory.

    Moves of 4 and 5 dims arrive with dim 1 last in memory: here that is to be the width.
    """
    last = x.ndim - 1
    if last > 4:
        return repartition(x, layout)
    order = (0, last, *range(1, last - 2), last - 1, last - 2)
    back = tuple(order.index(d) for d in range(x.ndim))
    moved = repartition(_turn((x,), (order,)), Layout(*[layout.entry(d) for d in order]))
    return _turn((moved,), (back,))
