"""Rotation of pairs of features: one pass over memory, whatever the order of samples, heads and positions in it."""

from __future__ import annotations

import numpy as np

from ...arrays import Array
from .jit import kernel

# Two kernels that differ in what they do with a row: with that chosen inside one nest of loops, short rows take up to
# 7 % longer.


@kernel
def _halves(x, from_n, from_h, from_s, cosine, sine, y, to_n, to_h, to_s, samples, heads, width):
    tables, length, pairs = cosine.shape
    for n in range(samples):
        t = n if tables > 1 else 0
        for s in range(length):
            c, d = cosine[t, s], sine[t, s]
            for h in range(heads):
                i, j = n * from_n + h * from_h + s * from_s, n * to_n + h * to_h + s * to_s
                row, out = x[i:i + width], y[j:j + width]
                for k in range(pairs):
                    out[k] = row[k] * c[k] - row[k + pairs] * d[k]
                for k in range(pairs):
                    out[k + pairs] = row[k] * d[k] + row[k + pairs] * c[k]
                for k in range(2 * pairs, width):
                    out[k] = row[k]


@kernel
def _neighbours(x, from_n, from_h, from_s, cosine, sine, y, to_n, to_h, to_s, samples, heads, width):
    tables, length, pairs = cosine.shape
    for n in range(samples):
        t = n if tables > 1 else 0
        for s in range(length):
            c, d = cosine[t, s], sine[t, s]
            for h in range(heads):
                i, j = n * from_n + h * from_h + s * from_s, n * to_n + h * to_h + s * to_s
                row, out = x[i:i + width], y[j:j + width]
                for k in range(pairs):
                    out[2 * k] = row[2 * k] * c[k] - row[2 * k + 1] * d[k]
                    out[2 * k + 1] = row[2 * k] * d[k] + row[2 * k + 1] * c[k]
                for k in range(2 * pairs, width):
                    out[k] = row[k]


def rotate_pairs(x: Array, cosine: Array, sine: Array, interleaved: bool = False) -> Array:
    if x.dtype.char not in "fd" or x.size == 0 or cosine.dtype != x.dtype or x.strides[3] != x.itemsize or min(
            x.strides) < 0:
        return NotImplemented
    y = np.empty_like(x)
    samples, heads, _, width = x.shape
    tables = [np.ascontiguousarray(a if a.ndim == 3 else a[None]) for a in (cosine, sine)]
    (_neighbours if interleaved else _halves)(*_line(x), *tables, *_line(y), samples, heads, width)
    return y


def _line(a: Array) -> tuple[Array, int, int, int]:
    """The memory from the first to the last element as one dim, and the steps of samples, heads and positions in it."""
    steps = [stride // a.itemsize for stride in a.strides]
    length = 1 + sum((n - 1) * step for n, step in zip(a.shape, steps, strict=True))
    return np.lib.stride_tricks.as_strided(a, (length,), (a.itemsize,)), *steps[:3]
