"""Attention on a device: products by cuBLAS over large blocks, everything between two products in one pass each.

What a query may see and what dropout keeps is computed where the scores are read, from positions and documents. The
lanes of a row take every LANES-th key, each with a running maximum and sum, which one thread then merges.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ..arrays import Array, array_module
from ..generic.attention import check, heads_in_memory
from ..precision import check_compute
from ..visible import NONE, AttentionDropout, Sight, Visible
from .launch import launch, served
from .matmul import matmul
from .random import PHILOX

BLOCK = (1024, 1024)  # queries and keys
BUDGET = 1 << 26      # scores at once
LANES = 32

SOURCE = PHILOX + r"""
/* info: heads, rows, keys | causal, windowed, left, right, documents | mask: 0 none, 1 bool, 2 added; its four steps |
   dropout: 0 or 1, heads, queries, keys, first sample, first head */
struct Place { index_t n, h, r, c; };

__device__ inline Place place_of(index_t row, index_t c, const index_t* info) {
    Place p = {row / info[1] / info[0], row / info[1] % info[0], row % info[1], c};
    return p;
}

__device__ inline bool seen(Place p, const index_t* info, const index_t* q, const index_t* k, const index_t* qd,
                            const index_t* kd, const bool* allowed) {
    if (info[3] && k[p.c] > q[p.r]) return false;
    if (info[4] && (k[p.c] < q[p.r] - info[5] || k[p.c] > q[p.r] + info[6])) return false;
    if (info[7] && qd[p.n * info[1] + p.r] != kd[p.n * info[2] + p.c]) return false;
    return info[8] != 1 || allowed[p.n * info[9] + p.h * info[10] + p.r * info[11] + p.c * info[12]];
}

__device__ inline T bias(Place p, const index_t* info, const T* added) {
    return info[8] == 2 ? added[p.n * info[9] + p.h * info[10] + p.r * info[11] + p.c * info[12]] : T(0);
}

__device__ inline bool kept(Place p, const index_t* info, const index_t* q, const index_t* k, word_t key0, word_t key1,
                            word_t threshold) {
    if (!info[13]) return true;
    index_t row = ((p.n + info[17]) * info[14] + p.h + info[18]) * info[15] + q[p.r];
    return word_at(row * info[16] + k[p.c], key0, key1) >= threshold;
}

