"""Attention without the matrix of scores: blocks of queries and keys with a running softmax, and its gradient.

The softmax of a row is carried along its blocks of keys as a maximum and a sum (Milakov, Gimelshein 2018,
arXiv:1805.02867; Rabe, Staats 2021, arXiv:2112.05682); the gradient computes the scores again, from the logarithm of
the sum that the forward pass returns (Dao et al. 2022, arXiv:2205.14135). Blocks in which nothing can be seen are
passed over. Queries of the heads that share keys are rows of one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arrays import Array, array_module
from ..precision import allow_rounding, product
from ..visible import ALL, NONE, AttentionDropout, Sight, Visible

BLOCK = (256, 256)  # queries and keys
BUDGET = 1 << 21    # scores at once


def attention_forward(query: Array, key: Array, value: Array, scale: float, visible: Visible,
                      dropout: AttentionDropout | None = None, compute_dtype: str = "float32",
                      ) -> tuple[Array, Array]:
    """``softmax(query @ key.T * scale) @ value`` over the keys that each query may see.

    Parameters
    ----------
    query : array (N, H, L, E)
    key, value : arrays (N, G, S, E) and (N, G, S, V)
        H is a multiple of G; query head h has the keys of head ``h // (H // G)``.
    scale : float
    visible : Visible
    dropout : AttentionDropout, optional
        Of the weights, after the softmax.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which the operands of both products, float32, are multiplied; softmax and sums are float32. Other arrays are
        multiplied by "float32", which leaves them as they are.

    Returns
    -------
    out : array (N, H, L, V)
        In the dtype of the query, (N, L, H, V) in memory; 0 in rows that see no key.
    lse : array (N, H, L)
        Natural logarithm of the sum of the exponentials, before dropout; -inf in rows that see no key. float16 is
        computed in float32, and lse is float32 for it.

    Raises
    ------
    ValueError
        If shapes do not fit together, or arrays other than float32 are to be rounded.
    RuntimeError
        Where the processor does not multiply in that dtype.
    """
    allow_rounding("attention", compute_dtype, query, key)
    xp, work = array_module(query), work_dtype(query)
    n, h, length, _ = shape = check(query, key, value)
    g, width = key.shape[1], value.shape[3]
    out = heads_in_memory(query, h, length, width, query.dtype)
    lse = xp.full((n, h, length), -np.inf, work)
    sight = Sight(visible, shape, BLOCK)
    for samples in _samples(shape):
        count = samples.stop - samples.start
        for i, rows in enumerate(sight.rows):
            size = rows.stop - rows.start
            grid = (count, g, h // g * size)
            q = _grouped(query, samples, rows, g, work)
            top = xp.full(grid, -np.inf, work)
            total, summed = xp.zeros(grid, work), xp.zeros((*grid, width), work)
            for j, keys in enumerate(sight.keys):
                state = sight.state(samples, i, j)
                if state == NONE:
                    continue
                scores = _scores(q, key, scale, sight, samples, rows, keys, state, compute_dtype)
                highest = np.maximum(top, scores.max(axis=-1))
                # nothing seen yet: subtracting zero keeps the weights 0, where -inf - -inf were NaN
                safe = xp.where(highest == -np.inf, work.type(0), highest)
                weights, shrink = np.exp(scores - safe[..., None]), np.exp(top - safe)
                total = total * shrink + weights.sum(axis=-1)
                if dropout is not None:
                    weights *= _kept(dropout, sight, samples, rows, keys, weights)
                v = value[samples, :, keys].astype(work, copy=False)
                summed = summed * shrink[..., None] + product(weights, v, compute_dtype)
                top = highest
            safe = xp.where(top == -np.inf, work.type(0), top)
            seen = xp.where(total == 0, work.type(1), total)
            factor = work.type(1 if dropout is None else dropout.factor)
            out[samples, :, rows] = (summed * (factor / seen)[..., None]).reshape(count, h, size, width)
            with np.errstate(divide="ignore"):
                lse[samples, :, rows] = (np.log(total) + safe).reshape(count, h, size)
    return out, lse


def attention_merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Merge what two sets of keys give the same queries, as if `attention_forward` had seen both.

    Parameters
    ----------
    out_a, out_b : arrays (N, H, L, V)
    lse_a, lse_b : arrays (N, H, L)

    Returns
    -------
    out, lse : arrays
        The first pair may hold them.
    """
    xp = array_module(out_a)
    lse = np.logaddexp(lse_a, lse_b)
    safe = xp.where(lse == -np.inf, lse.dtype.type(0), lse)
    out = out_a * np.exp(lse_a - safe)[..., None]
    out += out_b * np.exp(lse_b - safe)[..., None]
    out_a[...] = out
    return out_a, lse


