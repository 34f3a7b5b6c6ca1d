"""Normalisation of rows: one pass over memory forward, one for the sums of the gradient, one for the gradient."""

from __future__ import annotations

import numpy as np

from ...arrays import Array
from ...generic.norm import split_scale
from .functions import row_gradients, row_spread, row_total
from .jit import kernel


@kernel
def _moments(x, mean, m2):
    for i in range(x.shape[0]):
        center = row_total(x[i]) / x.shape[1]
        mean[i] = center
        m2[i] = row_spread(x[i], center)


@kernel
def _squares(x, total):
    for i in range(x.shape[0]):
        total[i] = row_spread(x[i], 0.0)


@kernel
def _normalize(x, hi, lo, scale, weight, bias, y):
    rows, width = x.shape
    for i in range(rows):
        high, low, factor = hi[i], lo[i], scale[i]
        for c in range(width):
            y[i, c] = (((x[i, c] - high) - low) * factor) * weight[c] + bias[c]


@kernel
def _grad_sums(g, x, hi, lo, scale, weight, s1, s2, dweight, dbias):
    rows, width = x.shape
    for i in range(rows):
        high, low, factor = hi[i], lo[i], scale[i]
        for c in range(width):
            dweight[c] += g[i, c] * (((x[i, c] - high) - low) * factor)
            dbias[c] += g[i, c]
        s1[i], s2[i] = row_gradients(g[i], x[i], weight, high, low)
        s2[i] *= factor


@kernel
def _grad_input(g, x, hi, lo, scale, weight, first, second, dx):
    rows, width = x.shape
    for i in range(rows):
        high, low, factor, a, b = hi[i], lo[i], scale[i], first[i], second[i]
        for c in range(width):
            normal = ((x[i, c] - high) - low) * factor
            dx[i, c] = factor * (g[i, c] * weight[c] - (normal * b + a))


def row_moments(x: Array) -> tuple[Array, Array]:
    if not _served(x):
        return NotImplemented
    mean, m2 = np.empty(x.shape[0]), np.empty(x.shape[0])
    _moments(np.ascontiguousarray(x), mean, m2)
    return mean, m2


def row_squares(x: Array) -> Array:
    if not _served(x):
        return NotImplemented
    total = np.empty(x.shape[0])
    _squares(np.ascontiguousarray(x), total)
    return total


def row_normalize(x: Array, mean: Array, inv_std: Array, weight: Array | None = None,
                  bias: Array | None = None) -> Array:
    if not _served(x):
        return NotImplemented
    y = np.empty(x.shape, x.dtype)
    _normalize(np.ascontiguousarray(x), *split_scale(mean, inv_std, None, x.dtype), _line(weight, x, 1),
               _line(bias, x, 0), y)
    return y


def row_grad_sums(g: Array, x: Array, mean: Array, inv_std: Array,
                  weight: Array | None = None) -> tuple[Array, Array, Array, Array]:
    if not _served(x) or g.dtype != x.dtype:
        return NotImplemented
    rows, width = x.shape
    sums = np.empty(rows), np.empty(rows), np.zeros(width), np.zeros(width)
    _grad_sums(np.ascontiguousarray(g), np.ascontiguousarray(x), *split_scale(mean, inv_std, None, x.dtype),
               _line(weight, x, 1), *sums)
    return sums


def row_grad_input(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array,
                   s2_mean: Array) -> Array:
    if not _served(x) or g.dtype != x.dtype:
        return NotImplemented
    dx = np.empty(x.shape, x.dtype)
    _grad_input(np.ascontiguousarray(g), np.ascontiguousarray(x), *split_scale(mean, inv_std, None, x.dtype),
                _line(weight, x, 1), s1_mean.astype(x.dtype), s2_mean.astype(x.dtype), dx)
    return dx


def _served(x: Array) -> bool:
    return x.dtype.char in "fd" and x.size > 0


def _line(values: Array | None, x: Array, default: int) -> Array:
    """Weight or bias (width,) in the dtype of x; without one, what changes nothing."""
    return np.full(x.shape[1], default, x.dtype) if values is None else np.ascontiguousarray(values, x.dtype)
