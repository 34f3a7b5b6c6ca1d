"""Cross entropy over the channels on a device: one thread a row for the few classes of a volume, else LANES threads.

The lanes of a row take every LANES-th element, each with a running maximum and sum, which one thread then merges.
"""

from __future__ import annotations

from ..arrays import Array, array_module, empty_channels_last, sample_rows
from .launch import launch, served

WIDEST, LANES = 64, 128

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

__global__ void cross_entropy_lanes(const T* x, index_t channels, index_t lanes, T* tops, T* totals, index_t n) {
    EACH(i, n) {
        const T* row = x + i / lanes * channels;
        T top = T(-INFINITY), total = T(0);
        for (index_t c = i % lanes; c < channels; c += lanes) {
            T v = row[c];
            if (v > top) { total = total * exp(top - v) + T(1); top = v; }
            else if (v != T(-INFINITY)) total += exp(v - top);
        }
        tops[i] = top;
        totals[i] = total;
    }
}
__global__ void cross_entropy_merge(const T* x, const long long* target, const T* tops, const T* totals,
                                    index_t channels, index_t lanes, T* lse, T* picked, index_t n) {
    EACH(i, n) {
        T top = T(-INFINITY), total = T(0);
        for (index_t k = i * lanes; k < (i + 1) * lanes; ++k) top = tops[k] > top ? tops[k] : top;
        if (top == T(-INFINITY)) top = T(0);  /* all -inf: the sum stays 0, the logarithm -inf */
        for (index_t k = i * lanes; k < (i + 1) * lanes; ++k) total += totals[k] * exp(tops[k] - top);
        lse[i] = log(total) + top;
        picked[i] = target[i] >= 0 && target[i] < channels ? x[i * channels + target[i]] : T(0);
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
    channels = logits.shape[1]
    if not served(logits) or channels == 0:
        return NotImplemented
    xp, dtype = array_module(logits), logits.dtype
    lse, picked = xp.empty(target.shape, dtype), xp.empty(target.shape, dtype)
    rows, classes = sample_rows(logits), xp.ascontiguousarray(target, dtype=xp.int64)
    if channels <= WIDEST:
        launch(SOURCE, "cross_entropy", dtype, lse.size, rows, classes, channels, lse, picked)
        return lse, picked
    tops, totals = xp.empty(lse.size * LANES, dtype), xp.empty(lse.size * LANES, dtype)
    launch(SOURCE, "cross_entropy_lanes", dtype, tops.size, rows, channels, LANES, tops, totals)
    launch(SOURCE, "cross_entropy_merge", dtype, lse.size, rows, classes, tops, totals, channels, LANES, lse, picked)
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