def attention_backward(g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float,
                       visible: Visible, dropout: AttentionDropout | None = None, mask_gradient: bool = False,
                       compute_dtype: str = "float32") -> tuple[Array, ...]:
    """Gradients of `attention_forward`.

    Parameters
    ----------
    g : array (N, H, L, V)
        Gradient of ``out``.
    query, key, value, scale, visible, dropout, compute_dtype
        As given to `attention_forward`.
    out, lse : arrays
        What it returned, over all keys: where keys come in several sets, after merging. The call then gives the part
        of its own keys.
    mask_gradient : bool
        Whether the gradient of a float mask is wanted too.

    Returns
    -------
    dq, dk, dv : arrays like query, key and value
        (N, L, H, E) in memory.
    dmask : array of the mask's shape
        Only with ``mask_gradient``.
    """
    allow_rounding("attention", compute_dtype, query, key)
    xp, work = array_module(query), work_dtype(query)
    shape = check(query, key, value)
    n, h, length, width = g.shape
    groups, per_key = key.shape[1], h // max(key.shape[1], 1)
    dq = heads_in_memory(query, h, length, query.shape[3], work, fill=0)
    dk, dv = (heads_in_memory(a, groups, a.shape[2], a.shape[3], work, fill=0) for a in (key, value))
    dmask = xp.zeros(visible.mask.shape, work) if mask_gradient else None
    sight = Sight(visible, shape, BLOCK)
    for samples in _samples(shape):
        count = samples.stop - samples.start
        for i, rows in enumerate(sight.rows):
            size = rows.stop - rows.start
            grid = (count, groups, per_key * size)
            q = _grouped(query, samples, rows, groups, work)
            up, result = (_grouped(a, samples, rows, groups, work) for a in (g, out))
            delta = (up * result).sum(axis=-1, keepdims=True)
            sums = lse[samples, :, rows].reshape(*grid, 1)
            sums = xp.where(sums == -np.inf, sums.dtype.type(0), sums)
            for j, keys in enumerate(sight.keys):
                state = sight.state(samples, i, j)
                if state == NONE:
                    continue
                k, v = (a[samples, :, keys].astype(work, copy=False) for a in (key, value))
                scores = _scores(q, key, scale, sight, samples, rows, keys, state, compute_dtype)
                weights = np.exp(scores - sums)
                slope = product(up, v.swapaxes(2, 3), compute_dtype)
                used = weights
                if dropout is not None:
                    kept = _kept(dropout, sight, samples, rows, keys, weights) * work.type(dropout.factor)
                    used, slope = weights * kept, slope * kept
                dv[samples, :, keys] += product(used.swapaxes(2, 3), up, compute_dtype)
                slope = weights * (slope - delta)
                dk[samples, :, keys] += product(slope.swapaxes(2, 3), q, compute_dtype) * work.type(scale)
                part = product(slope, k, compute_dtype) * work.type(scale)
                dq[samples, :, rows] += part.reshape(count, h, size, q.shape[3])
                if mask_gradient:
                    _add_broadcast(dmask, slope.reshape(count, h, size, k.shape[2]), samples, rows, keys)
    gradients = tuple(a.astype(query.dtype, copy=False) for a in (dq, dk, dv))
    return (*gradients, dmask) if mask_gradient else gradients


