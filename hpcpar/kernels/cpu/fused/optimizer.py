"""Optimizer steps in one pass over parameter, gradient and moments."""

from __future__ import annotations

import math

import numpy as np

from ...arrays import Array, like_memory, memory_view
from .jit import kernel


@kernel
def _descend(p, g, lr, decay, scale):
    for i in range(p.size):
        p[i] -= lr * (g[i] * scale + decay * p[i])


@kernel
def _descend_with_momentum(p, g, buf, lr, momentum, fresh, decay, nesterov, scale):
    for i in range(p.size):
        d = g[i] * scale + decay * p[i]
        b = momentum * buf[i] + fresh * d
        buf[i] = b
        p[i] -= lr * (d + momentum * b if nesterov else b)


@kernel
def _adam(p, g, m, v, size, root, rest1, beta2, rest2, eps, decay, keep, scale):
    for i in range(p.size):
        d = g[i] * scale + decay * p[i]
        a = m[i] + rest1 * (d - m[i])
        b = beta2 * v[i] + rest2 * d * d
        m[i] = a
        v[i] = b
        p[i] = keep * p[i] - size * a / (np.sqrt(b) / root + eps)


@kernel
def _adam_largest(p, g, m, v, top, size, root, rest1, beta2, rest2, eps, decay, keep, scale):
    for i in range(p.size):
        d = g[i] * scale + decay * p[i]
        a = m[i] + rest1 * (d - m[i])
        b = beta2 * v[i] + rest2 * d * d
        largest = top[i] if top[i] > b or top[i] != top[i] else b
        m[i] = a
        v[i] = b
        top[i] = largest
        p[i] = keep * p[i] - size * a / (np.sqrt(largest) / root + eps)


@kernel
def _add(dst, src):
    for i in range(dst.size):
        dst[i] += src[i]


def sgd_step(p: Array, g: Array, buf: Array | None, lr: float, momentum: float = 0.0, dampening: float = 0.0,
             weight_decay: float = 0.0, nesterov: bool = False, first: bool = False, grad_scale: float = 1.0) -> None:
    views = _views(p, g, buf)
    if views is None:
        return NotImplemented
    kind = p.dtype.type
    if buf is None:
        _descend(*views, kind(lr), kind(weight_decay), kind(grad_scale))
        return None
    if first:
        buf[...] = 0  # the momentum becomes the gradient, whatever it held
    fresh = 1.0 if first else 1.0 - dampening
    _descend_with_momentum(*views, kind(lr), kind(momentum), kind(fresh), kind(weight_decay), nesterov,
                           kind(grad_scale))
    return None


def adam_step(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
              eps: float = 1e-8, weight_decay: float = 0.0, vmax: Array | None = None,
              grad_scale: float = 1.0) -> None:
    return _step(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay, 1.0, vmax, grad_scale)


def adamw_step(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
               eps: float = 1e-8, weight_decay: float = 0.01, vmax: Array | None = None,
               grad_scale: float = 1.0) -> None:
    return _step(p, g, m, v, step, lr, beta1, beta2, eps, 0.0, 1.0 - lr * weight_decay, vmax, grad_scale)


def add_into(dst: Array, src: Array) -> None:
    views = _views(dst, src) if dst.strides == src.strides else None
    if views is None:
        return NotImplemented
    _add(*views)
    return None


def _step(p, g, m, v, step, lr, beta1, beta2, eps, decay, keep, vmax, grad_scale) -> None:
    views = _views(p, g, m, v, vmax)
    if views is None:
        return NotImplemented
    numbers = (lr / (1 - beta1**step), math.sqrt(1 - beta2**step), 1 - beta1, beta2, 1 - beta2, eps, decay, keep,
               grad_scale)
    (_adam if vmax is None else _adam_largest)(*views, *(p.dtype.type(number) for number in numbers))
    return None


def _views(p: Array, g: Array, *others: Array | None) -> list[Array] | None:
    """Flat views in the memory order of p (the gradient copied if it lies otherwise), or None if that is impossible."""
    arrays = [a for a in others if a is not None]
    if p.dtype.char not in "fd" or p.size == 0 or any(
            a.dtype != p.dtype or a.shape != p.shape for a in (g, *arrays)) or any(
            a.strides != p.strides for a in arrays):
        return None
    flat = memory_view(p)
    return None if flat is None else [flat, memory_view(like_memory(g, p)), *(memory_view(a) for a in arrays)]
