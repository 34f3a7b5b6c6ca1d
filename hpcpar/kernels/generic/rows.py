"""Normalisation of rows, over the last dim: what layer norm and RMS norm are made of.

As over channels, statistics are float64 (mean, M2), ready to be merged where a row is spread over ranks, and the mean
is subtracted in two parts. RMS norm is the same with a mean of zero and `row_squares` for M2.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from .norm import split_scale


def row_moments(x: Array) -> tuple[Array, Array]:
    """Mean and M2 of each row.

    Parameters
    ----------
    x : array (rows, width)

    Returns
    -------
    mean, m2 : float64 arrays (rows,); zeros for rows of no elements.
    """
    wide = x.astype(np.float64)
    mean = wide.sum(axis=1) / max(1, x.shape[1])
    wide -= mean[:, None]
    wide *= wide
    return mean, wide.sum(axis=1)


def row_squares(x: Array) -> Array:
    """Sum of squares of each row of (rows, width), in float64."""
    wide = x.astype(np.float64)
    wide *= wide
    return wide.sum(axis=1)


def row_normalize(x: Array, mean: Array, inv_std: Array, weight: Array | None = None,
                  bias: Array | None = None) -> Array:
    """``((x - hi) - lo) * inv_std * weight + bias``.

    Parameters
    ----------
    x : array (rows, width)
    mean, inv_std : float64 arrays (rows,)
    weight, bias : arrays (width,), optional

    Returns
    -------
    array (rows, width) in the dtype of x, C order.
    """
    y = _normal(x, mean, inv_std)
    if weight is not None:
        y *= weight.astype(x.dtype, copy=False)
    if bias is not None:
        y += bias.astype(x.dtype, copy=False)
    return y


def row_grad_sums(g: Array, x: Array, mean: Array, inv_std: Array,
                  weight: Array | None = None) -> tuple[Array, Array, Array, Array]:
    """The sums of the gradient of `row_normalize`.

    Parameters
    ----------
    g, x : arrays (rows, width)
        Gradient of the result, and the input.
    mean, inv_std, weight
        As in `row_normalize`.

    Returns
    -------
    s1, s2 : float64 arrays (rows,)
        Sums of ``g * weight`` and of ``g * weight * xhat`` over each row.
    dweight, dbias : float64 arrays (width,)
        Sums of ``g * xhat`` and of ``g`` over the rows.
    """
    normal = _normal(x, mean, inv_std)
    scaled = g if weight is None else g * weight.astype(x.dtype, copy=False)
    return (scaled.sum(axis=1, dtype=np.float64), (scaled * normal).sum(axis=1, dtype=np.float64),
            (g * normal).sum(axis=0, dtype=np.float64), g.sum(axis=0, dtype=np.float64))


def row_grad_input(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array,
                   s2_mean: Array) -> Array:
    """``inv_std * (g * weight - s1_mean - xhat * s2_mean)``: gradient in x, statistics included.

    ``s1_mean`` and ``s2_mean`` (rows,) are the sums of `row_grad_sums` over the whole row divided by its length; for
    RMS norm s1_mean is zero.
    """
    dx = _normal(x, mean, inv_std)
    dx *= s2_mean.astype(x.dtype)[:, None]
    dx += s1_mean.astype(x.dtype)[:, None]
    scaled = g if weight is None else g * weight.astype(x.dtype, copy=False)
    np.subtract(scaled, dx, out=dx)
    dx *= inv_std.astype(x.dtype)[:, None]
    return dx


def _normal(x: Array, mean: Array, inv_std: Array) -> Array:
    hi, lo, scale = split_scale(mean, inv_std, None, x.dtype)
    normal = x - hi[:, None]
    normal -= lo[:, None]
    normal *= scale[:, None]
    return normal
