"""Softmax and cross entropy over the channels on a device: one thread a row, for the few classes of a volume.

Rows of more than WIDEST elements are left to the generic code, whose reductions use many threads a row.
"""

from __future__ import annotations

from ..arrays import Array, array_module, empty_channels_last, sample_rows
from .launch import launch, served

WIDEST = 64

SOURCE = r"""
extern "C" {

__global__ void cross_entropy(const T* x, const long long* target, index_t channels, T* lse, T* picked, index_t n) {
    EACH(i, n) {
        const T* row = x + i * channels;
        T top = row[0];
        for (index_t c = 1; c < channels; ++c) top = row[c] > top ? row[c] : top;
        if (top < T(0) && top * T(0) != T(0)) top = T(0);  /* all -inf: the sum stays 0, the logarithm -inf */
        T total = T(0);
        for (index_t c = 0; c < channels; ++c) total += exp(row[c] - top);
        lse[i] = log(total) + top;
        picked[i] = target[i] >= 0 && target[i] < channels ? row[target[i]] : T(0);
    }
}

__global__ void cross_entropy_backward(const T* x, const long long* target, const T* lse, const T* soft,
                                       const T* hard, const T* smooth, const T* weight, index_t smoothing,
                                       index_t channels, T* dx, index_t n) {
    EACH(i, n) {
        index_t row = i / channels, c = i % channels;
        T v = exp(x[i] - lse[row]) * soft[row];
        if (target[row] == c) v -= hard[row];
        if (smoothing) v -= smooth[row] * weight[c];
        dx[i] = v;
    }
}

}
"""


def cross_entropy_forward(logits: Array, target: Array) -> tuple[Array, Array]:
    if not served(logits) or not 0 < logits.shape[1] <= WIDEST:
        return NotImplemented
    xp = array_module(logits)
    lse, picked = xp.empty(target.shape, logits.dtype), xp.empty(target.shape, logits.dtype)
    launch(SOURCE, "cross_entropy", logits.dtype, lse.size, sample_rows(logits),
           xp.ascontiguousarray(target, dtype=xp.int64), logits.shape[1], lse, picked)
    return lse, picked


def cross_entropy_backward(logits: Array, target: Array, lse: Array, soft: Array, hard: Array,
                           smooth: Array | None = None, class_weight: Array | None = None) -> Array:
    if not served(logits):
        return NotImplemented
    xp, dtype = array_module(logits), logits.dtype
    dx = empty_channels_last(logits.shape, dtype, like=logits)
    weight = xp.ones(logits.shape[1], dtype) if class_weight is None else class_weight
    rows = [xp.ascontiguousarray(a, dtype=dtype) for a in (lse, soft, hard, lse if smooth is None else smooth, weight)]
    launch(SOURCE, "cross_entropy_backward", dtype, dx.size, sample_rows(logits),
           xp.ascontiguousarray(target, dtype=xp.int64), *rows, int(smooth is not None), logits.shape[1], dx)
    return dx
