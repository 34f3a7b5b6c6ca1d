"""Optimizer steps in place, the order of operations as in torch; and buffers of several arrays.

All arrays of one call have the same shape and, where it is to be fast, the same memory order. Large arrays are updated
in pieces that stay in the cache, so that a step of five passes reads each array from memory once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..arrays import Array, is_device, like_memory, memory_order, memory_view

#: Elements of one piece: 256 KiB of float32.
PIECE = 1 << 16


def sgd_step(p: Array, g: Array, buf: Array | None, lr: float, momentum: float = 0.0, dampening: float = 0.0,
             weight_decay: float = 0.0, nesterov: bool = False, first: bool = False, grad_scale: float = 1.0) -> None:
    """One step of stochastic gradient descent, in place.

    Parameters
    ----------
    p : array
        Parameter, updated.
    g : array
        Gradient, multiplied by ``grad_scale`` on the fly; not changed.
    buf : array or None
        Momentum, updated; None without momentum.
    first : bool
        The momentum starts as the gradient itself, without dampening (first step).
    """
    for q, d, b in _pieces(p, g, buf):
        d = d * grad_scale if grad_scale != 1 else d
        if weight_decay:
            d = d + weight_decay * q
        if b is not None:
            if first:
                b[...] = d
            else:
                b *= momentum
                b += (1 - dampening) * d
            d = d + momentum * b if nesterov else b
        q -= lr * d


def adam_step(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
              eps: float = 1e-8, weight_decay: float = 0.0, vmax: Array | None = None,
              grad_scale: float = 1.0) -> None:
    """One step of Adam (Kingma, Ba 2015), in place; weight decay is added to the gradient.

    Parameters
    ----------
    p, m, v : arrays
        Parameter, first and second moment; updated.
    g : array
        Gradient, multiplied by ``grad_scale`` on the fly; not changed.
    step : int
        Number of this step, from 1.
    vmax : array, optional
        Largest second moment so far (AMSGrad), updated.
    """
    _adam(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay, 0.0, vmax, grad_scale)


def adamw_step(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
               eps: float = 1e-8, weight_decay: float = 0.01, vmax: Array | None = None,
               grad_scale: float = 1.0) -> None:
    """One step of AdamW (Loshchilov, Hutter 2019): as `adam_step`, but the weight itself decays by ``lr``."""
    _adam(p, g, m, v, step, lr, beta1, beta2, eps, 0.0, weight_decay, vmax, grad_scale)


def _adam(p, g, m, v, step, lr, beta1, beta2, eps, decay, decoupled, vmax, grad_scale) -> None:
    size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    for q, d, a, b, top in _pieces(p, g, m, v, vmax):
        d = d * grad_scale if grad_scale != 1 else d
        if decay:
            d = d + decay * q
        if decoupled:
            q *= 1 - lr * decoupled
        a += (1 - beta1) * (d - a)
        b *= beta2
        b += (1 - beta2) * d * d
        if top is not None:
            np.maximum(top, b, out=top)
            b = top
        q -= size * a / (np.sqrt(b) / root + eps)


def add_into(dst: Array, src: Array) -> None:
    """``dst += src``."""
    dst += src


def pack(arrays: Sequence[Array], out: Array) -> None:
    """Copy arrays one behind the other into the 1-D buffer ``out``, each in its own memory order.

    Two ranks' buffers correspond if their arrays have equal shapes and memory orders.

    Raises
    ------
    ValueError
        If the buffer's length is not the sum of the arrays' sizes, or an array has gaps in memory.
    """
    for view, piece in _bucket(arrays, out):
        piece[...] = view


def unpack(buffer: Array, arrays: Sequence[Array]) -> None:
    """Copy the 1-D ``buffer`` back into arrays, the inverse of `pack`."""
    for view, piece in _bucket(arrays, buffer):
        view[...] = piece


def _bucket(arrays: Sequence[Array], buffer: Array) -> Iterator[tuple[Array, Array]]:
    total = sum(a.size for a in arrays)
    if buffer.ndim != 1 or buffer.size != total:
        raise ValueError(f"a bucket of shape {buffer.shape} for arrays of {total} elements in all: it must be 1-D "
                         f"and of just that length")
    at = 0
    for a in arrays:
        view = memory_view(a)
        if view is None:
            raise ValueError(f"an array of shape {a.shape} and strides {a.strides} has gaps in memory; copy it first")
        yield view, buffer[at:at + a.size]
        at += a.size


def _pieces(p: Array, *others: Array | None) -> Iterator[tuple[Array | None, ...]]:
    """Pieces of the memory of p and, in the same order, of arrays that are updated or read with it."""
    if p.size == 0:
        return
    if is_device(p) or p.size <= PIECE or memory_order(p) is None or any(
            a is not None and a.strides != p.strides for a in others[1:]):
        yield (p, *others)
        return
    gradient = memory_view(like_memory(others[0], p))
    views = [memory_view(p), gradient, *(None if a is None else memory_view(a) for a in others[1:])]
    for at in range(0, p.size, PIECE):
        yield tuple(None if v is None else v[at:at + PIECE] for v in views)
