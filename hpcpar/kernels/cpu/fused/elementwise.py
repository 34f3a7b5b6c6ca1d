"""Fused activations: one pass over memory each. What needs exp is float32 only; the rest is declined."""

from __future__ import annotations

import numpy as np

from ...arrays import Array, like_memory, memory_view
from .functions import exp32, normal_cdf32, sigmoid32
from .jit import kernel

_INV_SQRT_2PI = np.float32(0.3989422804014327)
_TANH_TWICE = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi): (1 + tanh(u)) / 2 is sigmoid(2 u)
_TANH_CUBIC = np.float32(0.044715)
_SMALL = 512  # elements; below, NumPy's two passes take less than the views of memory that a compiled loop needs


@kernel
def _leaky(x, slope, y):
    for i in range(x.size):
        y[i] = x[i] if x[i] > 0 else x[i] * slope


@kernel
def _leaky_backward(g, y, slope, dx):
    for i in range(g.size):
        dx[i] = g[i] if y[i] > 0 else g[i] * slope


@kernel
def _relu_backward(g, y, dx):
    zero = g.dtype.type(0)
    for i in range(g.size):
        dx[i] = g[i] if y[i] > 0 else zero


@kernel
def _gelu(x, y):
    for i in range(x.size):
        y[i] = x[i] * normal_cdf32(x[i])


@kernel
def _gelu_backward(x, g, dx):
    for i in range(x.size):
        v = x[i]
        density = exp32(np.float32(-0.5) * v * v) * _INV_SQRT_2PI
        dx[i] = g[i] * (normal_cdf32(v) + v * density)


@kernel
def _gelu_tanh(x, y):
    for i in range(x.size):
        v = x[i]
        y[i] = v * sigmoid32(_TANH_TWICE * (v + _TANH_CUBIC * v * v * v))


@kernel
def _gelu_tanh_backward(x, g, dx):
    for i in range(x.size):
        v = x[i]
        s = sigmoid32(_TANH_TWICE * (v + _TANH_CUBIC * v * v * v))
        inner = _TANH_TWICE * (np.float32(1) + np.float32(3) * _TANH_CUBIC * v * v)
        dx[i] = g[i] * (s + v * s * (np.float32(1) - s) * inner)


@kernel
def _sigmoid(x, y):
    for i in range(x.size):
        y[i] = sigmoid32(x[i])


@kernel
def _sigmoid_backward(g, y, dx):
    for i in range(g.size):
        dx[i] = g[i] * y[i] * (1 - y[i])


@kernel
def _tanh_backward(g, y, dx):
    for i in range(g.size):
        dx[i] = g[i] * (1 - y[i] * y[i])


@kernel
def _silu(x, y):
    for i in range(x.size):
        y[i] = x[i] * sigmoid32(x[i])


@kernel
def _silu_backward(x, g, dx):
    for i in range(x.size):
        s = sigmoid32(x[i])
        dx[i] = g[i] * s * (np.float32(1) + x[i] * (np.float32(1) - s))


@kernel
def _swiglu(gate, up, y):
    for i in range(gate.size):
        y[i] = gate[i] * sigmoid32(gate[i]) * up[i]


@kernel
def _swiglu_backward(gate, up, g, dgate, dup):
    for i in range(gate.size):
        s = sigmoid32(gate[i])
        swish = gate[i] * s
        dup[i] = g[i] * swish
        dgate[i] = g[i] * up[i] * (s + swish * (np.float32(1) - s))


@kernel
def _mask(x, mask, scale, y):
    zero = x.dtype.type(0)
    for i in range(x.size):
        y[i] = x[i] * scale if mask[i] else zero


@kernel
def _round_to_bfloat16(x, y):
    bits, kept = x.view(np.uint32), y.view(np.uint32)
    for i in range(bits.size):
        b = bits[i]
        nearest = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        kept[i] = b if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else nearest  # a NaN stays one


def round_to_bfloat16(a: Array) -> Array:
    return _map(_round_to_bfloat16, a, single=True)


def leaky_relu(x: Array, slope: float = 0.0, out: Array | None = None) -> Array:
    return _map(_leaky, x, x.dtype.type(slope), out=out) if slope else NotImplemented  # NumPy's maximum is one pass


def leaky_relu_backward(g: Array, y: Array, slope: float = 0.0, out: Array | None = None) -> Array:
    if slope:
        return _map(_leaky_backward, g, y, g.dtype.type(slope), out=out)
    if g.size < _SMALL:
        return NotImplemented
    return _map(_relu_backward, g, y, out=out)


def gelu(x: Array, approximate: bool = False) -> Array:
    return _map(_gelu_tanh if approximate else _gelu, x, single=True)


def gelu_backward(g: Array, x: Array, approximate: bool = False) -> Array:
    return _map(_gelu_tanh_backward if approximate else _gelu_backward, x, g, single=True)


def sigmoid(x: Array) -> Array:
    return _map(_sigmoid, x, single=True)


def sigmoid_backward(g: Array, y: Array) -> Array:
    return _map(_sigmoid_backward, g, y)


def tanh_backward(g: Array, y: Array) -> Array:
    return _map(_tanh_backward, g, y)


def silu(x: Array) -> Array:
    return _map(_silu, x, single=True)


def silu_backward(g: Array, x: Array) -> Array:
    return _map(_silu_backward, x, g, single=True)


def swiglu(gate: Array, up: Array) -> Array:
    return _map(_swiglu, gate, up, single=True)


def swiglu_backward(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    dup = np.empty_like(gate)
    flat = memory_view(dup)
    dgate = NotImplemented if flat is None else _map(
        lambda a, b, c, out: _swiglu_backward(a, b, c, out, flat), gate, up, g, single=True)
    return dgate if dgate is NotImplemented else (dgate, dup)


def apply_mask(x: Array, mask: Array, scale: float) -> Array:
    return _map(_mask, x, mask, x.dtype.type(scale))


def _map(run, first: Array, *others: Array | np.generic, out: Array | None = None, single: bool = False) -> Array:
    """Run a kernel over the memory of arrays of one shape; the result lies in memory as the first.

    Declined where the first has gaps in memory, another shape or a dtype without kernel.
    """
    if first.dtype.char not in ("f" if single else "fd") or any(
            isinstance(a, np.ndarray) and (a.shape != first.shape or a.dtype not in (first.dtype, np.dtype(bool)))
            for a in others):
        return NotImplemented
    flat = memory_view(first)
    if flat is None or (out is not None and (out.strides != first.strides or out.dtype != first.dtype)):
        return NotImplemented
    y = np.empty_like(first) if out is None else out
    if first.size:
        run(flat, *(memory_view(like_memory(a, first)) if isinstance(a, np.ndarray) else a for a in others),
            memory_view(y))
    return y
