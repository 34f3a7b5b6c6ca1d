"""Attention inside windows: every query sees the keys of its own window, with a bias that all windows share.

The scores of a window are few, and there are many windows: some of them at a time are computed whole, small enough for
the cache, and computed again for the gradient. Nothing of the size of all scores is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import registry
from ..arrays import Array, array_module
from ..precision import check_compute, rounded

SCORES = 1 << 18
"""Scores computed at once: 1 MiB in float32."""


def window_attention_forward(
    query: Array, key: Array, value: Array, scale: float, bias: Array | None = None, regions: Array | None = None,
    compute_dtype: str = "float32",
) -> tuple[Array, Array]:  # fmt: skip
    """``softmax(query @ key.T * scale + bias) @ value`` of each window.

    Parameters
    ----------
    query, key : arrays (B, H, T, E)
        B windows of T tokens, any strides.
    value : array (B, H, T, V)
    scale : float
    bias : array (H, T, T), optional
        Added to the scores of every window.
    regions : integer array (W, T), optional
        B is a multiple of W, and window b has the regions ``b % W``: a query sees the keys of its own region alone.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which the operands of all products are multiplied, as in `attention_forward`.

    Returns
    -------
    out : array (B, H, T, V)
        (B, T, H, V) in memory.
    lse : array (B, H, T)
        Natural logarithm of the sum of the exponentials of the scores.
    """
    _allow(compute_dtype, query, key)
    xp = array_module(query)
    b, h, t, _ = query.shape
    out = xp.empty((b, t, h, value.shape[3]), query.dtype).transpose(0, 2, 1, 3)
    lse = xp.empty((b, h, t), query.dtype)
    for part, apart in _parts(query, regions):
        weights = _scores(query[part], key[part], scale, bias, apart, compute_dtype)
        top = weights.max(axis=-1, keepdims=True)
        weights -= top
        np.exp(weights, out=weights)
        total = weights.sum(axis=-1, keepdims=True)
        out[part] = _product(weights, value[part], compute_dtype) / total
        lse[part] = (top + np.log(total))[..., 0]
    return out, lse


def window_attention_backward(
    g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float,
    bias: Array | None = None, regions: Array | None = None, compute_dtype: str = "float32",
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """Gradients of query, key, value and bias (None without one) from that of the result.

    Arguments and results are those of `window_attention_forward`, the gradients of query, key and value lying
    (B, T, H, E) in memory.
    """
    _allow(compute_dtype, query, key)
    xp = array_module(query)
    dq, dk, dv = (
        xp.empty((a.shape[0], a.shape[2], a.shape[1], a.shape[3]), a.dtype).transpose(0, 2, 1, 3)
        for a in (query, key, value)
    )
    dbias = None if bias is None else xp.zeros(bias.shape, bias.dtype)
    for part, apart in _parts(query, regions):
        q, k, gradient = query[part], key[part], g[part]
        weights = _scores(q, k, scale, bias, apart, compute_dtype)
        weights -= lse[part][..., None]
        np.exp(weights, out=weights)
        dv[part] = _product(weights.swapaxes(-1, -2), gradient, compute_dtype)
        dscores = _product(gradient, value[part].swapaxes(-1, -2), compute_dtype)
        dscores -= (gradient * out[part]).sum(axis=-1, keepdims=True)
        dscores *= weights
        if dbias is not None:
            dbias += dscores.sum(axis=0)
        dscores *= scale
        dq[part] = _product(dscores, k, compute_dtype)
        dk[part] = _product(dscores.swapaxes(-1, -2), q, compute_dtype)
    return dq, dk, dv, dbias


def _parts(query: Array, regions: Array | None) -> Iterator[tuple[slice, Array | None]]:
    """Yield some windows at a time, and which pairs of their tokens do not see each other (None where all do)."""
    b, h, t, _ = query.shape
    step = max(1, SCORES // max(1, h * t * t))
    xp = array_module(query)
    if regions is not None:
        regions = xp.asarray(regions)
        mixed = (regions != regions[:, :1]).any(axis=1)
    for first in range(0, b, step):
        part = slice(first, min(b, first + step))
        apart = None
        if regions is not None:
            chosen = xp.arange(part.start, part.stop) % regions.shape[0]
            if bool(mixed[chosen].any()):
                own = regions[chosen]
                apart = own[:, None, :, None] != own[:, None, None, :]
        yield part, apart


def _allow(compute_dtype: str, first: Array, second: Array) -> None:
    """Raise where products are not made in a dtype; say so where they are made by rounding and float32."""
    check_compute(compute_dtype, first, second)
    if compute_dtype != "float32" and first.size and second.size:
        registry.notice(f"attention inside windows in {compute_dtype} has no kernel here; its rounded operands are "
                        f"multiplied in float32")


def _product(a: Array, b: Array, compute_dtype: str) -> Array:
    return np.matmul(rounded(a, compute_dtype), rounded(b, compute_dtype))


def _scores(
    query: Array, key: Array, scale: float, bias: Array | None, apart: Array | None, compute_dtype: str
) -> Array:
    scores = _product(query, key.swapaxes(-1, -2), compute_dtype)
    scores *= scale
    if bias is not None:
        scores += bias
    # every token sees itself, so that no row is left empty
    return scores if apart is None else np.where(apart, scores.dtype.type(-np.inf), scores)