extern "C" {

__global__ void restrict_rows(T* scores, const index_t* info, const index_t* q, const index_t* k, const index_t* qd,
                              const index_t* kd, const bool* allowed, const T* added, index_t lanes, T* tops, T* totals,
                              index_t n) {
    EACH(i, n) {
        index_t row = i / lanes, keys = info[2];
        T top = T(-INFINITY), total = T(0);
        for (index_t c = i % lanes; c < keys; c += lanes) {
            Place p = place_of(row, c, info);
            T v = seen(p, info, q, k, qd, kd, allowed) ? scores[row * keys + c] + bias(p, info, added) : T(-INFINITY);
            scores[row * keys + c] = v;
            if (v > top) { total = total * exp(top - v) + T(1); top = v; }
            else if (v != T(-INFINITY)) total += exp(v - top);
        }
        tops[i] = top;
        totals[i] = total;
    }
}

__global__ void merge_rows(const T* tops, const T* totals, index_t lanes, T* top, T* total, T* shrink, index_t n) {
    EACH(i, n) {
        T best = top[i];
        for (index_t j = i * lanes; j < (i + 1) * lanes; ++j) best = tops[j] > best ? tops[j] : best;
        T safe = best == T(-INFINITY) ? T(0) : best;
        T factor = exp(top[i] - safe), sum = total[i] * factor;
        for (index_t j = i * lanes; j < (i + 1) * lanes; ++j) sum += totals[j] * exp(tops[j] - safe);
        top[i] = best;
        total[i] = sum;
        shrink[i] = factor;
    }
}

__global__ void weights(T* scores, const T* top, const index_t* info, const index_t* q, const index_t* k, word_t key0,
                        word_t key1, word_t threshold, T factor, index_t n) {
    EACH(i, n) {
        index_t row = i / info[2];
        T safe = top[row] == T(-INFINITY) ? T(0) : top[row];
        bool keep = kept(place_of(row, i % info[2], info), info, q, k, key0, key1, threshold);
        scores[i] = keep ? exp(scores[i] - safe) * factor : T(0);
    }
}

__global__ void slopes(T* scores, T* slope, const T* lse, const T* delta, const index_t* info, const index_t* q,
                       const index_t* k, const index_t* qd, const index_t* kd, const bool* allowed, const T* added,
                       word_t key0, word_t key1, word_t threshold, T factor, index_t n) {
    EACH(i, n) {
        index_t row = i / info[2];
        Place p = place_of(row, i % info[2], info);
        T e = T(0), f = T(0);
        if (lse[row] != T(-INFINITY) && seen(p, info, q, k, qd, kd, allowed)) {
            e = exp(scores[i] + bias(p, info, added) - lse[row]);
            f = kept(p, info, q, k, key0, key1, threshold) ? factor : T(0);
        }
        slope[i] = e * (slope[i] * f - delta[row]);
        scores[i] = e * f;
    }
}

}
"""


def attention_forward(query: Array, key: Array, value: Array, scale: float, visible: Visible,
                      dropout: AttentionDropout | None = None, compute_dtype: str = "float32",
                      ) -> tuple[Array, Array]:
    check_compute(compute_dtype, query, key)
    product = partial(_product, compute_dtype=compute_dtype)
    shape = check(query, key, value)
    if not _served(dropout, query, key, value):
        return NotImplemented
    xp, dtype = array_module(query), query.dtype
    n, h, length, e = query.shape
    groups, width = key.shape[1], value.shape[3]
    out = heads_in_memory(query, h, length, width, dtype)
    lse = xp.empty((n, h, length), dtype)
    sight = Sight(visible, shape, BLOCK)
    for samples in _samples(shape):
        count = samples.stop - samples.start
        for i, rows in enumerate(sight.rows):
            size = rows.stop - rows.start
            lines, flat = h // groups * size, count * h * size
            q = query[samples, :, rows].reshape(count, groups, lines, e)
            top, total = xp.full(flat, -np.inf, dtype), xp.zeros(flat, dtype)
            shrink, summed = xp.empty(flat, dtype), xp.zeros((count, groups, lines, width), dtype)
            for j, keys in enumerate(sight.keys):
                if sight.state(samples, i, j) == NONE:
                    continue
                scores = product(q, key[samples, :, keys].swapaxes(2, 3)) * dtype.type(scale)
                block = _Block(sight, samples, rows, keys, dropout, scores)
                tops, totals = xp.empty(flat * LANES, dtype), xp.empty(flat * LANES, dtype)
                launch(SOURCE, "restrict_rows", dtype, tops.size, scores, *block.sight, LANES, tops, totals)
                launch(SOURCE, "merge_rows", dtype, flat, tops, totals, LANES, top, total, shrink)
                launch(SOURCE, "weights", dtype, scores.size, scores, top, *block.sight[:3], *block.dropout)
                summed *= shrink.reshape(count, groups, lines, 1)
                summed += product(scores, value[samples, :, keys])
            hidden = total == 0
            summed /= xp.where(hidden, dtype.type(1), total).reshape(count, groups, lines, 1)
            out[samples, :, rows] = summed.reshape(count, h, size, width)
            sums = xp.where(hidden, dtype.type(-np.inf), top + xp.log(xp.where(hidden, dtype.type(1), total)))
            lse[samples, :, rows] = sums.reshape(count, h, size)
    return out, lse


def attention_backward(g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float,
                       visible: Visible, dropout: AttentionDropout | None = None, mask_gradient: bool = False,
                       compute_dtype: str = "float32") -> tuple[Array, ...]:
    check_compute(compute_dtype, query, key)
    product = partial(_product, compute_dtype=compute_dtype)
    shape = check(query, key, value)
    if not _served(dropout, query, key, value, g, out, lse) or mask_gradient:
        return NotImplemented
    dtype = query.dtype
    h, e, width, groups = query.shape[1], query.shape[3], value.shape[3], key.shape[1]
    dq, dk, dv = (heads_in_memory(a, *a.shape[1:], dtype, fill=0) for a in (query, key, value))
    sight = Sight(visible, shape, BLOCK)
    for samples in _samples(shape):
        count = samples.stop - samples.start
        for i, rows in enumerate(sight.rows):
            size = rows.stop - rows.start
            lead = count, groups, h // groups * size
            q = query[samples, :, rows].reshape(*lead, e)
            up, result = (a[samples, :, rows].reshape(*lead, width) for a in (g, out))
            delta = (up * result).sum(axis=3).reshape(count * h * size)
            sums = lse[samples, :, rows].reshape(count * h * size).copy()
            for j, keys in enumerate(sight.keys):
                if sight.state(samples, i, j) == NONE:
                    continue
                k, v = key[samples, :, keys], value[samples, :, keys]
                scores = product(q, k.swapaxes(2, 3)) * dtype.type(scale)
                slope = product(up, v.swapaxes(2, 3))
                block = _Block(sight, samples, rows, keys, dropout, scores)
                launch(SOURCE, "slopes", dtype, scores.size, scores, slope, sums, delta, *block.sight, *block.dropout)
                dv[samples, :, keys] += product(scores.swapaxes(2, 3), up)
                dk[samples, :, keys] += product(slope.swapaxes(2, 3), q) * dtype.type(scale)
                dq[samples, :, rows] += product(slope, k).reshape(count, h, size, e) * dtype.type(scale)
    return dq, dk, dv


def _product(a: Array, b: Array, compute_dtype: str) -> Array:
    if compute_dtype == "float32":
        return array_module(a).matmul(a, b)
    pairs = (x.reshape(math.prod(x.shape[:2]), *x.shape[2:]) for x in (a, b))
    return matmul(*pairs, compute_dtype).reshape(*a.shape[:-1], b.shape[-1])


class _Block:
    """What the kernels are told of a block.

    Attributes
    ----------
    sight : list
        Numbers, positions of queries and keys, their documents, the bool mask, the float mask.
    dropout : list
        Keys of the generator, threshold, factor.
    """

    def __init__(self, sight: Sight, samples: slice, rows: slice, keys: slice, dropout: AttentionDropout | None,
                 like: Array) -> None:
        xp = array_module(like)
        visible, none = sight.visible, xp.zeros(1, np.int64)
        left, right = visible.window or (0, 0)
        allowed, added, kind, steps = xp.zeros(1, bool), xp.zeros(1, like.dtype), 0, (0,) * 4
        if sight.mask is not None:
            mask = sight.mask[samples, :, rows, keys]
            kind = 1 if mask.dtype == bool else 2
            # dims along which the mask is repeated are taken once, with a step of 0
            once = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.strides)]
            once = xp.ascontiguousarray(once, dtype=bool if kind == 1 else like.dtype)
            steps = tuple(0 if n == 1 else step // once.itemsize for n, step in zip(once.shape, once.strides,
                                                                                    strict=True))
            allowed, added = (once, added) if kind == 1 else (allowed, once)
        documents = [none, none]
        if sight.q_documents is not None:
            documents = [xp.ascontiguousarray(xp.asarray(d[samples, part]), dtype=np.int64)
                         for d, part in ((sight.q_documents, rows), (sight.k_documents, keys))]
        drop = [0] * 6 if dropout is None else [1, *dropout.shape[1:], dropout.offset[0] + samples.start,
                                                dropout.offset[1]]
        numbers = [sight.shape[1], rows.stop - rows.start, keys.stop - keys.start, visible.causal,
                   visible.window is not None, left, right, sight.q_documents is not None, kind, *steps, *drop]
        positions = [xp.asarray(p) for p in (sight.q_positions[rows].astype(np.int64),
                                             sight.k_positions[keys].astype(np.int64))]
        self.sight: list[Any] = [xp.asarray(np.array(numbers, np.int64)), *positions, *documents, allowed, added]
        self.dropout: list[Any] = [np.uint64(0), np.uint64(0), np.uint64(0), 1.0] if dropout is None else [
            np.uint64(dropout.seed), np.uint64(dropout.stream), np.uint64(_threshold(dropout)), dropout.factor]


def _threshold(dropout: AttentionDropout) -> int:
    return math.ceil(dropout.p * 2**53) << 11


def _served(dropout: AttentionDropout | None, *arrays: Array) -> bool:
    return served(*arrays) and all(a.size for a in arrays) and (dropout is None or _threshold(dropout) < 2**64)


def _samples(shape: tuple[int, ...]) -> list[slice]:
    n, h, length, keys = shape
    step = max(1, BUDGET // (h * min(length, BLOCK[0]) * min(keys, BLOCK[1])))
    return [slice(first, min(n, first + step)) for first in range(0, n, step)]
