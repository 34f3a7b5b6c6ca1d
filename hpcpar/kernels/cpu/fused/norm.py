"""Statistics and normalisation over channels in one pass each: rows (N, S, C) with the channels in the inner loop.

Sums walk through two or four parts of the positions at once: a core reads several streams of memory faster than one.
"""

from __future__ import annotations

import math

import numpy as np

from ...arrays import Array, empty_channels_last, is_channels_last, sample_rows
from ...generic.norm import merge_equal, split_scale
from .jit import kernel

#: Positions whose mean is the pivot of the sums of squares. With k of n positions in it, the pivot is off the mean by
#: at most sqrt(n / k) standard deviations, so that subtracting in float64 loses at most log10(n / k) of 16 digits.
PIVOT = 64


@kernel
def _moments(x, mean, m2):
    samples, positions, channels = x.shape
    pivot, s1, s2 = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    for n in range(samples):
        first = min(PIVOT, positions)
        pivot[:] = 0.0
        for i in range(first):
            for c in range(channels):
                pivot[c] += x[n, i, c]
        for c in range(channels):
            pivot[c] /= first
        s1[:] = 0.0
        s2[:] = 0.0
        part = positions // 4
        for i in range(part):
            for c in range(channels):
                p = pivot[c]
                d0, d1 = np.float64(x[n, i, c]) - p, np.float64(x[n, i + part, c]) - p
                d2, d3 = np.float64(x[n, i + 2 * part, c]) - p, np.float64(x[n, i + 3 * part, c]) - p
                s1[c] += (d0 + d1) + (d2 + d3)
                s2[c] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
        for i in range(4 * part, positions):
            for c in range(channels):
                d0 = np.float64(x[n, i, c]) - pivot[c]
                s1[c] += d0
                s2[c] += d0 * d0
        for c in range(channels):
            mean[n, c] = pivot[c] + s1[c] / positions
            m2[n, c] = max(0.0, s2[c] - s1[c] * s1[c] / positions)


@kernel
def _sums(x, total):
    samples, positions, channels = x.shape
    for n in range(samples):
        part = positions // 4
        for i in range(part):
            for c in range(channels):
                total[c] += ((np.float64(x[n, i, c]) + np.float64(x[n, i + part, c]))
                             + (np.float64(x[n, i + 2 * part, c]) + np.float64(x[n, i + 3 * part, c])))
        for i in range(4 * part, positions):
            for c in range(channels):
                total[c] += x[n, i, c]


@kernel
def _normalize(x, hi, lo, scale, shift, slope, y):
    samples, positions, channels = x.shape
    one = x.dtype.type(1)
    if slope == one:
        for n in range(samples):
            for i in range(positions):
                for c in range(channels):
                    y[n, i, c] = ((x[n, i, c] - hi[n, c]) - lo[n, c]) * scale[n, c] + shift[c]
        return
    for n in range(samples):
        for i in range(positions):
            for c in range(channels):
                v = ((x[n, i, c] - hi[n, c]) - lo[n, c]) * scale[n, c] + shift[c]
                y[n, i, c] = v if not v <= 0 else v * slope


@kernel
def _grad_sums(g, x, hi, s1, s2):
    samples, positions, channels = x.shape
    part = positions // 2
    for n in range(samples):
        for i in range(part):
            for c in range(channels):
                g0, g1 = g[n, i, c], g[n, i + part, c]
                s1[n, c] += np.float64(g0 + g1)
                s2[n, c] += np.float64(g0 * (x[n, i, c] - hi[n, c]) + g1 * (x[n, i + part, c] - hi[n, c]))
        for i in range(2 * part, positions):
            for c in range(channels):
                s1[n, c] += g[n, i, c]
                s2[n, c] += g[n, i, c] * (x[n, i, c] - hi[n, c])


@kernel
def _grad_sums_active(g, x, hi, lo, scale, shift, slope, s1, s2):
    samples, positions, channels = x.shape
    part = positions // 2
    for n in range(samples):
        for i in range(part):
            for c in range(channels):
                g0, d0 = g[n, i, c], x[n, i, c] - hi[n, c]
                g1, d1 = g[n, i + part, c], x[n, i + part, c] - hi[n, c]
                h0 = g0 if (d0 - lo[n, c]) * scale[n, c] + shift[c] > 0 else g0 * slope
                h1 = g1 if (d1 - lo[n, c]) * scale[n, c] + shift[c] > 0 else g1 * slope
                s1[n, c] += np.float64(h0 + h1)
                s2[n, c] += np.float64(h0 * d0 + h1 * d1)
        for i in range(2 * part, positions):
            for c in range(channels):
                g0, d0 = g[n, i, c], x[n, i, c] - hi[n, c]
                h0 = g0 if (d0 - lo[n, c]) * scale[n, c] + shift[c] > 0 else g0 * slope
                s1[n, c] += h0
                s2[n, c] += h0 * d0


