"""Reductions over dims, also split ones: sums stay partial, everything else is resolved inside."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar.kernels import array_module
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.elementwise import add, div, log, mul, sqrt, sub
from hpcpar.ops.elementwise import exp as _exp
from hpcpar.ops.repartition import resolve
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor
from hpcpar.transport import Comm

Dims = int | Sequence[int] | None


class _Plan:
    """Which local dims to reduce, and over which communicator."""

    __slots__ = ("axes", "comm", "kept_shape", "local_shape", "offsets")

    def __init__(self, sig: Signature, dims: tuple[int, ...]) -> None:
        self.axes = dims
        self.comm: Comm = sig.mesh.comm(*(a for d in dims for a in sig.dims[d]))
        self.kept_shape = tuple(1 if d in dims else n for d, n in enumerate(sig.local_shape))
        self.local_shape = sig.local_shape
        self.offsets = tuple(a for a, _ in sig.box)


def reduced_dims(name: str, dims: Dims, ndim: int) -> tuple[int, ...]:
    """Return the dims as non-negative numbers in order; all of them for None."""
    if dims is None:
        return tuple(range(ndim))
    given = (dims,) if isinstance(dims, (int, np.integer)) else tuple(dims)
    for d in given:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"{name}: dim {d} of a tensor with {ndim} dims")
    result = tuple(sorted(int(d) % max(ndim, 1) for d in given))
    if len(set(result)) != len(result):
        raise ValueError(f"{name}: a dim appears twice in {given}")
    return result if ndim else ()


def _out(sig: Signature, dims: tuple[int, ...], keepdim: bool, partial: tuple[str, ...]) -> Signature:
    shape = [1 if d in dims else n for d, n in enumerate(sig.shape)]
    stacks = [() if d in dims else s for d, s in enumerate(sig.dims)]
    if not keepdim:
        shape = [n for d, n in enumerate(shape) if d not in dims]
        stacks = [s for d, s in enumerate(stacks) if d not in dims]
    return signature(sig.mesh, tuple(shape), Layout(*stacks, partial=partial))


class Sum(Op):
    """Sum over dims; partial over the axes that split them."""

    name = "sum"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], dims: tuple[int, ...], keepdim: bool) -> Rule:
        sig = sigs[0]
        partial = sig.mesh.sort([*sig.partial, *(a for d in dims for a in sig.dims[d])])
        kept = tuple(1 if d in dims else n for d, n in enumerate(sig.local_shape))
        return Rule(_out(sig, dims, keepdim, partial), [sig], [sig.resolved], sigs, (dims, keepdim, kept))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        dims, keepdim, _ = rule.plan
        return arrays[0].sum(axis=dims, keepdims=keepdim), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (np.broadcast_to(g.reshape(rule.plan[2]), rule.grads[0].local_shape),)


class Extreme(Op):
    """Maximum or minimum over dims; ties share the gradient equally (torch's amax and amin)."""

    def __init__(self, name: str, op: str) -> None:
        self.name, self.op = name, op

    def rule(self, sigs: tuple[Signature, ...], dims: tuple[int, ...], keepdim: bool) -> Rule:
        sig = sigs[0].resolved
        if not all(sig.shape[d] for d in dims):
            raise ValueError(f"{self.name}: an empty dim of {sig.shape} has no extreme")
        out = _out(sig, dims, keepdim, ())
        return Rule(out, [sig], [sig], sigs, _Plan(sig, dims))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        plan, a = rule.plan, arrays[0]
        worst = lowest(a.dtype) if self.op == "max" else highest(a.dtype)
        local = (a.max if self.op == "max" else a.min)(axis=plan.axes, keepdims=True, initial=worst)
        kept = plan.comm.all_reduce(local, self.op)
        return kept.reshape(rule.out.local_shape), (a, kept)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        a, kept = saved
        equal = (a == kept).astype(g.dtype)
        ties = rule.plan.comm.all_reduce(equal.sum(axis=rule.plan.axes, keepdims=True))
        return (equal * (g.reshape(rule.plan.kept_shape) / ties),)


class ArgExtreme(Op):
    """Global index of the first maximum or minimum along one dim (or of the flat array); NaN wins, as in torch."""

    def __init__(self, name: str, op: str) -> None:
        self.name, self.op = name, op

    def rule(self, sigs: tuple[Signature, ...], dim: int, keepdim: bool) -> Rule:
        sig = sigs[0].resolved
        if not sig.shape[dim]:
            raise ValueError(f"{self.name}: dim {dim} of {sig.shape} is empty")
        return Rule(_out(sig, (dim,), keepdim, ()), [sig], [sig], sigs, _Plan(sig, (dim,)))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        plan, a = rule.plan, arrays[0]
        dim, xp = plan.axes[0], array_module(a)
        worst = lowest(a.dtype) if self.op == "max" else highest(a.dtype)
        n = plan.local_shape[dim]
        none = np.iinfo(np.int64).max
        if n:
            best = (a.max if self.op == "max" else a.min)(axis=dim, keepdims=True)
            index = (a.argmax if self.op == "max" else a.argmin)(axis=dim, keepdims=True) + plan.offsets[dim]
        else:
            best = xp.full(plan.kept_shape, worst, a.dtype)
            index = xp.full(plan.kept_shape, none, np.int64)
        winner = plan.comm.all_reduce(best, self.op)
        mine = (best == winner) | (np.isnan(best) & np.isnan(winner)) if a.dtype.kind == "f" else best == winner
        index = np.where(mine, index, none).astype(np.int64)
        return plan.comm.all_reduce(index, "min").reshape(rule.out.local_shape), None


def lowest(dtype: np.dtype) -> Any:
    """Return the value of `dtype` that every other one beats in a maximum."""
    return _limit(dtype, -np.inf, "min")


def highest(dtype: np.dtype) -> Any:
    """Return the value of `dtype` that every other one beats in a minimum."""
    return _limit(dtype, np.inf, "max")


def _limit(dtype: np.dtype, infinite: float, side: str) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return dtype.type(infinite)
    return side == "max" if dtype.kind == "b" else getattr(np.iinfo(dtype), side)


_sum = Sum()
_amax, _amin = Extreme("amax", "max"), Extreme("amin", "min")
_argmax, _argmin = ArgExtreme("argmax", "max"), ArgExtreme("argmin", "min")


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the sum over `dim` (all dims by default); partial over the axes that split them."""
    return _sum((x,), (reduced_dims("sum", dim, x.ndim), keepdim))


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the sum over `dim` divided by the global count: never a mean of means."""
    dims = reduced_dims("mean", dim, x.ndim)
    count = prod(x.shape[d] for d in dims)
    return div(_sum((x,), (dims, keepdim)), count or float("nan"))


def var(x: Tensor, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Return the variance over `dim` in two passes; the divisor is the global count minus `correction`."""
    dims = reduced_dims("var", dim, x.ndim)
    count = prod(x.shape[d] for d in dims) - correction
    x = resolve(x)  # else its mean and its squares would each be resolved
    centred = sub(x, mean(x, dims, keepdim=True))
    return div(_sum((mul(centred, centred),), (dims, keepdim)), count if count > 0 else float("nan"))


def std(x: Tensor, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Return the square root of `var`."""
    return sqrt(var(x, dim, correction, keepdim))


def amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the maximum over `dim`; equal maxima share the gradient."""
    return _amax((x,), (reduced_dims("amax", dim, x.ndim), keepdim))


def amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the minimum over `dim`; equal minima share the gradient."""
    return _amin((x,), (reduced_dims("amin", dim, x.ndim), keepdim))


def argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the global index (int64) of the first maximum along `dim`; no gradient."""
    return _arg(_argmax, x, dim, keepdim)


def argmin(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the global index (int64) of the first minimum along `dim`; no gradient."""
    return _arg(_argmin, x, dim, keepdim)


def _arg(op: ArgExtreme, x: Tensor, dim: int, keepdim: bool) -> Tensor:
    from hpcpar.autograd import no_grad

    (dim,) = reduced_dims(op.name, dim, x.ndim) or (None,)
    if dim is None:
        raise LayoutError(f"{op.name}: a 0-dim tensor has no dim to search")
    with no_grad():
        return op((x,), (dim, keepdim))


def logsumexp(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return log(sum(exp(x))) over `dim`, shifted by the maximum; -inf over no elements."""
    dims = reduced_dims("logsumexp", dim, x.ndim)
    x = resolve(x)
    if 0 in (x.shape[d] for d in dims):
        with np.errstate(divide="ignore"):
            return log(sum(x, dims, keepdim))
    top = amax(x.detach(), dims, keepdim=True)
    shift = np.where(np.isfinite(top._data), top._data, 0).astype(x.dtype)
    total = sum(_exp(sub(x, Tensor(shift, top.sig))), dims, keepdim)
    out = _out(x.sig, dims, keepdim, ())
    return add(log(total), Tensor(shift.reshape(out.local_shape), out))
