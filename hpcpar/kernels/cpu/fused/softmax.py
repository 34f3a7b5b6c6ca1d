"""Softmax and cross entropy over the fastest dim in memory: float32 rows, several short ones at a time.

The exponentials of a block of rows are taken as one flat loop, so that they vectorise also where a row is a voxel's
three or four classes.
"""

from __future__ import annotations

import math

import numpy as np

from ...arrays import Array, empty_channels_last, last, like_memory, memory_order, to_channels_last
from .functions import exp32, row_dot, row_max32, row_sum
from .jit import kernel

BLOCK = 2048  # elements of one block of rows: 8 KiB


@kernel
def _softmax(x, y, logarithm):
    rows, width = x.shape
    step = max(1, BLOCK // width)
    scratch = np.empty((step, width), np.float32)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        for i in range(count):
            top = row_max32(x[first + i])
            for c in range(width):
                y[first + i, c] = x[first + i, c] - top
        flat, source = scratch.reshape(step * width), y[first:first + count].reshape(count * width)
        for i in range(count * width):
            flat[i] = exp32(source[i])
        for i in range(count):
            total = row_sum(scratch[i])
            if logarithm:
                shift = np.log(total)
                for c in range(width):
                    y[first + i, c] -= shift
            else:
                factor = np.float32(1) / total
                for c in range(width):
                    y[first + i, c] = scratch[i, c] * factor


@kernel
def _softmax_backward(g, y, dx):
    rows, width = g.shape
    for i in range(rows):
        dot = row_dot(g[i], y[i])
        for c in range(width):
            dx[i, c] = y[i, c] * (g[i, c] - dot)


@kernel
def _log_softmax_backward(g, y, dx):
    rows, width = g.shape
    for i in range(rows):
        total = row_sum(g[i])
        for c in range(width):
            dx[i, c] = g[i, c] - exp32(y[i, c]) * total


@kernel
def _cross_entropy(x, target, lse, picked):
    rows, width = x.shape
    step = max(1, BLOCK // width)
    scratch, tops = np.empty((step, width), np.float32), np.empty(step, np.float32)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        for i in range(count):
            top = row_max32(x[first + i])
            top = np.float32(0) if top == -np.inf else top
            for c in range(width):
                scratch[i, c] = x[first + i, c] - top
            tops[i] = top
        flat = scratch.reshape(step * width)
        for i in range(count * width):
            flat[i] = exp32(flat[i])
        for i in range(count):
            total = row_sum(scratch[i])
            lse[first + i] = tops[i] + np.log(total)
            t = target[first + i]
            picked[first + i] = x[first + i, t] if 0 <= t < width else np.float32(0)


@kernel
def _cross_entropy_backward(x, target, lse, soft, hard, smooth, weight, dx):
    rows, width = x.shape
    step = max(1, BLOCK // width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        for i in range(count):
            for c in range(width):
                dx[first + i, c] = x[first + i, c] - lse[first + i]
        flat = dx[first:first + count].reshape(count * width)
        for i in range(count * width):
            flat[i] = exp32(flat[i])
        for i in range(count):
            factor = soft[first + i]
            for c in range(width):
                dx[first + i, c] *= factor
            t = target[first + i]
            if 0 <= t < width:
                dx[first + i, t] -= hard[first + i]
            if smooth.size:
                for c in range(width):
                    dx[first + i, c] -= smooth[first + i] * weight[c]


def softmax(x: Array, axis: int) -> Array:
    return _along(axis, x, lambda rows, y: _softmax(rows, y, False))


def log_softmax(x: Array, axis: int) -> Array:
    return _along(axis, x, lambda rows, y: _softmax(rows, y, True))


def softmax_backward(g: Array, y: Array, axis: int) -> Array:
    return _along(axis, y, lambda rows, grads, dx: _softmax_backward(grads, rows, dx), g)


def log_softmax_backward(g: Array, y: Array, axis: int) -> Array:
    return _along(axis, y, lambda rows, grads, dx: _log_softmax_backward(grads, rows, dx), g)


def cross_entropy_forward(logits: Array, target: Array) -> tuple[Array, Array]:
    if logits.dtype != np.float32 or logits.size == 0:
        return NotImplemented
    lse, picked = np.empty(target.shape, np.float32), np.empty(target.shape, np.float32)
    n = target.size
    _cross_entropy(_rows(logits), _flat(target, np.int64), lse.reshape(n), picked.reshape(n))
    return lse, picked


def cross_entropy_backward(logits: Array, target: Array, lse: Array, soft: Array, hard: Array,
                           smooth: Array | None = None, class_weight: Array | None = None) -> Array:
    if logits.dtype != np.float32 or logits.size == 0:
        return NotImplemented
    dx = empty_channels_last(logits.shape, np.float32)
    weight = np.ones(logits.shape[1]) if class_weight is None else class_weight
    smooth = np.empty(0, np.float32) if smooth is None else smooth
    _cross_entropy_backward(_rows(logits), _flat(target, np.int64),
                            *(_flat(a, np.float32) for a in (lse, soft, hard, smooth, weight)), _rows(dx))
    return dx


def _along(axis: int, x: Array, run, *others: Array) -> Array:
    """Run over rows along ``axis``; declined unless that is the fastest dim of a dense float32 array."""
    order = memory_order(x)
    if x.dtype != np.float32 or x.size == 0 or order is None or any(a.dtype != x.dtype for a in others):
        return NotImplemented
    axis %= x.ndim
    if axis != order[-1] and x.shape[axis] > 1 and x.strides[axis] != x.itemsize:
        return NotImplemented
    out = np.empty_like(x)
    width = x.shape[axis]
    order = (*(d for d in order if d != axis), axis)
    rows = [a.transpose(order).reshape(x.size // width, width)
            for a in (x, *(like_memory(a, x) for a in others), out)]
    run(*rows)
    return out


def _rows(a: Array) -> Array:
    """(positions, C) of a channels-last array."""
    a = to_channels_last(a)
    return (last(a) if a.ndim > 2 else a).reshape(a.size // a.shape[1], a.shape[1])


def _flat(a: Array, dtype: type) -> Array:
    return np.ascontiguousarray(a, dtype).reshape(math.prod(a.shape))
