"""Norm statistics and normalisation on a device: rows (N, S, C), neighbouring threads at neighbouring channels.

Sums are taken in float64 by many lanes, each over every LANES-th position, and the lanes' sums by one more reduction:
no atomics, so the same bits each time. M2 is summed about the mean in a second pass over memory.
"""

from __future__ import annotations

import math

from ..arrays import Array, array_module, empty_channels_last, is_channels_last, sample_rows
from ..generic.norm import merge_equal, split_scale
from .launch import launch, served

#: Threads wanted in a reduction.
LANES = 1 << 17

SOURCE = r"""
extern "C" {

__global__ void sums(const T* x, index_t positions, index_t lanes, index_t channels, double* partial, index_t n) {
    EACH(i, n) {
        index_t c = i % channels, lane = i / channels % lanes, sample = i / channels / lanes;
        double total = 0;
        for (index_t p = lane; p < positions; p += lanes) total += x[(sample * positions + p) * channels + c];
        partial[i] = total;
    }
}

__global__ void squares(const T* x, const double* mean, index_t positions, index_t lanes, index_t channels,
                        double* partial, index_t n) {
    EACH(i, n) {
        index_t c = i % channels, lane = i / channels % lanes, sample = i / channels / lanes;
        double total = 0, center = mean[sample * channels + c];
        for (index_t p = lane; p < positions; p += lanes) {
            double d = x[(sample * positions + p) * channels + c] - center;
            total += d * d;
        }
        partial[i] = total;
    }
}

__global__ void grad_sums(const T* g, const T* x, const T* hi, const T* lo, const T* scale, const T* shift, T slope,
                          const double* mean, index_t positions, index_t lanes, index_t channels, double* first,
                          double* second, index_t n) {
    EACH(i, n) {
        index_t c = i % channels, lane = i / channels % lanes, sample = i / channels / lanes;
        index_t s = sample * channels + c;
        double total = 0, dot = 0, center = mean[s];
        for (index_t p = lane; p < positions; p += lanes) {
            index_t at = (sample * positions + p) * channels + c;
            T v = ((x[at] - hi[s]) - lo[s]) * scale[s] + shift[c];
            T h = slope == T(1) || v > T(0) ? g[at] : g[at] * slope;
            total += h;
            dot += h * (x[at] - center);
        }
        first[i] = total;
        second[i] = dot;
    }
}

__global__ void normalize(const T* x, const T* hi, const T* lo, const T* scale, const T* shift, T slope,
                          index_t per_sample, index_t channels, T* y, index_t n) {
    EACH(i, n) {
        index_t c = i % channels, s = i / per_sample * channels + c;
        T v = ((x[i] - hi[s]) - lo[s]) * scale[s] + shift[c];
        y[i] = v <= T(0) ? v * slope : v;
    }
}

__global__ void grad_input(const T* g, const T* x, const T* hi, const T* lo, const T* scale, const T* shift, T slope,
                           const T* slant, const T* offset, index_t per_sample, index_t channels, T* dx, index_t n) {
    EACH(i, n) {
        index_t c = i % channels, s = i / per_sample * channels + c;
        T d = (x[i] - hi[s]) - lo[s];
        T h = slope == T(1) || d * scale[s] + shift[c] > T(0) ? g[i] : g[i] * slope;
        dx[i] = h * scale[s] - (d * slant[s] + offset[s]);
    }
}

}
"""


def sample_moments(x: Array) -> tuple[Array, Array]:
    if not served(x) or x.size == 0:
        return NotImplemented
    xp, rows = array_module(x), sample_rows(x)
    n, positions, c = rows.shape
    lanes = _lanes(n, positions, c)
    partial = xp.empty((n, lanes, c))
    launch(SOURCE, "sums", x.dtype, partial.size, rows, positions, lanes, c, partial)
    mean = partial.sum(axis=1) / positions
    launch(SOURCE, "squares", x.dtype, partial.size, rows, mean, positions, lanes, c, partial)
    return mean, partial.sum(axis=1)


