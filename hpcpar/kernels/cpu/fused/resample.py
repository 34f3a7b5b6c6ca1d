"""Resampling along one dim in one pass: arrays are seen as (slower dims, the dim, faster dims and channels), dense."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...arrays import Array, empty_channels_last, last, to_channels_last
from .jit import kernel


@kernel
def _taps(x, index, weight, y):
    size = x.shape[2]
    for a in range(x.shape[0]):
        for o in range(index.shape[0]):
            target = y[a, o]
            if index.shape[1] == 1:
                source, w = x[a, index[o, 0]], weight[o, 0]
                for i in range(size):
                    target[i] = source[i] * w
                continue
            # taps of weight 0 fill up shorter lists and are not read
            first, second, u, v = x[a, index[o, 0]], x[a, index[o, 1]], weight[o, 0], weight[o, 1]
            if v == 0:
                for i in range(size):
                    target[i] = first[i] * u
            else:
                for i in range(size):
                    target[i] = first[i] * u + second[i] * v
            for t in range(2, index.shape[1]):
                source, w = x[a, index[o, t]], weight[o, t]
                if w != 0:
                    for i in range(size):
                        target[i] += source[i] * w


@kernel
def _maxima(x, before, has_before, start, stop, scale, y, found):
    size = x.shape[2]
    for a in range(x.shape[0]):
        for o in range(start.shape[0]):
            best, place = y[a, o], found[a, o]
            for t in range(start[o], stop[o]):
                value = x[a, t]
                at = t * scale
                for i in range(size):
                    if t == start[o] or value[i] > best[i] or value[i] != value[i]:
                        best[i] = value[i]
                        place[i] = at + before[a, t, i] if has_before else at


def tap_sums(x: Array, dim: int, index: np.ndarray, weight: np.ndarray | None) -> Array:
    """See the reference, `hpcpar.kernels.generic.resample.tap_sums`."""
    if x.dtype not in (np.float32, np.float64) or x.size == 0 or index.size == 0:
        return NotImplemented
    y = empty_channels_last((*x.shape[:dim], len(index), *x.shape[dim + 1 :]), x.dtype)
    weights = np.ones(index.shape, x.dtype) if weight is None else weight.astype(x.dtype)
    _taps(_three(x, dim), np.ascontiguousarray(index, np.int64), weights, _three(y, dim))
    return y


def window_maxima(x: Array, start: Sequence[Sequence[int]], stop: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """See the reference, `hpcpar.kernels.generic.resample.window_maxima`."""
    if x.dtype not in (np.float32, np.float64) or x.size == 0:
        return NotImplemented
    y, index, scale = x, np.zeros((1, 1, 1), np.int64), 1
    for dim in range(x.ndim - 1, 1, -1):
        begin, end = (np.array(edges[dim - 2], np.int64) for edges in (start, stop))
        shape = (*y.shape[:dim], len(begin), *y.shape[dim + 1 :])
        best, found = empty_channels_last(shape, x.dtype), empty_channels_last(shape, np.int64)
        given = dim < x.ndim - 1
        _maxima(_three(y, dim), _three(index, dim) if given else index, given, begin, end, scale, *(
            _three(a, dim) for a in (best, found)))
        y, index = best, found
        scale *= x.shape[dim]
    return y, index


def _three(a: Array, dim: int) -> Array:
    """(slower dims, `dim`, faster dims and channels); a view where ``a`` is dense and channels last."""
    memory = last(to_channels_last(a))
    return memory.reshape(math.prod(memory.shape[: dim - 1]), memory.shape[dim - 1], math.prod(memory.shape[dim:]))
