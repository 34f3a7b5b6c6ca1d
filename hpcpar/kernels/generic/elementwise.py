"""Activations and their gradients. Results keep the memory order of the (first) operand."""

from __future__ import annotations

import math

import numpy as np

from ..arrays import Array, array_module
from .special import erf

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def leaky_relu(x: Array, slope: float = 0.0, out: Array | None = None) -> Array:
    """``x`` where positive, else ``slope * x``; ReLU for slope 0. NaN stays NaN."""
    if slope == 0:
        return np.maximum(x, 0, out=out)
    if 0 < slope <= 1:
        return np.maximum(x, x * x.dtype.type(slope), out=out)
    y = array_module(x).where(x > 0, x, x * x.dtype.type(slope))
    if out is None:
        return y
    out[...] = y
    return out


def leaky_relu_backward(g: Array, y: Array, slope: float = 0.0, out: Array | None = None) -> Array:
    """``g`` where ``y > 0``, else ``slope * g``; 0 for slope 0, whatever g is.

    ``y`` is the activation's input, or its output if slope >= 0. ``out`` may be g itself.
    """
    low = g * g.dtype.type(slope) if slope else g.dtype.type(0)
    dx = array_module(g).where(y > 0, g, low)
    if out is None:
        return dx
    out[...] = dx
    return out


def gelu(x: Array, approximate: bool = False) -> Array:
    """``x * Phi(x)`` with the normal distribution function Phi, or its tanh approximation (Hendrycks, Gimpel 2016)."""
    if approximate:
        return 0.5 * x * (1 + np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x)))
    return 0.5 * x * (1 + erf(x * _SQRT_HALF))


def gelu_backward(g: Array, x: Array, approximate: bool = False) -> Array:
    """Gradient of `gelu` in x."""
    if approximate:
        t = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
        inner = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    with np.errstate(over="ignore"):  # the square, where exp is 0 in any case
        density = np.exp(-0.5 * x * x)
    return g * (0.5 * (1 + erf(x * _SQRT_HALF)) + x * density * _INV_SQRT_2PI)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, without overflow at either end."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def sigmoid_backward(g: Array, y: Array) -> Array:
    """Gradient of `sigmoid` from its output y."""
    return g * y * (1 - y)


def tanh(x: Array) -> Array:
    """Hyperbolic tangent."""
    return np.tanh(x)


def tanh_backward(g: Array, y: Array) -> Array:
    """Gradient of `tanh` from its output y."""
    return g * (1 - y * y)


def silu(x: Array) -> Array:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def silu_backward(g: Array, x: Array) -> Array:
    """Gradient of `silu` in x."""
    s = sigmoid(x)
    return g * s * (1 + x * (1 - s))


def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up`` (Shazeer 2020)."""
    return silu(gate) * up


def swiglu_backward(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Gradients of `swiglu` in gate and up."""
    s = sigmoid(gate)
    swish = gate * s
    return g * up * (s + swish * (1 - s)), g * swish


def apply_mask(x: Array, mask: Array, scale: float) -> Array:
    """``x * scale`` where ``mask`` (bool, shape of x) holds, else 0: dropout and its gradient. NaN does not pass."""
    return array_module(x).where(mask, x * x.dtype.type(scale), x.dtype.type(0))