def check(query: Array, key: Array, value: Array) -> tuple[int, int, int, int]:
    """(N, H, L, S) of the scores; ValueError if shapes do not fit together."""
    n, h, length, e = query.shape
    m, groups, keys, width = key.shape
    if m != n or width != e or value.shape[:3] != (n, groups, keys) or (h % groups if groups else h):
        raise ValueError(f"attention: query {query.shape}, key {key.shape} and value {value.shape} do not fit: "
                         f"expected (N, H, L, E), (N, G, S, E) and (N, G, S, V) with H a multiple of G")
    return n, h, length, keys


def work_dtype(a: Array) -> np.dtype:
    """The dtype in which attention of these arrays is computed: float32 at least."""
    return np.dtype(np.float64 if a.dtype == np.float64 else np.float32)


def heads_in_memory(like: Array, heads: int, length: int, width: int, dtype: np.dtype,
                    fill: int | None = None) -> Array:
    """An array (N, H, L, E) that lies (N, L, H, E) in memory."""
    create = array_module(like).empty if fill is None else array_module(like).zeros
    return create((like.shape[0], length, heads, width), dtype).transpose(0, 2, 1, 3)


def _samples(shape: tuple[int, ...]) -> Iterator[slice]:
    """Samples as many at once as keep the scores of a block within the budget; none if there is no query."""
    n, h, length, keys = shape
    if h == 0 or length == 0:
        return iter(())
    step = max(1, BUDGET // max(1, h * min(length, BLOCK[0]) * min(keys, BLOCK[1])))
    return (slice(first, min(n, first + step)) for first in range(0, n, step))


def _grouped(a: Array, samples: slice, rows: slice, groups: int, dtype: np.dtype) -> Array:
    """Some rows of the heads (N, H, L, E), those of one group below each other: (n, G, H / G * rows, E)."""
    part = a[samples, :, rows].astype(dtype, copy=False)
    n, h, size, e = part.shape
    return part.reshape(n, groups, h // groups * size if groups else 0, e)


def _scores(q: Array, key: Array, scale: float, sight: Sight, samples: slice, rows: slice, keys: slice, state: int,
            compute_dtype: str) -> Array:
    """Scores (n, G, H / G * rows, keys) of a block, -inf where a key may not be seen."""
    k = key[samples, :, keys].astype(q.dtype, copy=False)
    scores = product(q, k.swapaxes(2, 3), compute_dtype) * q.dtype.type(scale)
    if state == ALL:
        return scores
    allowed, added = sight.seen(samples, rows, keys, q)
    n, groups, lines, size = scores.shape
    view = scores.reshape(n, sight.shape[1], rows.stop - rows.start, size)
    if added is not None:
        view = view + added.astype(q.dtype, copy=False)
    if allowed is not None:
        view = array_module(q).where(allowed, view, q.dtype.type(-np.inf))
    return view.reshape(n, groups, lines, size)


def _kept(dropout: AttentionDropout, sight: Sight, samples: slice, rows: slice, keys: slice, like: Array) -> Array:
    """The mask of dropout in the shape of the weights of a block."""
    heads = slice(0, sight.shape[1])
    kept = dropout.kept(samples, heads, sight.q_positions[rows], sight.k_positions[keys], like)
    return kept.reshape(like.shape)


def _add_broadcast(total: Array, part: Array, samples: slice, rows: slice, keys: slice) -> None:
    """Add a block (n, H, rows, keys) to an array that broadcasts to the whole: dims of length 1 are summed."""
    where = (samples, slice(None), rows, keys)[4 - total.ndim:]
    part = part.sum(axis=tuple(range(4 - total.ndim)))
    single = tuple(d for d, size in enumerate(total.shape) if size == 1)
    place = tuple(slice(None) if d in single else s for d, s in enumerate(where))
    total[place] += part.sum(axis=single, keepdims=True) if single else part
