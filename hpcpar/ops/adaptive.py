"""Adaptive average and max pooling: windows that divide a dim into as many parts as asked for.

A dim that is pooled to one element is not gathered: where it is split the mean stays partial, and maxima are compared,
one element a rank. The result is then not split along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.layout.maps import interval_map
from hpcpar.layout.resample_maps import adaptive_map, adaptive_windows
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.spatial import Halo, check_spatial, global_positions, local_positions, per_dim, with_batch
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor
from hpcpar.transport import Comm

Sizes = int | None | Sequence[int | None]


class _Plan:
    """Halo, windows in the buffer, and the dims along which every rank pools its own block to one element."""

    def __init__(self, x: Signature, sizes: tuple[int, ...]) -> None:
        spatial = x.shape[2:]
        self.spatial, self.sizes = spatial, sizes
        self.alone = [m == 1 and bool(x.dims[d + 2]) for d, m in enumerate(sizes)]
        keep = [a or m == n for a, m, n in zip(self.alone, sizes, spatial, strict=True)]
        self.summed = x.mesh.sort([a for d, alone in enumerate(self.alone) if alone for a in x.dims[d + 2]])
        self.comm: Comm = x.mesh.comm(*self.summed)
        stacks = [() if alone else x.dims[d + 2] for d, alone in enumerate(self.alone)]
        shape = (*x.shape[:2], *sizes)
        self.partial = signature(x.mesh, shape, Layout(*x.dims[:2], *stacks, partial=self.summed))
        builders = [interval_map if k else adaptive_map for k in keep]
        outs = [n if k else m for k, n, m in zip(keep, spatial, sizes, strict=True)]
        self.halo = Halo(x, outs, builders, [() if k else (m,) for k, m in zip(keep, sizes, strict=True)])
        self.size = tuple(plan.size for plan in self.halo.plans)
        self.begin, self.start, self.stop = [], [], []
        for d, (n, m) in enumerate(zip(spatial, sizes, strict=True)):
            block = self.partial.box[d + 2]
            begin = x.box[d + 2][0] if keep[d] else adaptive_map(n, *block, m).start
            start, stop = adaptive_windows(n, *block, m)
            if self.alone[d]:
                start, stop = np.array([begin]), np.array([begin + self.size[d]])
            self.begin.append(begin)
            self.start.append((start - begin).tolist())
            self.stop.append((stop - begin).tolist())


class AdaptiveAvgPool(Op):
    """Means over adaptive windows."""

    name = "adaptive_avg_pool"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], sizes: tuple[int, ...]) -> Rule:
        x = sigs[0].resolved
        plan = _Plan(x, sizes)
        return Rule(plan.partial, [x], [x], sigs, plan)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        plan: _Plan = rule.plan
        y = plan.halo(arrays[0])
        for d, n in enumerate(plan.spatial):
            if plan.alone[d]:
                y = y.sum(d + 2, keepdims=True, dtype=y.dtype) / y.dtype.type(n)
            elif plan.sizes[d] != n:
                y = kernels.window_means(y, d + 2, plan.start[d], plan.stop[d])
        return y, None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        plan: _Plan = rule.plan
        for d, n in reversed(list(enumerate(plan.spatial))):
            size = plan.size[d]
            if plan.alone[d]:
                g = np.broadcast_to(g / g.dtype.type(n), (*g.shape[: d + 2], size, *g.shape[d + 3 :]))
            elif plan.sizes[d] != n:
                g = kernels.window_means_backward(g, d + 2, plan.start[d], plan.stop[d], size)
        return (plan.halo.adjoint(g),)


class AdaptiveMaxPool(Op):
    """Maxima over adaptive windows, with their global positions."""

    name = "adaptive_max_pool"

    def rule(self, sigs: tuple[Signature, ...], sizes: tuple[int, ...]) -> Rule:
        x = sigs[0].resolved
        plan = _Plan(x, sizes)
        return Rule(plan.partial.resolved, [x], [x], sigs, plan)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        plan: _Plan = rule.plan
        buffer = plan.halo(arrays[0])
        if 0 in buffer.shape[2:] and 0 not in rule.out.local_shape:  # an own block without elements
            y = np.full_like(buffer, kernels.lowest(buffer.dtype), shape=rule.out.local_shape)
            index = np.full_like(buffer, -1, shape=rule.out.local_shape, dtype=np.int64)
        else:
            y, index = kernels.window_maxima(buffer, plan.start, plan.stop)
            index = global_positions(index, plan.size, plan.begin, plan.spatial)
        y, index = _first_maximum(plan.comm, y, index)
        if extra is not None:
            extra(index)
        return y, index

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        plan: _Plan = rule.plan
        local = local_positions(saved, plan.size, plan.begin, plan.spatial)
        return (plan.halo.adjoint(kernels.max_pool_backward(g, local, (*g.shape[:2], *plan.size))),)


def _first_maximum(comm: Comm, y: Any, index: Any) -> tuple[Any, Any]:
    """Compare the candidates of all ranks: the first maximum in row-major order, the last NaN where there is one."""
    if comm.size == 1:
        return y, index
    values = comm.all_gather(y, [y.shape] * comm.size)
    places = comm.all_gather(index, [index.shape] * comm.size)
    best, place = values[0].copy(), places[0].copy()
    for value, at in zip(values[1:], places[1:], strict=True):
        nan, was_nan = value != value, best != best
        first = (value > best) | ((value == best) & (at < place)) | (place < 0)
        better = np.where(was_nan, nan & (at > place), nan | first) & (at >= 0)
        best, place = np.where(better, value, best), np.where(better, at, place)
    return best, place


_avg, _max = AdaptiveAvgPool(), AdaptiveMaxPool()


def _sizes(name: str, x: Tensor, ndim: int, output_size: Sizes) -> tuple[int, ...]:
    """The lengths asked for; None keeps a length."""
    check_spatial(name, x, ndim)
    given = (output_size,) * ndim if output_size is None or isinstance(output_size, int) else tuple(output_size)
    if len(given) != ndim:
        raise ValueError(f"{name}: output_size is one number or {ndim}, got {output_size!r}")
    sizes = per_dim(name, "output_size", [n if m is None else m for n, m in zip(x.shape[2:], given, strict=True)], ndim)
    if min(sizes) < 1 or min(x.shape[2:]) < 1:
        raise ValueError(f"{name}: lengths are at least 1, got {x.shape[2:]} to {sizes}")
    return sizes


def adaptive_avg_pool(ndim: int, x: Tensor, output_size: Sizes) -> Tensor:
    """Return means over adaptive windows of 1 to 3 dims; see `adaptive_avg_pool3d`."""
    name = f"adaptive_avg_pool{ndim}d"
    return with_batch(ndim, x, lambda x: _avg((x,), (_sizes(name, x, ndim, output_size),)))


def adaptive_max_pool(ndim: int, x: Tensor, output_size: Sizes, return_indices: bool = False) -> Any:
    """Return maxima over adaptive windows of 1 to 3 dims; see `adaptive_max_pool3d`."""
    name = f"adaptive_max_pool{ndim}d"

    def pool(x: Tensor) -> Any:
        kept: list[Any] = []
        y = _max((x,), (_sizes(name, x, ndim, output_size),), kept.append)
        return (y, Tensor(kept[0], y.sig)) if return_indices else y

    return with_batch(ndim, x, pool)


def adaptive_avg_pool1d(x: Tensor, output_size: Sizes) -> Tensor:
    """Return means over adaptive windows of x (N, C, L); see `adaptive_avg_pool3d`."""
    return adaptive_avg_pool(1, x, output_size)


def adaptive_avg_pool2d(x: Tensor, output_size: Sizes) -> Tensor:
    """Return means over adaptive windows of x (N, C, H, W); see `adaptive_avg_pool3d`."""
    return adaptive_avg_pool(2, x, output_size)


def adaptive_avg_pool3d(x: Tensor, output_size: Sizes) -> Tensor:
    """Return means over windows that divide each dim into `output_size` parts.

    Parameters
    ----------
    x : Tensor
        (N, C, D, H, W), or without N; any dims split.
    output_size : int, None or a sequence of them
        None keeps a length. Window o of m covers ``[floor(o n / m), ceil((o + 1) n / m))``.

    Returns
    -------
    Tensor
        Laid out as x, but for dims of which one element is left: they are not split, and the value is partial over the
        axes that split them. Global pooling therefore gathers nothing.
    """
    return adaptive_avg_pool(3, x, output_size)


def adaptive_max_pool1d(x: Tensor, output_size: Sizes, return_indices: bool = False) -> Any:
    """Return maxima over adaptive windows of x (N, C, L); see `adaptive_max_pool3d`."""
    return adaptive_max_pool(1, x, output_size, return_indices)


def adaptive_max_pool2d(x: Tensor, output_size: Sizes, return_indices: bool = False) -> Any:
    """Return maxima over adaptive windows of x (N, C, H, W); see `adaptive_max_pool3d`."""
    return adaptive_max_pool(2, x, output_size, return_indices)


def adaptive_max_pool3d(x: Tensor, output_size: Sizes, return_indices: bool = False) -> Any:
    """Return maxima over windows that divide each dim into `output_size` parts; see `adaptive_avg_pool3d`.

    With `return_indices` also their flat positions in the global spatial box (int64). Dims of which one element is left
    are not split in the result. Of equal maxima the first is chosen, of NaN the last.
    """
    return adaptive_max_pool(3, x, output_size, return_indices)
