"""Rotation of pairs of features by an angle each: rotary position embedding, and its gradient by the negative sine."""

from __future__ import annotations

import numpy as np

from ..arrays import Array


def rotate_pairs(x: Array, cosine: Array, sine: Array, interleaved: bool = False) -> Array:
    """Turn pairs (a, b) of features into ``(a cos - b sin, a sin + b cos)``; features behind the pairs are copied.

    Parameters
    ----------
    x : array (N, H, S, E)
    cosine, sine : arrays (S, K) or (N, S, K) in the dtype of x (float32 for float16)
        Of the angles of K pairs, ``2 K <= E``.
    interleaved : bool
        Pairs are the features (2 k, 2 k + 1), not (k, k + K).

    Returns
    -------
    array (N, H, S, E), memory order of x.
    """
    y = np.empty_like(x)
    pairs = cosine.shape[-1]
    if cosine.ndim == 3:
        cosine, sine = cosine[:, None], sine[:, None]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (
        slice(0, pairs), slice(pairs, 2 * pairs))
    a, b = x[..., first], x[..., second]
    y[..., first] = a * cosine - b * sine
    y[..., second] = a * sine + b * cosine
    y[..., 2 * pairs:] = x[..., 2 * pairs:]
    return y
