"""Rows of a table on a device: indices are sorted, then every element of the gradient is summed by one thread."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, array_module
from .launch import launch, served

SOURCE = r"""
extern "C" {

__global__ void take_rows(const T* table, const long long* index, index_t rows, index_t width, T* y, index_t n) {
    EACH(i, n) {
        index_t row = index[i / width];
        y[i] = row >= 0 && row < rows ? table[row * width + i % width] : T(0);
    }
}
__global__ void add_rows(const T* g, const long long* places, const long long* starts, index_t width, T* total,
                         index_t n) {
    EACH(i, n) {
        index_t row = i / width, c = i % width;
        T sum = T(0);
        for (index_t k = starts[row]; k < starts[row + 1]; ++k) sum += g[places[k] * width + c];
        total[i] = sum;
    }
}

}
"""


def take_rows(table: Array, index: Array) -> Array:
    if not served(table):
        return NotImplemented
    xp, (rows, width) = array_module(table), table.shape
    y = xp.empty((*index.shape, width), table.dtype)
    launch(SOURCE, "take_rows", table.dtype, y.size, xp.ascontiguousarray(table),
           xp.ascontiguousarray(index, dtype=xp.int64), rows, width, y)
    return y


def add_rows(g: Array, index: Array, rows: int) -> Array:
    width = g.shape[index.ndim]
    if not served(g):
        return NotImplemented
    xp = array_module(g)
    flat = index.reshape(index.size).astype(xp.int64)
    places = np.argsort(flat, kind="stable").astype(xp.int64)  # stable, so that positions ascend within a row
    starts = np.searchsorted(flat[places], xp.arange(rows + 1)).astype(xp.int64)
    total = xp.empty((rows, width), g.dtype)
    launch(SOURCE, "add_rows", g.dtype, total.size, xp.ascontiguousarray(g), places, starts, width, total)
    return total
