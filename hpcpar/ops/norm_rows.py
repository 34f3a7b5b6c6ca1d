"""RMS norm over the last dims and local response norm over neighbouring channels, split or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.kernels import array_module
from hpcpar.layout.layout import Layout
from hpcpar.layout.maps import window_map
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.elementwise import add, div, mul
from hpcpar.ops.elementwise import pow as power
from hpcpar.ops.gather import Gathering, Move
from hpcpar.ops.layer_norm import Rows
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class RmsNorm(Op):
    """Divide each row, the last dims of a sample, by its root mean square; then weight."""

    name = "rms_norm"
    saves_little = True

    def rule(self, sigs: tuple[Signature, ...], dims: int) -> Rule:
        x = sigs[0].resolved
        first = len(x.shape) - dims
        elements = signature(x.mesh, x.shape[first:], Layout(*x.dims[first:]))
        lost = x.mesh.sort([a for stack in x.dims[:first] for a in stack])
        moves = [x, *[elements] * (len(sigs) - 1)]
        grads = [x, *[elements.with_partial(lost)] * (len(sigs) - 1)]
        return Rule(x, moves, grads, sigs, Rows(x, dims))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, weight = (*arrays, None)[:2]
        plan: Rows = rule.plan
        rows = plan.rows(x)
        squares = plan.comm.all_reduce(kernels.row_squares(rows))
        inverse = 1 / np.sqrt(squares / max(plan.count, 1) + extra)
        weight = None if weight is None else weight.reshape(plan.own)
        y = kernels.row_normalize(rows, np.zeros_like(inverse), inverse, weight)
        return y.reshape(x.shape), (rows, inverse, weight)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        rows, inverse, weight = saved
        plan: Rows = rule.plan
        flat, zeros = plan.rows(g), np.zeros_like(inverse)
        _, along, dweight, _ = kernels.row_grad_sums(flat, rows, zeros, inverse, weight)
        grads: list[Any] = [None]
        if weight is not None:
            grads.append(dweight.astype(g.dtype).reshape([g.shape[d] for d in plan.row]))
        if needs[0]:
            along = plan.comm.all_reduce(along) / max(plan.count, 1)
            grads[0] = kernels.row_grad_input(flat, rows, zeros, inverse, weight, zeros, along).reshape(g.shape)
        return tuple(grads)


class ChannelMeans(Op):
    """Means over `size` neighbouring channels, those beyond the ends counting as zeros."""

    name = "channel_means"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], size: int) -> Rule:
        x = sigs[0].resolved
        move = Move(window_map, x.shape[1], (size, 1, 1, size // 2, "zeros"))
        return Rule(x, [x], [x], sigs, (Gathering(x, [move if d == 1 else None for d in range(len(x.shape))]), size))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        gathering, size = rule.plan
        buffer, own = gathering(arrays[0]), rule.out.local_shape[1]
        y = array_module(buffer).zeros_like(arrays[0])
        for t in range(size if own else 0):
            y += buffer[:, t : t + own]
        y /= size
        return y, None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        gathering, size = rule.plan
        own = rule.out.local_shape[1]
        buffer = np.zeros_like(g, shape=(g.shape[0], own + size - 1 if own else 0, *g.shape[2:]))
        for t in range(size if own else 0):
            buffer[:, t : t + own] += g
        buffer /= size
        return (gathering.adjoint(buffer),)


_rms_norm, _channel_means = RmsNorm(), ChannelMeans()


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return x divided by the root mean square over its last dims (Zhang and Sennrich 2019).

    Parameters
    ----------
    x : Tensor
        Any dims split, those of a row too; blocks may be unequal and empty.
    normalized_shape : sequence of int
        Global lengths of the dims that make a row.
    weight : Tensor, optional
        Of that shape.
    eps : float, optional
        Added to the mean square; by default the spacing of the dtype at 1, as in torch.
    """
    shape = tuple(normalized_shape)
    if not shape or x.shape[x.ndim - len(shape) :] != shape or (weight is not None and weight.shape != shape):
        given = "" if weight is None else f" and a weight of shape {weight.shape}"
        raise ValueError(f"rms_norm over {shape} does not fit x of shape {x.shape}{given}")
    eps = float(np.finfo(x.dtype).eps) if eps is None else eps
    return _rms_norm((x,) if weight is None else (x, weight), (len(shape),), eps)


def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Return ``x / (k + alpha * mean of x^2 over size neighbouring channels) ** beta`` (Krizhevsky et al. 2012).

    x is (N, C, *spatial) with any dims split; a split of the channels fetches the neighbouring ones.
    """
    if x.ndim < 3 or size < 1:
        raise ValueError(f"local_response_norm takes (N, C, *spatial) and a size from 1, got {x.shape} and {size}")
    means = _channel_means((mul(x, x),), (size,))
    return div(x, power(add(mul(means, alpha), k), beta))
