"""Attention over all tokens of a grid whose dims are split: every token of a volume sees every other one.

The tokens of a split grid are no sequence that could be split likewise: in the row-major order of (D, H, W) the tokens
of one rank are many short runs. But without an order of tokens attention needs no sequence. Each rank flattens what it
has, and the grid stays on the axes that split it:

- ``"all_to_all"`` (after Jacobs et al. 2023, arXiv 2309.14509): heads are split by the axes of the grid and tokens are
  whole, for the time of the attention. Query, key, value and result move once each: with p blocks
  ``4 (p - 1) / p^2 N S C`` words a rank forward and as many backward.
- ``"ring"`` (`ops.grid_ring`): keys and values travel past the queries, behind the computation:
  ``2 (p - 1) / p N S C`` words forward and twice that backward; a rank holds two blocks of them.
- ``"gather"``: the query stays, key and value are gathered, and their gradients are reduce-scattered:
  ``2 (p - 1) / p N S C`` words forward and as many backward; every rank holds all keys and values.

All-to-all is never dearer, but leaves ranks idle where heads do not divide evenly among them. It and gather are moves
that `repartition` makes. All take uneven and empty blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Real
from typing import Any

from hpcpar import kernels
from hpcpar.kernels import Visible
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule, split_conflict
from hpcpar.ops.grid_ring import attention_flops, flat_tokens, grid_axes, grid_ring_attention
from hpcpar.ops.local_attention import Numbers
from hpcpar.ops.repartition import repartition
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor

CONTEXTS = ("auto", "ring", "all_to_all", "gather")
_EVERYTHING = Visible()


class GridAttention(Op):
    """Attention of a part of the tokens (or of the heads) to all tokens; operands (N, H, *grid, E)."""

    name = "grid_attention"

    def rule(self, sigs: tuple[Signature, ...], context: str, compute_dtype: str) -> Rule:
        q = sigs[0].resolved
        axes = grid_axes(q)
        if context == "all_to_all":
            heads = Layout(q.dims[0], (*q.dims[1], *axes))
            moves = grads = [sig.with_layout(heads) for sig in sigs]
        else:
            whole = [sig.with_layout(Layout(*q.dims[:2])) for sig in sigs[1:]]
            moves, grads = [q, *whole], [q, *[sig.with_partial(q.mesh.sort(axes)) for sig in whole]]
        out = signature(q.mesh, (*q.shape[:-1], sigs[2].shape[-1]), moves[0].layout)
        return Rule(out, moves, grads, sigs, compute_dtype)

    def rounding(self, rule: Rule) -> float:
        return kernels.ROUNDINGS[rule.plan]

    def flops(self, rule: Rule) -> int:
        return attention_flops(rule)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        out, lse = kernels.attention_forward(
            *[flat_tokens(a) for a in arrays], extra, _EVERYTHING, compute_dtype=rule.plan
        )
        return out.reshape(rule.out.local_shape), (*arrays, out, lse, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        *arrays, out, lse, scale = saved
        grads = kernels.attention_backward(
            flat_tokens(g), *[flat_tokens(a) for a in arrays], out, lse, scale, _EVERYTHING, compute_dtype=rule.plan
        )
        return tuple(d.reshape(a.shape) for d, a in zip(grads, arrays, strict=True))


def _check_layouts(sigs: Sequence[Signature]) -> None:
    q = sigs[0].resolved
    if q.dims[-1]:
        raise LayoutError(
            f"grid_attention of {sigs[0]!r}: features may not be split; split samples, heads and the grid, or "
            f"repartition to {q.layout.replace(len(q.shape) - 1, None)!r} first"
        )
    for sig in sigs[1:]:
        if sig.split_axes and sig.resolved.dims != q.dims:
            raise split_conflict("grid_attention", sigs, f"repartition all to {q.layout!r} first")


_grid_attention = GridAttention()


def grid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    *,
    context: str = "auto",
    compute_dtype: str = "float32",
) -> Tensor:
    """Return scaled dot-product attention over all tokens of a grid.

    Every token sees every other one: it takes no mask and drops no weights. `scaled_dot_product_attention`, which has
    both, serves tokens in one row.

    Parameters
    ----------
    query, key : Tensor
        (N, H, *grid, E) with 1 to 3 dims of tokens; samples, heads and the grid may be split, alike in all three.
    value : Tensor
        (N, H, *grid, V).
    scale : float, optional
        Of the scores; ``1 / sqrt(E)`` by default.
    context : {"auto", "ring", "all_to_all", "gather"}
        How a split grid is served (see this module). By default all-to-all where the heads divide evenly among the
        ranks that would share them, else the ring.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which the float32 operands of all products, forward and backward, are multiplied; see `functional.einsum`.

    Returns
    -------
    Tensor
        (N, H, *grid, V), split like the query.

    Raises
    ------
    ValueError
        Shapes that do not fit, an unknown context or dtype.
    TypeError
        A scale that is no number: a mask in its place, say, as torch's function has one there.
    LayoutError
        Operands that lie differently, or a split of the features.
    """
    if not 4 <= query.ndim <= 6 or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            f"grid_attention takes query, key and value (N, H, 1 to 3 dims of tokens, E), got {query.shape}, "
            f"{key.shape} and {value.shape}"
        )
    if context not in CONTEXTS:
        raise ValueError(f"grid_attention: context is one of {', '.join(CONTEXTS)}, got {context!r}")
    operands, sig = (query, key, value), query.sig.resolved
    _check_layouts([t.sig for t in operands])
    check_compute_dtype("grid_attention", compute_dtype)
    scale = scale_of("grid_attention", query, scale)
    axes = grid_axes(sig)
    if context == "auto":
        parts = sig.parts(1) * prod(sig.mesh.shape[a] for a in axes)
        context = "ring" if sig.shape[1] % parts else "all_to_all"
    if context == "ring" and axes:
        return grid_ring_attention(operands, (compute_dtype,), Numbers(scale, None))
    return repartition(_grid_attention(operands, (context, compute_dtype), scale), sig.layout)


def check_compute_dtype(name: str, compute_dtype: str) -> None:
    """Refuse an unknown dtype of products."""
    if compute_dtype not in kernels.COMPUTE_DTYPES:
        raise ValueError(f"{name}: compute_dtype is one of {', '.join(kernels.COMPUTE_DTYPES)}, got {compute_dtype!r}")


def scale_of(name: str, query: Tensor, scale: Any) -> float:
    """The factor of the scores, of a function that takes no mask in its place."""
    if scale is None:
        return query.shape[-1] ** -0.5
    if not isinstance(scale, Real):
        kind = f"a {type(scale).__name__}"
        raise TypeError(f"{name}: scale is a number, got {kind}; it takes no mask (scaled_dot_product_attention does)")
    return float(scale)
