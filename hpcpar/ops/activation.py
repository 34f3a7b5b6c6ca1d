"""Activations, softmax over any dim (split or not), and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar import random as _random
from hpcpar.ops.broadcast import elementwise_rule
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.elementwise import Unary
from hpcpar.ops.reduction import lowest, reduced_dims
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor

_leaky = Unary(
    "leaky_relu", kernels.leaky_relu, lambda g, a, out, slope: kernels.leaky_relu_backward(g, out, slope), "out"
)
# with a negative slope the sign of the output no longer tells that of the input
_leaky_negative = Unary(
    "leaky_relu", kernels.leaky_relu, lambda g, a, out, slope: kernels.leaky_relu_backward(g, a, slope), "in"
)
_gelu = Unary("gelu", kernels.gelu, lambda g, a, out, tanh: kernels.gelu_backward(g, a, tanh), "in")
_silu = Unary("silu", kernels.silu, lambda g, a, out, _: kernels.silu_backward(g, a), "in")
_sigmoid = Unary("sigmoid", kernels.sigmoid, lambda g, a, out, _: kernels.sigmoid_backward(g, out), "out")


class SwiGlu(Op):
    """``silu(gate) * up``, with both gradients in one pass."""

    name = "swiglu"
    saves_little = True

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return kernels.swiglu(*arrays), tuple(arrays)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        both = kernels.swiglu_backward(g, *saved)
        return tuple(d if needed else None for d, needed in zip(both, needs, strict=True))


class Softmax(Op):
    """Softmax or its logarithm along one dim; where that is split, maximum and sum are all-reduced."""

    def __init__(self, name: str, log: bool) -> None:
        super().__init__()
        self.name, self.log = name, log

    def rule(self, sigs: tuple[Signature, ...], dim: int) -> Rule:
        sig = sigs[0].resolved
        return Rule(sig, [sig], [sig], sigs, (dim, sig.mesh.comm(*sig.dims[dim])))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        (dim, comm), x = rule.plan, arrays[0]
        if comm.size == 1:
            out = (kernels.log_softmax if self.log else kernels.softmax)(x, dim)
            return out, out
        top = comm.all_reduce(x.max(axis=dim, keepdims=True, initial=lowest(x.dtype)), "max")
        shifted = x - top
        total = comm.all_reduce(np.exp(shifted).sum(axis=dim, keepdims=True))
        out = shifted - np.log(total) if self.log else np.exp(shifted) / total
        return out, out

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        (dim, comm), y = rule.plan, saved
        if comm.size == 1:
            return ((kernels.log_softmax_backward if self.log else kernels.softmax_backward)(g, y, dim),)
        if self.log:
            return (g - np.exp(y) * comm.all_reduce(g.sum(axis=dim, keepdims=True)),)
        return (y * (g - comm.all_reduce((g * y).sum(axis=dim, keepdims=True))),)


class Dropout(Op):
    """Zero elements with probability p and scale the others; the mask is a function of the global index."""

    name = "dropout"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        sig = sigs[0].resolved
        return Rule(sig, [sig], [sig], sigs, (sig.shape, sig.box))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        shape, box = rule.plan
        seed, stream, p = extra
        mask = kernels.dropout_mask(seed, stream, shape, box, p, like=arrays[0])
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return kernels.apply_mask(arrays[0], mask, scale), (mask, scale)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (kernels.apply_mask(g, *saved),)


_swiglu = SwiGlu()
_softmax, _log_softmax, _dropout = Softmax("softmax", log=False), Softmax("log_softmax", log=True), Dropout()


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return _leaky((x,), (), 0.0)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and ``negative_slope * x`` elsewhere."""
    return (_leaky if negative_slope >= 0 else _leaky_negative)((x,), (), float(negative_slope))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x times the normal distribution function (Hendrycks, Gimpel 2016); `approximate` is "none" or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is 'none' or 'tanh', got {approximate!r}")
    return _gelu((x,), (), approximate == "tanh")


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return _silu((x,))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020) of tensors of one shape, which lie alike or one less split."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"swiglu: gate is {gate.dtype} of shape {gate.shape}, up {up.dtype} of shape {up.shape}")
    return _swiglu((gate, up))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return _sigmoid((x,))


def softmax(x: Tensor, dim: int) -> Tensor:
    """Return exp(x) / sum(exp(x)) along `dim`; a split dim costs two all-reduces of one row statistic."""
    return _softmax((x,), reduced_dims("softmax", dim, x.ndim))


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """Return the logarithm of `softmax`, computed without overflow."""
    return _log_softmax((x,), reduced_dims("log_softmax", dim, x.ndim))


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Return x with each element zero with probability `p`, the others scaled by 1 / (1 - p).

    The mask depends on the seed, the number of the call and the global index: it is the same under every layout.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is a probability, got {p}")
    if not training or p == 0:
        return x
    return _dropout((x,), (), (_random.seed(), _random.next_stream(), p))