def channel_moments(x: Array) -> tuple[Array, Array]:
    if not served(x) or x.size == 0:
        return NotImplemented
    return merge_equal(*sample_moments(x), math.prod(x.shape[2:]), axis=0)


def group_moments(x: Array, groups: int) -> tuple[Array, Array]:
    n, c = x.shape[:2]
    if not served(x) or x.size == 0 or groups < 1 or c % groups:
        return NotImplemented
    mean, m2 = (v.reshape(n, groups, c // groups) for v in sample_moments(x))
    return merge_equal(mean, m2, math.prod(x.shape[2:]), axis=2)


def channel_sums(x: Array) -> Array:
    if not served(x) or x.size == 0:
        return NotImplemented
    rows = sample_rows(x)
    n, positions, c = rows.shape
    lanes = _lanes(n, positions, c)
    partial = array_module(x).empty((n, lanes, c))
    launch(SOURCE, "sums", x.dtype, partial.size, rows, positions, lanes, c, partial)
    return partial.sum(axis=(0, 1)).astype(x.dtype)


def channel_normalize(x: Array, mean: Array, inv_std: Array, weight: Array | None = None, bias: Array | None = None,
                      slope: float | None = None, out: Array | None = None) -> Array:
    if not served(x) or x.size == 0 or (out is not None and not (served(x, out) and is_channels_last(out))):
        return NotImplemented
    y = empty_channels_last(x.shape, x.dtype, like=x) if out is None else out
    launch(SOURCE, "normalize", x.dtype, x.size, sample_rows(x), *_factors(mean, inv_std, weight, bias, x),
           _slope(slope), x.size // x.shape[0], x.shape[1], y)
    return y


def channel_grad_sums(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None = None,
                      bias: Array | None = None, slope: float | None = None) -> tuple[Array, Array]:
    if x.size == 0 or not served(g, x):
        return NotImplemented
    xp, rows = array_module(x), sample_rows(x)
    n, positions, c = rows.shape
    lanes = _lanes(n, positions, c)
    first, second = xp.empty((n, lanes, c)), xp.empty((n, lanes, c))
    launch(SOURCE, "grad_sums", x.dtype, first.size, sample_rows(g), rows, *_factors(mean, inv_std, weight, bias, x),
           _slope(slope), *_rows_of((mean,), x), positions, lanes, c, first, second)
    axes = (0, 1) if mean.ndim == 1 else 1
    return first.sum(axis=axes), second.sum(axis=axes) * inv_std


def channel_grad_input(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array,
                       s2_mean: Array, bias: Array | None = None, slope: float | None = None) -> Array:
    if x.size == 0 or not served(g, x):
        return NotImplemented
    dx = empty_channels_last(x.shape, x.dtype, like=x)
    line = (inv_std * inv_std * s2_mean).astype(x.dtype), (inv_std * s1_mean).astype(x.dtype)
    launch(SOURCE, "grad_input", x.dtype, x.size, sample_rows(g), sample_rows(x),
           *_factors(mean, inv_std, weight, bias, x), _slope(slope), *_rows_of(line, x), x.size // x.shape[0],
           x.shape[1], dx)
    return dx


def _lanes(samples: int, positions: int, channels: int) -> int:
    return max(1, min(positions, LANES // (samples * channels)))


def _factors(mean: Array, inv_std: Array, weight: Array | None, bias: Array | None, x: Array) -> list[Array]:
    """hi, lo and scale (N, C), and shift (C,), with which x is normalised."""
    xp = array_module(x)
    shift = xp.zeros(x.shape[1], x.dtype) if bias is None else xp.ascontiguousarray(bias, dtype=x.dtype)
    return [*_rows_of(split_scale(mean, inv_std, weight, x.dtype), x), shift]


def _slope(slope: float | None) -> float:
    return 1.0 if slope is None else float(slope)


def _rows_of(statistics: tuple[Array, ...], x: Array) -> list[Array]:
    """Statistics (C,) or (N, C) as dense (N, C) arrays."""
    xp = array_module(x)
    return [xp.ascontiguousarray(xp.broadcast_to(v, x.shape[:2])) for v in statistics]
