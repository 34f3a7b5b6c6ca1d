"""Rows of a table, copied and added one by one: no sorting, no copy of the gradient."""

from __future__ import annotations

import numpy as np

from ...arrays import Array
from .jit import kernel


@kernel
def _take(table, index, y):
    rows, width = table.shape
    for i in range(index.size):
        row = index[i]
        if 0 <= row < rows:
            for c in range(width):
                y[i, c] = table[row, c]
        else:
            for c in range(width):
                y[i, c] = 0


@kernel
def _add(g, index, total):
    rows, width = total.shape
    for i in range(index.size):
        row = index[i]
        if 0 <= row < rows:
            for c in range(width):
                total[row, c] += g[i, c]


def take_rows(table: Array, index: Array) -> Array:
    if table.dtype.char not in "fd" or table.size == 0 or index.size == 0:
        return NotImplemented
    width = table.shape[1]
    y = np.empty((*index.shape, width), table.dtype)
    _take(np.ascontiguousarray(table), _flat(index), y.reshape(index.size, width))
    return y


def add_rows(g: Array, index: Array, rows: int) -> Array:
    width = g.shape[index.ndim]
    if g.dtype.char not in "fd" or g.size == 0 or rows == 0:
        return NotImplemented
    total = np.zeros((rows, width), g.dtype)
    _add(np.ascontiguousarray(g).reshape(index.size, width), _flat(index), total)
    return total


def _flat(index: Array) -> Array:
    return np.ascontiguousarray(index, np.int64).reshape(index.size)
