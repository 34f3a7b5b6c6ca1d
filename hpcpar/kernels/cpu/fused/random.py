"""Words of a Philox stream for boxes made of many short runs, where NumPy's generator would be started for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays import Array
from ...generic.random import SHORT_RUN, Box, check_box, mask_of, normal_of, random_words, uniform_of
from .jit import kernel

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Multipliers and key increments of Philox 4x64 (Salmon et al. 2011, table 2 and section 2.3).
_MULTIPLY_0, _MULTIPLY_2 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10


@kernel
def _draw(out, starts, key_0, key_1):
    """Fill each row with consecutive words from its start; a block of four words belongs to counter block + 1."""
    rows, length = out.shape
    for row in range(rows):
        start = starts[row]
        at = np.int64(0)
        while at < length:
            word = start + at
            lane = word % 4
            c0, c1, c2, c3 = np.uint64(word // 4 + 1), np.uint64(0), np.uint64(0), np.uint64(0)
            k0, k1 = key_0, key_1
            for _ in range(_ROUNDS):
                a, b = c0, _MULTIPLY_0
                for side in range(2):
                    if side:
                        a, b = c2, _MULTIPLY_2
                    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
                    middle = a1 * b0 + ((a0 * b0) >> _HALF)
                    carry = a0 * b1 + (middle & _LOW)
                    high, low = a1 * b1 + (middle >> _HALF) + (carry >> _HALF), a * b
                    if side:
                        high_2, low_2 = high, low
                    else:
                        high_0, low_0 = high, low
                c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
                k0 += _WEYL_0
                k1 += _WEYL_1
            count = min(4 - lane, length - at)
            for i in range(count):
                take = lane + i
                out[row, at + i] = c0 if take == 0 else c1 if take == 1 else c2 if take == 2 else c3
            at += count


def words_of_box(seed: int, stream: int, shape_global: Sequence[int], box: Box | None, words: int) -> np.ndarray:
    """As `hpcpar.kernels.generic.random.random_words`."""
    shape = tuple(shape_global)
    box = check_box(shape, box)
    sizes = tuple(hi - lo for lo, hi in box)
    outer, run = len(shape), words
    while outer and (outer == len(shape) or sizes[outer] == shape[outer]):  # as long as the runs join
        outer -= 1
        run *= sizes[outer]
    if run >= SHORT_RUN or 0 in sizes:
        return random_words(seed, stream, shape, box, words)
    starts = np.zeros((1,) * outer, np.int64) + sum(lo * math.prod(shape[d + 1:]) for d, (lo, _) in enumerate(box))
    for d in range(outer):
        along = np.arange(sizes[d]).reshape(-1, *(1,) * (outer - d - 1))
        starts = starts + along * math.prod(shape[d + 1:])
    rows = math.prod(sizes[:outer])
    out = np.empty((rows, run), np.uint64)
    _draw(out, (starts * words).reshape(rows), np.uint64(seed), np.uint64(stream))
    return out.reshape(*sizes, words)


def random_uniform(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                   dtype: Any = np.float64, like: Array = None) -> Array:
    return uniform_of(words_of_box(seed, stream, shape_global, box, 1), dtype, like)


def random_normal(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                  dtype: Any = np.float64, like: Array = None) -> Array:
    return normal_of(words_of_box(seed, stream, shape_global, box, 2), dtype, like)


def dropout_mask(seed: int, stream: int, shape_global: Sequence[int], box: Box | None, p: float,
                 like: Array = None) -> Array:
    return mask_of(words_of_box(seed, stream, shape_global, box, 1), p, like)
