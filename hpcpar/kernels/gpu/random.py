"""Random numbers of a box of a global array, drawn on the device: the same words as on the host.

One thread an element, in memory order: it finds its global index, the block of four words that holds its word, and
runs Philox 4x64 with ten rounds on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Array, array_module, empty_channels_last
from ..generic.random import Box, check_box
from .launch import C_TYPES, launch

PHILOX = r"""
typedef unsigned long long word_t;
struct Words { word_t a, b, c, d; };

__device__ inline Words philox(word_t block, word_t key0, word_t key1) {
    Words w = {block + 1, 0, 0, 0};
    for (int round = 0; round < 10; ++round) {
        word_t high0 = __umul64hi(0xD2E7470EE14C6C93ULL, w.a), low0 = 0xD2E7470EE14C6C93ULL * w.a;
        word_t high2 = __umul64hi(0xCA5A826395121157ULL, w.c), low2 = 0xCA5A826395121157ULL * w.c;
        Words next = {high2 ^ w.b ^ key0, low2, high0 ^ w.d ^ key1, low0};
        w = next;
        key0 += 0x9E3779B97F4A7C15ULL;
        key1 += 0xBB67AE8584CAA73BULL;
    }
    return w;
}

__device__ inline double unit(word_t word) { return (word >> 11) * (1.0 / 9007199254740992.0); }

__device__ inline word_t word_at(index_t i, word_t key0, word_t key1) {
    Words w = philox(i / 4, key0, key1);
    index_t lane = i % 4;
    return lane == 0 ? w.a : lane == 1 ? w.b : lane == 2 ? w.c : w.d;
}

"""

SOURCE = PHILOX + r"""
/* dims: for each, from the fastest in memory on: size of the box, step in the global array; base: its first element */
__device__ inline index_t global_index(index_t i, const index_t* dims, index_t count, index_t base) {
    for (index_t d = 0; d < count; ++d) {
        base += i % dims[2 * d] * dims[2 * d + 1];
        i /= dims[2 * d];
    }
    return base;
}

extern "C" {

__global__ void uniform(const index_t* dims, index_t count, index_t base, word_t key0, word_t key1, T* out,
                        index_t n) {
    const T below = T(1) - (sizeof(T) == 4 ? T(5.9604644775390625e-8) : T(1.1102230246251565e-16));
    EACH(i, n) {
        T u = (T)unit(word_at(global_index(i, dims, count, base), key0, key1));
        out[i] = u < below ? u : below;
    }
}

__global__ void normal(const index_t* dims, index_t count, index_t base, word_t key0, word_t key1, T* out,
                       index_t n) {
    EACH(i, n) {
        index_t at = 2 * global_index(i, dims, count, base);
        Words w = philox(at / 4, key0, key1);
        double u = unit(at % 4 ? w.c : w.a), v = unit(at % 4 ? w.d : w.b);
        out[i] = (T)(sqrt(-2 * log1p(-u)) * cos(v * 6.283185307179586));
    }
}

__global__ void mask(const index_t* dims, index_t count, index_t base, word_t key0, word_t key1, word_t threshold,
                     bool* out, index_t n) {
    EACH(i, n) out[i] = word_at(global_index(i, dims, count, base), key0, key1) >= threshold;
}

}
"""


def random_uniform(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                   dtype: Any = np.float64, like: Array = None) -> Array:
    return _draw("uniform", seed, stream, shape_global, box, np.dtype(dtype), like)


def random_normal(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                  dtype: Any = np.float64, like: Array = None) -> Array:
    return _draw("normal", seed, stream, shape_global, box, np.dtype(dtype), like)


def dropout_mask(seed: int, stream: int, shape_global: Sequence[int], box: Box | None, p: float,
                 like: Array = None) -> Array:
    threshold = math.ceil(p * 2**53) << 11
    if not 0 <= p <= 1 or threshold >= 2**64:
        return NotImplemented
    return _draw("mask", seed, stream, shape_global, box, np.dtype(bool), like, np.uint64(threshold))


def _draw(name: str, seed: int, stream: int, shape_global: Sequence[int], box: Box | None, dtype: np.dtype,
          like: Array, *more: Any) -> Array:
    shape = tuple(shape_global)
    box = check_box(shape, box)
    if dtype.char not in (*C_TYPES, "?"):
        return NotImplemented
    sizes, xp = tuple(hi - lo for lo, hi in box), array_module(like)
    last = 3 <= len(shape) <= 5
    out = empty_channels_last(sizes, dtype, like=like) if last else xp.empty(sizes, dtype)
    steps = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    order = [1, *range(len(shape) - 1, 1, -1), 0] if last else range(len(shape) - 1, -1, -1)
    dims = xp.asarray(np.array([(sizes[d], steps[d]) for d in order], np.int64))
    base = sum(lo * step for (lo, _), step in zip(box, steps, strict=True))
    kind = dtype if dtype.char in C_TYPES else np.dtype(np.float64)  # T plays no part in a mask
    launch(SOURCE, name, kind, out.size, dims, len(shape), base,
           np.uint64(seed), np.uint64(stream), *more, out)
    return out
