"""Layer normalisation over the last dims, split or not.

Statistics as in batch norm: (mean, M2) in float64, merged by Chan's formula over the ranks that share a row; counts
come from the layout. The backward pass sends the two sums of the gradient, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.norm import block_counts, merged_moments
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class Rows:
    """Which local dims make a row, over which ranks it is spread, and how many elements each of them holds."""

    __slots__ = ("comm", "count", "counts", "leading", "own", "row")

    def __init__(self, sig: Signature, dims: int) -> None:
        ndim = len(sig.shape)
        self.row = tuple(range(ndim - dims, ndim))
        self.leading = tuple(range(ndim - dims))
        axes = tuple(a for d in self.row for a in sig.dims[d])
        self.comm = sig.mesh.comm(*axes)
        self.counts = block_counts(sig, axes, self.row)
        self.count = sum(self.counts)
        self.own = prod(sig.local_shape[d] for d in self.row)

    def rows(self, a: Any) -> Any:
        """Return a local array as (rows, what this rank has of each); a view where it is dense."""
        return a.reshape(prod(a.shape[d] for d in self.leading), self.own)


class LayerNorm(Op):
    """Normalise each row, the last dims of a sample, to mean 0 and variance 1; then weight and bias."""

    name = "layer_norm"
    saves_little = True

    def rule(self, sigs: tuple[Signature, ...], dims: int) -> Rule:
        x = sigs[0].resolved
        shape, stacks = x.shape[len(x.shape) - dims :], x.dims[len(x.shape) - dims :]
        elements = signature(x.mesh, shape, Layout(*stacks))
        lost = x.mesh.sort([a for stack in x.dims[: len(x.shape) - dims] for a in stack])
        moves = [x, *[elements] * (len(sigs) - 1)]
        grads = [x, *[elements.with_partial(lost)] * (len(sigs) - 1)]
        return Rule(x, moves, grads, sigs, Rows(x, dims))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, weight, bias = (*arrays, None, None)[:3]
        plan: Rows = rule.plan
        rows = plan.rows(x)
        mean, m2 = merged_moments(plan.comm, plan.counts, *kernels.row_moments(rows))
        inv_std = 1 / np.sqrt(m2 / max(plan.count, 1) + extra)
        weight = None if weight is None else weight.reshape(plan.own)
        y = kernels.row_normalize(rows, mean, inv_std, weight, None if bias is None else bias.reshape(plan.own))
        return y.reshape(x.shape), (rows, mean, inv_std, weight, bias is not None)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        rows, mean, inv_std, weight, has_bias = saved
        plan: Rows = rule.plan
        shape = [g.shape[d] for d in plan.row]
        flat = plan.rows(g)
        s1, s2, dweight, dbias = kernels.row_grad_sums(flat, rows, mean, inv_std, weight)
        grads: list[Any] = [None]
        if weight is not None:
            grads.append(dweight.astype(g.dtype).reshape(shape))
        if has_bias:
            grads.append(dbias.astype(g.dtype).reshape(shape))
        if needs[0]:
            first, second = plan.comm.all_reduce(np.stack([s1, s2])) / max(plan.count, 1)
            grads[0] = kernels.row_grad_input(flat, rows, mean, inv_std, weight, first, second).reshape(g.shape)
        return tuple(grads)


_layer_norm = LayerNorm()


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise x over its last dims (Ba, Kiros and Hinton 2016).

    Parameters
    ----------
    x : Tensor
        (..., *normalized_shape); any dims split.
    weight, bias : Tensor, optional
        Of `normalized_shape`; brought to the layout of x in these dims.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[x.ndim - len(shape) :] != shape:
        raise ValueError(f"layer_norm over {shape}: x has shape {x.shape}")
    for what, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.shape != shape:
            raise ValueError(f"layer_norm over {shape}: the {what} has shape {given.shape}")
    if bias is not None and weight is None:
        raise ValueError("layer_norm: a bias without a weight is not supported; pass a weight of ones")
    return _layer_norm((x, *[t for t in (weight, bias) if t is not None]), (len(shape),), eps)
