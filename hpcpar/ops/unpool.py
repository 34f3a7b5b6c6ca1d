"""Max unpooling: values back to where the maxima stood."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import LayoutError
from hpcpar.layout.maps import transposed_map, window_map
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.pool import pooled
from hpcpar.ops.spatial import Halo, Lengths, check_spatial, local_positions, per_dim, with_batch
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor


class MaxUnpool(Op):
    """Scatter by global positions. A rank fetches the values whose windows meet its block of the result."""

    name = "max_unpool"

    def rule(
        self, sigs: tuple[Signature, ...], sizes: tuple[int, ...], windows: tuple[tuple[int, int, int], ...]
    ) -> Rule:
        x = sigs[0].resolved
        out = pooled(x, sizes)
        return Rule(out, [x, x], [x, x], sigs, _Plan(x, out, windows))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        plan: _Plan = rule.plan
        x, index = arrays
        plan.check(index)
        places = local_positions(plan.halo(index), rule.out.local_shape[2:], [a for a, _ in rule.out.box[2:]], plan.out)
        return kernels.put_at(plan.halo(x), places, rule.out.local_shape), index

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        plan: _Plan = rule.plan
        buffer = plan.back(g)
        return kernels.take_at(buffer, local_positions(saved, buffer.shape[2:], plan.begin, plan.out)), None


class _Plan:
    """The exchanges of values forward, and of the gradient backward."""

    def __init__(self, x: Signature, out: Signature, windows: tuple[tuple[int, int, int], ...]) -> None:
        self.x, self.out, self.windows = x, out.shape[2:], windows
        spatial = [a for stack in x.dims[2:] for a in stack]
        self.comm = x.mesh.comm(*spatial)
        if spatial:
            steps = [(k, s, 1, p) for k, s, p in windows]
            self.halo: Any = Halo(x, self.out, [transposed_map] * len(windows), steps)
            self.back: Any = Halo(out, x.shape[2:], [window_map] * len(windows), [(*step, "zeros") for step in steps])
            self.begin = [a * s - p for (a, _), (_, s, p) in zip(x.box[2:], windows, strict=True)]
        else:
            self.halo = self.back = lambda array: array
            self.begin = [0] * len(windows)

    def check(self, index: Any) -> None:
        """Positions inside the result, and, where positions are split, inside their windows: else an error on all."""
        wrong = bool(((index < 0) | (index >= prod(self.out))).any())
        outside = False
        rest, xp = index, kernels.array_module(index)
        for d in range(len(self.windows) - 1, -1, -1):
            k, s, p = self.windows[d]
            a, b = self.x.box[d + 2]
            first = (xp.arange(a, b) * s - p).reshape(b - a, *(1,) * (len(self.windows) - 1 - d))
            at = rest % self.out[d]
            outside = outside or bool(((at < first) | (at >= first + k)).any())
            rest = rest // self.out[d]
        outside = outside and self.comm.size > 1
        if self.comm.size > 1:
            wrong, outside = self.comm.all_reduce(np.array([wrong, outside], np.int64), "max")
        if wrong:
            raise ValueError(f"max_unpool: an index lies outside the result of lengths {self.out}")
        if outside:
            raise LayoutError(
                f"max_unpool of {self.x!r}: an index lies outside the window of its element, so no rank knows whom to "
                f"ask; repartition the positions to be whole first, or pass the arguments of the pooling"
            )


_max_unpool = MaxUnpool()


def _unpool(
    ndim: int, x: Tensor, indices: Tensor, kernel: Lengths, stride: Lengths | None, padding: Lengths, output_size: Any
) -> Tensor:
    name = f"max_unpool{ndim}d"
    kernel = per_dim(name, "kernel_size", kernel, ndim)
    stride = per_dim(name, "stride", kernel if stride is None else stride, ndim)
    padding = per_dim(name, "padding", padding, ndim)
    if x.ndim == ndim + 1:
        from hpcpar.ops.shape import unsqueeze

        indices = unsqueeze(indices, 0)

    def unpool(x: Tensor) -> Tensor:
        check_spatial(name, x, ndim)
        if indices.shape != x.shape:
            raise ValueError(f"{name}: x has shape {x.shape}, indices {indices.shape}")
        least = [(n - 1) * s + k - 2 * p for n, s, k, p in zip(x.shape[2:], stride, kernel, padding, strict=True)]
        sizes = least if output_size is None else [int(n) for n in tuple(output_size)[-ndim:]]
        if len(sizes) != ndim or any(abs(m - n) >= s for m, n, s in zip(sizes, least, stride, strict=True)):
            raise ValueError(f"{name}: output_size {sizes} differs from {least} by the stride {stride} or more")
        if min(sizes) < 1:
            raise ValueError(f"{name}: input {x.shape[2:]} leaves no output")
        return _max_unpool((x, indices), (tuple(sizes), tuple(zip(kernel, stride, padding, strict=True))))

    return with_batch(ndim, x, unpool)


def max_unpool1d(
    x: Tensor, indices: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0,
    output_size: Any = None,
) -> Tensor:  # fmt: skip
    """Return the values of x (N, C, L) at the places of the maxima; see `max_unpool3d`."""
    return _unpool(1, x, indices, kernel_size, stride, padding, output_size)


def max_unpool2d(
    x: Tensor, indices: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0,
    output_size: Any = None,
) -> Tensor:  # fmt: skip
    """Return the values of x (N, C, H, W) at the places of the maxima; see `max_unpool3d`."""
    return _unpool(2, x, indices, kernel_size, stride, padding, output_size)


def max_unpool3d(
    x: Tensor, indices: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0,
    output_size: Any = None,
) -> Tensor:  # fmt: skip
    """Return the values of x at the places of the maxima of a max pooling, zeros elsewhere.

    Parameters
    ----------
    x : Tensor
        (N, C, D, H, W), or without N; any dims split.
    indices : Tensor
        Flat positions in the global spatial box of the result, as ``max_pool3d(..., return_indices=True)`` gives them.
    kernel_size, stride, padding : int or tuple of int
        Those of the pooling.
    output_size : sequence of int, optional
        The spatial lengths before the pooling, where rounding hides them.

    Raises
    ------
    ValueError
        On all ranks: an index outside the result.
    LayoutError
        On all ranks, where positions are split: an index outside the window of its element.
    """
    return _unpool(3, x, indices, kernel_size, stride, padding, output_size)
