"""Words of a Philox stream for boxes made of many short runs, where NumPy's generator would be started for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays import Array
from ...generic.random import SHORT_RUN, Box, check_box, mask_of, normal_of, random_words, uniform_of
from ...visible import AttentionDropout, few_runs
from .jit import inlined, kernel

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Multipliers and key increments of Philox 4x64 (Salmon et al. 2011, table 2 and section 2.3).
_MULTIPLY_0, _MULTIPLY_2 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10
_LANES = 64  # counters taken together, for vector instructions


@inlined
def _high(a, b):
    """Upper half of the product of two words."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a1 * b0 + ((a0 * b0) >> _HALF)
    carry = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _HALF) + (carry >> _HALF)


@kernel
def _keep(kept, starts, threshold, key_0, key_1):
    """Whether consecutive words from the start of each row on reach the threshold."""
    rows, length = kept.shape
    c = np.empty((4, _LANES), np.uint64)
    for row in range(rows):
        block, lane = starts[row] // 4, starts[row] % 4
        at = -lane
        while at < length:
            for j in range(_LANES):
                c[0, j] = np.uint64(block + j + 1)
                c[1, j] = c[2, j] = c[3, j] = np.uint64(0)
            k0, k1 = key_0, key_1
            for _ in range(_ROUNDS):
                for j in range(_LANES):
                    c0, c1, c2, c3 = c[0, j], c[1, j], c[2, j], c[3, j]
                    c[0, j], c[1, j] = _high(c2, _MULTIPLY_2) ^ c1 ^ k0, c2 * _MULTIPLY_2
                    c[2, j], c[3, j] = _high(c0, _MULTIPLY_0) ^ c3 ^ k1, c0 * _MULTIPLY_0
                k0 += _WEYL_0
                k1 += _WEYL_1
            for i in range(max(0, -at), min(4 * _LANES, length - at)):
                kept[row, at + i] = c[i % 4, i // 4] >= threshold
            at += 4 * _LANES
            block += _LANES


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


def kept_weights(dropout: AttentionDropout, samples: slice, heads: slice, rows: np.ndarray, keys: np.ndarray) -> Array:
    """As `AttentionDropout.kept`, with one row for each sample, head and query: bool (n * h * rows, keys)."""
    _, h, queries, length = dropout.shape
    n, first = (np.arange(s.start, s.stop) + o for s, o in zip((samples, heads), dropout.offset, strict=True))
    starts = ((n[:, None, None] * h + first[:, None]) * queries + rows) * length
    starts = starts.reshape(n.size * first.size * rows.size)
    kept = np.zeros((starts.size, keys.size), bool)
    threshold = math.ceil(dropout.p * 2**53) << 11  # as in `mask_of`
    if threshold < 2**64:
        seed, stream = np.uint64(dropout.seed), np.uint64(dropout.stream)
        for run in few_runs(keys):
            first, last = int(keys[run].min()), int(keys[run].max())
            drawn = np.empty((starts.size, last - first + 1), bool)
            _keep(drawn, starts + first, np.uint64(threshold), seed, stream)
            kept[:, run] = drawn[:, keys[run] - first]
    return kept


def random_uniform(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                   dtype: Any = np.float64, like: Array = None) -> Array:
    return uniform_of(words_of_box(seed, stream, shape_global, box, 1), dtype, like)


def random_normal(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                  dtype: Any = np.float64, like: Array = None) -> Array:
    return normal_of(words_of_box(seed, stream, shape_global, box, 2), dtype, like)


def dropout_mask(seed: int, stream: int, shape_global: Sequence[int], box: Box | None, p: float,
                 like: Array = None) -> Array:
    return mask_of(words_of_box(seed, stream, shape_global, box, 1), p, like)
