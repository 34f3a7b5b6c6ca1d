"""Pooling on a device: one thread an output forward, one an input backward, which gathers and so needs no atomics.

The gradient of max pooling knows only positions, and is the generic code's sum by position. Kernels see arrays
(N, D, H, W, C); missing spatial dims have size 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..arrays import Array, array_module, empty_channels_last, to_channels_last
from ..generic.pool import Bounds, index_dtype, lowest, pool_sizes
from .launch import launch, served

SOURCE = r"""
extern "C" {

struct Place { index_t c, w, h, d, n; };

__device__ inline Place place_of(index_t i, index_t channels, index_t width, index_t height, index_t depth) {
    Place p;
    p.c = i % channels; i /= channels;
    p.w = i % width; i /= width;
    p.h = i % height; i /= height;
    p.d = i % depth; p.n = i / depth;
    return p;
}

__device__ inline index_t larger(index_t a, index_t b) { return a > b ? a : b; }
__device__ inline index_t smaller(index_t a, index_t b) { return a < b ? a : b; }
/* The first output whose window, `kernel` long and starting at o * stride - lo, reaches input i: rounding down. */
__device__ inline index_t first_output(index_t i, index_t lo, index_t kernel, index_t stride) {
    index_t behind = i + lo - kernel + 1;
    return behind <= 0 ? 0 : (behind + stride - 1) / stride;
}
__device__ inline index_t end_output(index_t i, index_t lo, index_t stride, index_t outputs) {
    return i + lo < 0 ? 0 : smaller(outputs, (i + lo) / stride + 1);
}

/* sizes: D H W C, outputs D H W, kernel D H W, stride D H W, dilation D H W, first D H W, end D H W */
__global__ void maximum(const T* x, const index_t* q, T floor, T* y, void* where, index_t wide, index_t n) {
    EACH(i, n) {
        Place o = place_of(i, q[3], q[6], q[5], q[4]);
        T best = floor;
        index_t at = -1;
        for (index_t a = 0; a < q[7]; ++a) {
            index_t d = o.d * q[10] + a * q[13];
            if (d < q[16] || d >= q[19]) continue;
            for (index_t b = 0; b < q[8]; ++b) {
                index_t h = o.h * q[11] + b * q[14];
                if (h < q[17] || h >= q[20]) continue;
                for (index_t e = 0; e < q[9]; ++e) {
                    index_t w = o.w * q[12] + e * q[15];
                    if (w < q[18] || w >= q[21]) continue;
                    index_t position = (d * q[1] + h) * q[2] + w;
                    T v = x[((o.n * q[0] * q[1] * q[2]) + position) * q[3] + o.c];
                    if (at < 0 || v > best || v != v) { best = v; at = position; }
                }
            }
        }
        y[i] = best;
        if (wide) ((long long*)where)[i] = at; else ((int*)where)[i] = (int)at;
    }
}

/* sizes: D H W C, outputs D H W, kernel D H W, stride D H W, lo D H W */
__global__ void average(const T* x, const index_t* q, const T* sd, const T* sh, const T* sw, T slope, T* y,
                        index_t n) {
    EACH(i, n) {
        Place o = place_of(i, q[3], q[6], q[5], q[4]);
        index_t d0 = o.d * q[10] - q[13], h0 = o.h * q[11] - q[14], w0 = o.w * q[12] - q[15];
        T total = T(0);
        for (index_t d = larger(0, d0); d < smaller(q[0], d0 + q[7]); ++d)
            for (index_t h = larger(0, h0); h < smaller(q[1], h0 + q[8]); ++h)
                for (index_t w = larger(0, w0); w < smaller(q[2], w0 + q[9]); ++w) {
                    T v = x[(((o.n * q[0] + d) * q[1] + h) * q[2] + w) * q[3] + o.c];
                    total += slope == T(1) || v > T(0) ? v : v * slope;
                }
        y[i] = total * (sd[o.d] * sh[o.h] * sw[o.w]);
    }
}

/* bit k of byte j of a line of `size` numbers is the sign of number k run + j */
__global__ void pack_signs(const T* x, index_t size, index_t run, unsigned char* signs, index_t n) {
    EACH(i, n) {
        index_t line = i / run, j = i % run;
        unsigned char bits = 0;
        for (index_t k = 0; k < 8 && k * run + j < size; ++k)
            if (x[line * size + k * run + j] > T(0)) bits |= (unsigned char)(1 << k);
        signs[i] = bits;
    }
}

__global__ void average_backward(const T* g, const index_t* q, const T* sd, const T* sh, const T* sw, T slope,
                                 const unsigned char* signs, index_t run, T* dx, index_t n) {
    EACH(i, n) {
        Place p = place_of(i, q[3], q[2], q[1], q[0]);
        T total = T(0);
        index_t d1 = end_output(p.d, q[13], q[10], q[4]), h1 = end_output(p.h, q[14], q[11], q[5]);
        index_t w1 = end_output(p.w, q[15], q[12], q[6]);
        for (index_t d = first_output(p.d, q[13], q[7], q[10]); d < d1; ++d)
            for (index_t h = first_output(p.h, q[14], q[8], q[11]); h < h1; ++h)
                for (index_t w = first_output(p.w, q[15], q[9], q[12]); w < w1; ++w)
                    total += g[(((p.n * q[4] + d) * q[5] + h) * q[6] + w) * q[3] + p.c] * (sd[d] * sh[h] * sw[w]);
        index_t size = q[2] * q[3], line = i / size, at = i % size;
        bool kept = slope == T(1) || (signs[line * run + at % run] >> (at / run) & 1);
        dx[i] = kept ? total : total * slope;
    }
}

}
"""


def max_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
                     out_shape: Sequence[int] | None = None, valid: Bounds | None = None) -> tuple[Array, Array]:
    out = pool_sizes(x.shape[2:], kernel, stride, dilation, out_shape)
    if not served(x):
        return NotImplemented
    valid = valid if valid is not None else [(0, n) for n in x.shape[2:]]
    y = empty_channels_last((*x.shape[:2], *out), x.dtype, like=x)
    kind = index_dtype(math.prod(x.shape[2:]))
    index = empty_channels_last(y.shape, kind, like=x)
    numbers = _numbers(x, x.shape, out, (kernel, 1), (stride, 1), (dilation, 1), ([lo for lo, _ in valid], 0),
                       ([min(n, hi) for n, (_, hi) in zip(x.shape[2:], valid, strict=True)], 1))
    launch(SOURCE, "maximum", x.dtype, y.size, to_channels_last(x), numbers, float(lowest(x.dtype)), y, index,
           int(kind is np.int64))
    return y, index


def avg_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
                     divisors: Sequence[Array], slope: float | None = None, out: Array | None = None,
                     signs: Array | None = None) -> Array:
    if not served(x):
        return NotImplemented
    if signs is not None:
        run = signs.shape[-1]
        launch(SOURCE, "pack_signs", x.dtype, signs.size, to_channels_last(x), x.shape[1] * x.shape[-1], run, signs)
    sizes = tuple(len(d) for d in divisors)
    y = empty_channels_last((*x.shape[:2], *sizes), x.dtype, like=x) if out is None else out
    numbers = _numbers(x, x.shape, sizes, (kernel, 1), (stride, 1), (padding, 0))
    launch(SOURCE, "average", x.dtype, y.size, to_channels_last(x), numbers, *_scales(divisors, x),
           1.0 if slope is None else float(slope), y)
    return y


def avg_pool_backward(g: Array, x_shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
                      padding: Sequence[int], divisors: Sequence[Array], signs: Array | None = None,
                      slope: float | None = None) -> Array:
    if not served(g):
        return NotImplemented
    dx = empty_channels_last(x_shape, g.dtype, like=g)
    numbers = _numbers(g, x_shape, g.shape[2:], (kernel, 1), (stride, 1), (padding, 0))
    launch(SOURCE, "average_backward", g.dtype, dx.size, to_channels_last(g), numbers, *_scales(divisors, g),
           1.0 if slope is None else float(slope), dx if slope is None else signs,
           1 if slope is None else signs.shape[-1], dx)
    return dx


def sum_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int]) -> Array:
    nd = x.ndim - 2
    out = pool_sizes(x.shape[2:], kernel, stride, (1,) * nd, None)
    return avg_pool_forward(x, kernel, stride, (0,) * nd, [np.ones(n) for n in out])


def sum_pool_backward(g: Array, x_shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> Array:
    return avg_pool_backward(g, x_shape, kernel, stride, (0,) * (g.ndim - 2), [np.ones(n) for n in g.shape[2:]])


def _numbers(like: Array, x_shape: Sequence[int], out: Sequence[int], *more: tuple[Sequence[int], int]) -> Array:
    """Sizes and arguments as one array on the device, each of three dims, with what missing dims are filled by."""
    lists = [_three(x_shape[2:], 1), [x_shape[1]], _three(out, 1), *(_three(values, fill) for values, fill in more)]
    return array_module(like).asarray(np.array([v for values in lists for v in values], np.int64))


def _three(values: Sequence[int], fill: int) -> list[int]:
    return [*(fill,) * (3 - len(values)), *(int(v) for v in values)]


def _scales(divisors: Sequence[Array], like: Array) -> list[Array]:
    ones = [np.ones(1)] * (3 - len(divisors))
    return [array_module(like).asarray((1 / np.asarray(d, np.float64)).astype(like.dtype)) for d in (*ones, *divisors)]
