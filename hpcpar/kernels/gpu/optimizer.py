"""Optimizer steps on a device, one pass over parameter, gradient and moments."""

from __future__ import annotations

import math

from ..arrays import Array, array_module, like_memory, memory_view
from .launch import launch, served

SOURCE = r"""
extern "C" {

__global__ void descend(T* p, const T* g, T lr, T decay, T scale, index_t n) {
    EACH(i, n) p[i] -= lr * (g[i] * scale + decay * p[i]);
}

__global__ void descend_with_momentum(T* p, const T* g, T* buf, T lr, T momentum, T fresh, T decay, T scale,
                                      index_t first, index_t nesterov, index_t n) {
    EACH(i, n) {
        T d = g[i] * scale + decay * p[i];
        T b = first ? d : momentum * buf[i] + fresh * d;
        buf[i] = b;
        p[i] -= lr * (nesterov ? d + momentum * b : b);
    }
}

__global__ void adam(T* p, const T* g, T* m, T* v, T* top, index_t largest, T size, T root, T rest1, T beta2,
                     T rest2, T eps, T decay, T keep, T scale, index_t n) {
    EACH(i, n) {
        T d = g[i] * scale + decay * p[i];
        T a = m[i] + rest1 * (d - m[i]);
        T b = beta2 * v[i] + rest2 * d * d;
        m[i] = a;
        v[i] = b;
        if (largest) {
            if (top[i] > b || top[i] != top[i]) b = top[i]; else top[i] = b;
        }
        p[i] = keep * p[i] - size * a / (sqrt(b) / root + eps);
    }
}

}
"""


def sgd_step(p: Array, g: Array, buf: Array | None, lr: float, momentum: float = 0.0, dampening: float = 0.0,
             weight_decay: float = 0.0, nesterov: bool = False, first: bool = False, grad_scale: float = 1.0) -> None:
    if not _served(p, g, buf):
        return NotImplemented
    if buf is None:
        launch(SOURCE, "descend", p.dtype, p.size, p, like_memory(g, p), float(lr), float(weight_decay),
               float(grad_scale))
        return None
    launch(SOURCE, "descend_with_momentum", p.dtype, p.size, p, like_memory(g, p), buf, float(lr), float(momentum),
           1.0 - dampening, float(weight_decay), float(grad_scale), int(first), int(nesterov))
    return None


def adam_step(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
              eps: float = 1e-8, weight_decay: float = 0.0, vmax: Array | None = None,
              grad_scale: float = 1.0) -> None:
    return _step(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay, 1.0, vmax, grad_scale)


def adamw_step(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
               eps: float = 1e-8, weight_decay: float = 0.01, vmax: Array | None = None,
               grad_scale: float = 1.0) -> None:
    return _step(p, g, m, v, step, lr, beta1, beta2, eps, 0.0, 1.0 - lr * weight_decay, vmax, grad_scale)


def _step(p, g, m, v, step, lr, beta1, beta2, eps, decay, keep, vmax, grad_scale) -> None:
    if not _served(p, g, m, v, vmax):
        return NotImplemented
    numbers = (lr / (1 - beta1**step), math.sqrt(1 - beta2**step), 1 - beta1, beta2, 1 - beta2, eps, decay, keep,
               grad_scale)
    launch(SOURCE, "adam", p.dtype, p.size, p, like_memory(g, p), m, v, v if vmax is None else vmax,
           int(vmax is not None), *(float(number) for number in numbers))
    return None


def _served(p: Array, g: Array, *others: Array | None) -> bool:
    """Whether all arrays are dense and of one dtype, and what is updated lies in memory as p does."""
    arrays = [a for a in others if a is not None]
    return (served(p, g, *arrays) and g.shape == p.shape and memory_view(p) is not None
            and all(a.strides == p.strides and a.shape == p.shape for a in arrays)
            and array_module(p) is array_module(g))
