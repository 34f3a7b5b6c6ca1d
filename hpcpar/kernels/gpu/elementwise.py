"""Fused activations on a device, over the memory of dense arrays."""

from __future__ import annotations

from typing import Any

from ..arrays import Array, array_module, like_memory, memory_view
from .launch import launch, served

SOURCE = r"""
extern "C" {

__device__ inline T sigmoid_of(T x) { return T(1) / (T(1) + exp(-x)); }
__device__ inline T cdf_of(T x) { return T(0.5) * erfc(-x * T(0.7071067811865476)); }
__device__ inline T tanh_argument(T x) { return T(1.5957691216057308) * (x + T(0.044715) * x * x * x); }

__global__ void leaky_relu(const T* x, T slope, T* y, index_t n) {
    EACH(i, n) y[i] = x[i] <= T(0) ? (slope == T(0) ? T(0) : x[i] * slope) : x[i];
}
__global__ void leaky_relu_backward(const T* g, const T* y, T slope, T* dx, index_t n) {
    EACH(i, n) dx[i] = y[i] > T(0) ? g[i] : (slope == T(0) ? T(0) : g[i] * slope);
}
__global__ void gelu(const T* x, T* y, index_t n) {
    EACH(i, n) y[i] = x[i] * cdf_of(x[i]);
}
__global__ void gelu_backward(const T* g, const T* x, T* dx, index_t n) {
    EACH(i, n) dx[i] = g[i] * (cdf_of(x[i]) + x[i] * exp(T(-0.5) * x[i] * x[i]) * T(0.3989422804014327));
}
__global__ void gelu_tanh(const T* x, T* y, index_t n) {
    EACH(i, n) y[i] = x[i] * sigmoid_of(tanh_argument(x[i]));
}
__global__ void gelu_tanh_backward(const T* g, const T* x, T* dx, index_t n) {
    EACH(i, n) {
        T s = sigmoid_of(tanh_argument(x[i]));
        T inner = T(1.5957691216057308) * (T(1) + T(0.134145) * x[i] * x[i]);
        dx[i] = g[i] * (s + x[i] * s * (T(1) - s) * inner);
    }
}
__global__ void sigmoid(const T* x, T* y, index_t n) {
    EACH(i, n) y[i] = sigmoid_of(x[i]);
}
__global__ void sigmoid_backward(const T* g, const T* y, T* dx, index_t n) {
    EACH(i, n) dx[i] = g[i] * y[i] * (T(1) - y[i]);
}
__global__ void tanh_backward(const T* g, const T* y, T* dx, index_t n) {
    EACH(i, n) dx[i] = g[i] * (T(1) - y[i] * y[i]);
}
__global__ void silu(const T* x, T* y, index_t n) {
    EACH(i, n) y[i] = x[i] * sigmoid_of(x[i]);
}
__global__ void silu_backward(const T* g, const T* x, T* dx, index_t n) {
    EACH(i, n) {
        T s = sigmoid_of(x[i]);
        dx[i] = g[i] * s * (T(1) + x[i] * (T(1) - s));
    }
}
__global__ void swiglu(const T* gate, const T* up, T* y, index_t n) {
    EACH(i, n) y[i] = gate[i] * sigmoid_of(gate[i]) * up[i];
}
__global__ void swiglu_backward(const T* gate, const T* up, const T* g, T* dup, T* dgate, index_t n) {
    EACH(i, n) {
        T s = sigmoid_of(gate[i]), swish = gate[i] * s;
        dup[i] = g[i] * swish;
        dgate[i] = g[i] * up[i] * (s + swish * (T(1) - s));
    }
}
__global__ void apply_mask(const T* x, const bool* mask, T scale, T* y, index_t n) {
    EACH(i, n) y[i] = mask[i] ? x[i] * scale : T(0);
}

}
"""


def leaky_relu(x: Array, slope: float = 0.0, out: Array | None = None) -> Array:
    return _map("leaky_relu", (x,), float(slope), out=out)


def leaky_relu_backward(g: Array, y: Array, slope: float = 0.0, out: Array | None = None) -> Array:
    return _map("leaky_relu_backward", (g, y), float(slope), out=out)


def gelu(x: Array, approximate: bool = False) -> Array:
    return _map("gelu_tanh" if approximate else "gelu", (x,))


def gelu_backward(g: Array, x: Array, approximate: bool = False) -> Array:
    return _map("gelu_tanh_backward" if approximate else "gelu_backward", (g, x))


def sigmoid(x: Array) -> Array:
    return _map("sigmoid", (x,))


def sigmoid_backward(g: Array, y: Array) -> Array:
    return _map("sigmoid_backward", (g, y))


def tanh_backward(g: Array, y: Array) -> Array:
    return _map("tanh_backward", (g, y))


def silu(x: Array) -> Array:
    return _map("silu", (x,))


def silu_backward(g: Array, x: Array) -> Array:
    return _map("silu_backward", (g, x))


def swiglu(gate: Array, up: Array) -> Array:
    return _map("swiglu", (gate, up))


def swiglu_backward(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    if memory_view(gate) is None:
        return NotImplemented
    dup = array_module(gate).empty_like(gate)
    dgate = _map("swiglu_backward", (gate, up, g), dup)
    return dgate if dgate is NotImplemented else (dgate, dup)


def apply_mask(x: Array, mask: Array, scale: float) -> Array:
    if mask.dtype != bool or mask.shape != x.shape:
        return NotImplemented
    return _map("apply_mask", (x,), like_memory(mask, x), float(scale)) if memory_view(x) is not None \
        else NotImplemented


def _map(name: str, arrays: tuple[Array, ...], *more: Any, out: Array | None = None) -> Array:
    """Run a kernel over arrays of one shape, all in the memory order of the first; gaps and half floats decline."""
    first = arrays[0]
    if not served(*arrays) or memory_view(first) is None or any(a.shape != first.shape for a in arrays) or (
            out is not None and (out.strides != first.strides or out.dtype != first.dtype)):
        return NotImplemented
    y = array_module(first).empty_like(first) if out is None else out
    launch(SOURCE, name, first.dtype, first.size, *(like_memory(a, first) for a in arrays), *more, y)
    return y