@kernel
def _grad_input(g, x, hi, lo, scale, slant, offset, dx):
    samples, positions, channels = x.shape
    for n in range(samples):
        for i in range(positions):
            for c in range(channels):
                d = (x[n, i, c] - hi[n, c]) - lo[n, c]
                dx[n, i, c] = g[n, i, c] * scale[n, c] - (d * slant[n, c] + offset[n, c])


@kernel
def _grad_input_active(g, x, hi, lo, scale, shift, slope, slant, offset, dx):
    samples, positions, channels = x.shape
    for n in range(samples):
        for i in range(positions):
            for c in range(channels):
                d = (x[n, i, c] - hi[n, c]) - lo[n, c]
                h = g[n, i, c] if d * scale[n, c] + shift[c] > 0 else g[n, i, c] * slope
                dx[n, i, c] = h * scale[n, c] - (d * slant[n, c] + offset[n, c])


def sample_moments(x: Array) -> tuple[Array, Array]:
    if x.dtype.char not in "fd":
        return NotImplemented
    mean, m2 = np.zeros(x.shape[:2]), np.zeros(x.shape[:2])
    if x.size:
        _moments(sample_rows(x), mean, m2)
    return mean, m2


def channel_moments(x: Array) -> tuple[Array, Array]:
    if x.dtype.char not in "fd" or x.shape[0] == 0:
        return NotImplemented
    return merge_equal(*sample_moments(x), math.prod(x.shape[2:]), axis=0)


def group_moments(x: Array, groups: int) -> tuple[Array, Array]:
    n, c = x.shape[:2]
    if x.dtype.char not in "fd" or groups < 1 or c % groups:
        return NotImplemented
    mean, m2 = (v.reshape(n, groups, c // groups) for v in sample_moments(x))
    return merge_equal(mean, m2, math.prod(x.shape[2:]), axis=2)


def channel_sums(x: Array) -> Array:
    if x.dtype.char not in "fd":
        return NotImplemented
    total = np.zeros(x.shape[1])
    if x.size:
        _sums(sample_rows(x), total)
    return total.astype(x.dtype)


def channel_normalize(x: Array, mean: Array, inv_std: Array, weight: Array | None = None, bias: Array | None = None,
                      slope: float | None = None, out: Array | None = None) -> Array:
    if not _served(x) or (out is not None and not (_served(out, x) and is_channels_last(out))):
        return NotImplemented
    y = empty_channels_last(x.shape, x.dtype) if out is None else out
    factors = _rows_of(split_scale(mean, inv_std, weight, x.dtype), x)
    _normalize(sample_rows(x), *factors, _shift(bias, x), x.dtype.type(1 if slope is None else slope), sample_rows(y))
    return y


def channel_grad_sums(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None = None,
                      bias: Array | None = None, slope: float | None = None) -> tuple[Array, Array]:
    if not _served(x) or not _served(g, x):
        return NotImplemented
    s1, s2 = np.zeros(x.shape[:2]), np.zeros(x.shape[:2])
    rows, factors = (sample_rows(g), sample_rows(x)), _rows_of(split_scale(mean, inv_std, weight, x.dtype), x)
    if slope is None:
        _grad_sums(*rows, factors[0], s1, s2)
    else:
        _grad_sums_active(*rows, *factors, _shift(bias, x), x.dtype.type(slope), s1, s2)
    s2 -= s1 * (mean - mean.astype(x.dtype))  # deviations were taken from the mean as the dtype has it
    if mean.ndim == 1:
        s1, s2 = s1.sum(axis=0), s2.sum(axis=0)
    return s1, s2 * inv_std


def channel_grad_input(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array,
                       s2_mean: Array, bias: Array | None = None, slope: float | None = None) -> Array:
    if not _served(x) or not _served(g, x):
        return NotImplemented
    dx = empty_channels_last(x.shape, x.dtype)
    factors = _rows_of(split_scale(mean, inv_std, weight, x.dtype), x)
    lines = _rows_of(((inv_std * inv_std * s2_mean).astype(x.dtype), (inv_std * s1_mean).astype(x.dtype)), x)
    rows = (sample_rows(g), sample_rows(x))
    if slope is None:
        _grad_input(*rows, *factors, *lines, sample_rows(dx))
    else:
        _grad_input_active(*rows, *factors, _shift(bias, x), x.dtype.type(slope), *lines, sample_rows(dx))
    return dx


def _shift(bias: Array | None, x: Array) -> Array:
    """The bias (C,) in the dtype of x; zeros for none."""
    return np.zeros(x.shape[1], x.dtype) if bias is None else np.ascontiguousarray(bias, x.dtype)


def _served(a: Array, like: Array | None = None) -> bool:
    """Whether an array has elements, and a dtype with kernels (that of ``like``)."""
    return a.size > 0 and (a.dtype.char in "fd" if like is None else a.dtype == like.dtype and a.shape == like.shape)


def _rows_of(statistics: tuple[Array, ...], x: Array) -> list[Array]:
    """Statistics (C,) or (N, C) as dense (N, C) arrays."""
    return [np.ascontiguousarray(np.broadcast_to(v, x.shape[:2])) for v in statistics]
