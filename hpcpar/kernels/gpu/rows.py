"""Normalisation of rows on a device: LANES neighbouring threads a row, neighbouring columns at neighbouring threads.

As over channels, sums are taken in float64 by lanes and merged by one more reduction: no atomics, so the same bits each
time.
"""

from __future__ import annotations

from ..arrays import Array, array_module
from ..generic.norm import split_scale
from .launch import launch, served

LANES = 32

#: Parts into which rows are cut for sums over them.
PARTS = 64

SOURCE = r"""
extern "C" {

__global__ void sums(const T* x, index_t width, index_t lanes, double* partial, index_t n) {
    EACH(i, n) {
        const T* row = x + i / lanes * width;
        double total = 0;
        for (index_t c = i % lanes; c < width; c += lanes) total += row[c];
        partial[i] = total;
    }
}
__global__ void squares(const T* x, const double* center, index_t width, index_t lanes, double* partial, index_t n) {
    EACH(i, n) {
        const T* row = x + i / lanes * width;
        double total = 0, middle = center[i / lanes];
        for (index_t c = i % lanes; c < width; c += lanes) {
            double d = row[c] - middle;
            total += d * d;
        }
        partial[i] = total;
    }
}
__global__ void normalize(const T* x, const T* hi, const T* lo, const T* scale, const T* weight, const T* bias,
                          index_t width, T* y, index_t n) {
    EACH(i, n) {
        index_t row = i / width, c = i % width;
        y[i] = (((x[i] - hi[row]) - lo[row]) * scale[row]) * weight[c] + bias[c];
    }
}
__global__ void grad_rows(const T* g, const T* x, const double* mean, const T* weight, index_t width, index_t lanes,
                          double* first, double* second, index_t n) {
    EACH(i, n) {
        index_t row = i / lanes;
        double total = 0, dot = 0;
        for (index_t c = i % lanes; c < width; c += lanes) {
            double v = double(g[row * width + c]) * weight[c];
            total += v;
            dot += v * (x[row * width + c] - mean[row]);
        }
        first[i] = total;
        second[i] = dot;
    }
}
__global__ void grad_columns(const T* g, const T* x, const T* hi, const T* lo, const T* scale, index_t rows,
                             index_t parts, index_t width, double* dweight, double* dbias, index_t n) {
    EACH(i, n) {
        index_t c = i % width, part = i / width;
        double weight = 0, bias = 0;
        for (index_t r = part; r < rows; r += parts) {
            index_t at = r * width + c;
            weight += g[at] * (((x[at] - hi[r]) - lo[r]) * scale[r]);
            bias += g[at];
        }
        dweight[i] = weight;
        dbias[i] = bias;
    }
}
__global__ void grad_input(const T* g, const T* x, const T* hi, const T* lo, const T* scale, const T* weight,
                           const T* first, const T* second, index_t width, T* dx, index_t n) {
    EACH(i, n) {
        index_t row = i / width;
        T normal = ((x[i] - hi[row]) - lo[row]) * scale[row];
        dx[i] = scale[row] * (g[i] * weight[i % width] - (normal * second[row] + first[row]));
    }
}

}
"""


def row_moments(x: Array) -> tuple[Array, Array]:
    if not served(x) or x.size == 0:
        return NotImplemented
    dense, partial = _dense(x), _partial(x)
    launch(SOURCE, "sums", x.dtype, partial.size, dense, x.shape[1], LANES, partial)
    mean = partial.sum(axis=1) / x.shape[1]
    launch(SOURCE, "squares", x.dtype, partial.size, dense, mean, x.shape[1], LANES, partial)
    return mean, partial.sum(axis=1)


def row_squares(x: Array) -> Array:
    if not served(x) or x.size == 0:
        return NotImplemented
    partial = _partial(x)
    zeros = array_module(x).zeros(x.shape[0])
    launch(SOURCE, "squares", x.dtype, partial.size, _dense(x), zeros, x.shape[1], LANES, partial)
    return partial.sum(axis=1)


def row_normalize(x: Array, mean: Array, inv_std: Array, weight: Array | None = None,
                  bias: Array | None = None) -> Array:
    if not served(x) or x.size == 0:
        return NotImplemented
    y = array_module(x).empty(x.shape, x.dtype)
    launch(SOURCE, "normalize", x.dtype, x.size, _dense(x), *split_scale(mean, inv_std, None, x.dtype),
           _line(weight, x, 1), _line(bias, x, 0), x.shape[1], y)
    return y


def row_grad_sums(g: Array, x: Array, mean: Array, inv_std: Array,
                  weight: Array | None = None) -> tuple[Array, Array, Array, Array]:
    if not served(g, x) or x.size == 0:
        return NotImplemented
    xp, (rows, width) = array_module(x), x.shape
    grads, dense, first, second = _dense(g), _dense(x), _partial(x), _partial(x)
    launch(SOURCE, "grad_rows", x.dtype, first.size, grads, dense, xp.ascontiguousarray(mean), _line(weight, x, 1),
           width, LANES, first, second)
    parts = min(rows, PARTS)
    dweight, dbias = xp.empty((parts, width)), xp.empty((parts, width))
    launch(SOURCE, "grad_columns", x.dtype, dweight.size, grads, dense, *split_scale(mean, inv_std, None, x.dtype),
           rows, parts, width, dweight, dbias)
    return first.sum(axis=1), second.sum(axis=1) * inv_std, dweight.sum(axis=0), dbias.sum(axis=0)


def row_grad_input(g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array,
                   s2_mean: Array) -> Array:
    if not served(g, x) or x.size == 0:
        return NotImplemented
    dx = array_module(x).empty(x.shape, x.dtype)
    launch(SOURCE, "grad_input", x.dtype, x.size, _dense(g), _dense(x), *split_scale(mean, inv_std, None, x.dtype),
           _line(weight, x, 1), s1_mean.astype(x.dtype), s2_mean.astype(x.dtype), x.shape[1], dx)
    return dx


def _dense(a: Array) -> Array:
    return array_module(a).ascontiguousarray(a)


def _partial(x: Array) -> Array:
    return array_module(x).empty((x.shape[0], LANES))


def _line(values: Array | None, x: Array, default: int) -> Array:
    """Weight or bias (width,) in the dtype of x; without one, what changes nothing."""
    xp = array_module(x)
    return xp.full(x.shape[1], default, x.dtype) if values is None else xp.ascontiguousarray(values, dtype=x.dtype)
