"""Batch, group and instance normalisation, whatever is split, with unequal and empty blocks.

Statistics are (mean, M2) in float64. Counts come from the layout, without a message; the blocks' statistics are
gathered and merged by every rank in the same order by Chan's formula (Chan, Golub, LeVeque 1983), or, on many ranks,
found by two all-reduces. The backward pass sends the two sums of the gradient, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.autograd import recomputing
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule
from hpcpar.primitives.repartition import move
from hpcpar.primitives.room import Room
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor
from hpcpar.transport import Comm

SCOPES = ("rank", "sample", "all")
_GATHER_LIMIT = 32
"""Up to this many ranks statistics are gathered and merged; above, two all-reduces move less."""


def merged_moments(comm: Comm, counts: Sequence[int], mean: Any, m2: Any) -> tuple[Any, Any]:
    """Return (mean, M2) over all ranks of `comm`, the same bits on each; `counts[r]` elements stand behind rank r's."""
    if comm.size == 1:
        return mean, m2
    if comm.size > _GATHER_LIMIT:
        total = sum(counts)
        whole = comm.all_reduce(mean * counts[comm.rank]) / max(total, 1)
        return whole, comm.all_reduce(m2 + counts[comm.rank] * (mean - whole) ** 2)
    both = np.concatenate([mean.reshape(1, *mean.shape), m2.reshape(1, *m2.shape)])
    gathered = comm.all_gather(both, [both.shape] * comm.size)
    _, mean, m2 = kernels.merge_moments(counts, [g[0] for g in gathered], [g[1] for g in gathered])
    return mean, m2


def block_counts(sig: Signature, axes: tuple[str, ...], dims: Sequence[int]) -> list[int]:
    """Return how many elements of `dims` each rank along `axes` owns, in rank order: from the layout alone."""
    mesh = sig.mesh
    axes = mesh.sort(axes)
    counts = []
    for index in np.ndindex(*[mesh.shape[a] for a in axes]):
        coords = {**mesh.coords, **dict(zip(axes, index, strict=True))}
        counts.append(prod(b - a for a, b in (sig.interval(d, coords) for d in dims)))
    return counts


class _BatchPlan:
    """Communicators and counts of one batch norm."""

    def __init__(self, sig: Signature, scope: str) -> None:
        spatial = [a for d in range(2, len(sig.shape)) for a in sig.dims[d]]
        everything = [*sig.dims[0], *spatial]
        axes = {"rank": [], "sample": spatial, "all": everything}[scope]
        mesh, dims = sig.mesh, [0, *range(2, len(sig.shape))]
        self.comm = mesh.comm(*axes)
        self.counts = block_counts(sig, tuple(axes), dims)
        self.count = sum(self.counts)
        self.own_count = prod(sig.local_shape[d] for d in dims)
        self.all_comm = mesh.comm(*everything)
        self.all_counts = block_counts(sig, tuple(everything), dims)
        self.same = set(axes) == set(everything)
        self.channels = signature(mesh, (sig.shape[1],), Layout(sig.dims[1]))
        self.room = Room()


class BatchNorm(Op):
    """Normalise each channel over samples and positions of a scope; optionally leaky ReLU behind it, in one pass."""

    name = "batch_norm"

    def rule(self, sigs: tuple[Signature, ...], scope: str) -> Rule:
        x = sigs[0].resolved
        if len(x.shape) < 2:
            raise ValueError(f"batch_norm takes (N, C, ...), got shape {x.shape}")
        plan = _BatchPlan(x, scope)
        lost = x.mesh.sort([a for d, stack in enumerate(x.dims) if d != 1 for a in stack])
        moves, grads = [x], [x]
        for sig in sigs[1:]:
            if sig.shape != (x.shape[1],):
                raise ValueError(f"batch_norm: {x.shape[1]} channels, but weight or bias has shape {sig.shape}")
            moves.append(plan.channels)
            grads.append(plan.channels.with_partial(lost))
        return Rule(x, moves, grads, sigs, plan)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, weight, bias = (*arrays, None, None)[:3]
        constants, eps, slope, on_statistics = extra
        plan: _BatchPlan = rule.plan
        if constants is not None:
            mean, var = (a.astype(np.float64) for a in constants)
        else:
            own = kernels.channel_moments(x)
            mean, m2 = merged_moments(plan.comm, plan.counts, *own)
            var = m2 / max(plan.count, 1)
            if on_statistics is not None:
                whole = (mean, m2) if plan.same else merged_moments(plan.all_comm, plan.all_counts, *own)
                on_statistics(plan.channels, *whole, sum(plan.all_counts))
        inv_std = 1 / np.sqrt(var + eps)
        y = _normalize(plan.room, x, mean, inv_std, weight, bias, slope)
        return y, (x, mean, inv_std, weight, bias, constants is not None, slope)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        x, mean, inv_std, weight, bias, constant, slope = saved
        plan: _BatchPlan = rule.plan
        s1, s2 = kernels.channel_grad_sums(g, x, mean, inv_std, weight, bias, slope)
        grads: list[Any] = [None]
        if weight is not None:
            grads.append(s2.astype(weight.dtype))
        if bias is not None:
            grads.append(s1.astype(x.dtype))
        if needs[0]:
            if constant:
                m1 = m2 = np.zeros_like(s1)
            else:
                both = plan.comm.all_reduce(np.concatenate([s1.reshape(1, -1), s2.reshape(1, -1)]))
                scale = (1.0 if weight is None else weight.astype(np.float64)) / max(plan.count, 1)
                m1, m2 = both[0] * scale, both[1] * scale
            grads[0] = kernels.channel_grad_input(g, x, mean, inv_std, weight, m1, m2, bias, slope)
        return tuple(grads)


def _normalize(room: Room, x: Any, *arguments: Any) -> Any:
    """The normalised array, with room for the halo of who uses it."""
    out = room.empty(x.shape, x.dtype, x)
    return room.made(kernels.channel_normalize(x, *arguments, out=out))


class _GroupPlan:
    """How groups of channels lie on the ranks.

    Where every block of channels holds whole groups (also: channels are not split) statistics of groups never cross the
    channel split; otherwise moments of single channels are gathered along it first.
    """

    def __init__(self, sig: Signature, groups: int) -> None:
        channels = sig.shape[1]
        spatial = [a for d in range(2, len(sig.shape)) for a in sig.dims[d]]
        mesh = sig.mesh
        self.width = channels // groups
        lo, hi = sig.box[1]
        p = sig.parts(1)
        borders = [sig.interval(1, {**mesh.coords, **c})[0] for c in _coords_along(mesh, sig.dims[1])]
        self.whole_groups = p == 1 or all(b % self.width == 0 for b in borders)
        self.groups = groups
        self.own_groups = (hi - lo) // self.width if self.whole_groups else groups
        self.lo, self.hi = lo, hi
        self.spatial = mesh.comm(*spatial)
        self.positions = block_counts(sig, tuple(spatial), range(2, len(sig.shape)))
        self.count = prod(sig.shape[2:]) * self.width
        self.across = mesh.comm(*spatial, *sig.dims[1])
        self.room = Room()
        cells = signature(mesh, sig.shape[:2], Layout(sig.dims[0], sig.dims[1]))
        self.cells, self.all_cells = cells, cells.with_layout(Layout(sig.dims[0]))

    def expand(self, stats: Any) -> Any:
        """(N, groups) statistics to this rank's channels: (N, C of the block)."""
        if self.whole_groups:
            return np.repeat(stats, self.width, axis=1)
        return np.repeat(stats, self.width, axis=1)[:, self.lo : self.hi]

    def moments(self, x: Any) -> tuple[Any, Any]:
        """(mean, M2) of this rank's groups, or of all groups where they cross the channel split."""
        if self.whole_groups:
            local = kernels.group_moments(x, self.own_groups) if self.own_groups else kernels.sample_moments(x)
            counts = [n * self.width for n in self.positions]
            return merged_moments(self.spatial, counts, *local)
        mean, m2 = merged_moments(self.spatial, self.positions, *kernels.sample_moments(x))
        mean, m2 = (move(np.ascontiguousarray(a), self.cells, self.all_cells) for a in (mean, m2))
        shape = (mean.shape[0], self.groups, self.width)
        return kernels.merge_equal(mean.reshape(shape), m2.reshape(shape), sum(self.positions), axis=2)

    def sum_groups(self, sums: Any) -> Any:
        """Sums of this rank's (N, C) values over groups and ranks."""
        n = sums.shape[0]
        if self.whole_groups:
            return self.spatial.all_reduce(sums.reshape(n, self.own_groups, self.width).sum(axis=2))
        full = np.zeros((n, self.groups * self.width))
        full[:, self.lo : self.hi] = sums
        return self.across.all_reduce(full.reshape(n, self.groups, self.width).sum(axis=2))


def _coords_along(mesh: Any, axes: tuple[str, ...]) -> list[dict[str, int]]:
    lengths = [mesh.shape[a] for a in axes]
    return [dict(zip(axes, index, strict=True)) for index in np.ndindex(*lengths)]


class GroupNorm(Op):
    """Normalise groups of channels of each sample over positions."""

    name = "group_norm"

    def rule(self, sigs: tuple[Signature, ...], groups: int) -> Rule:
        x = sigs[0].resolved
        if len(x.shape) < 2 or groups < 1 or x.shape[1] % groups:
            raise ValueError(f"group_norm: shape {x.shape} has no channels that divide into {groups} groups")
        channels = signature(x.mesh, (x.shape[1],), Layout(x.dims[1]))
        lost = x.mesh.sort([a for d, stack in enumerate(x.dims) if d != 1 for a in stack])
        moves, grads = [x], [x]
        for sig in sigs[1:]:
            if sig.shape != (x.shape[1],):
                raise ValueError(f"group_norm: {x.shape[1]} channels, but weight or bias has shape {sig.shape}")
            moves.append(channels)
            grads.append(channels.with_partial(lost))
        return Rule(x, moves, grads, sigs, _GroupPlan(x, groups))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, weight, bias = (*arrays, None, None)[:3]
        eps, slope = extra
        plan: _GroupPlan = rule.plan
        mean, m2 = plan.moments(x)
        inv_std = plan.expand(1 / np.sqrt(m2 / max(plan.count, 1) + eps))
        mean = plan.expand(mean)
        y = _normalize(plan.room, x, mean, inv_std, weight, bias, slope)
        return y, (x, mean, inv_std, weight, bias, slope)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        x, mean, inv_std, weight, bias, slope = saved
        plan: _GroupPlan = rule.plan
        s1, s2 = kernels.channel_grad_sums(g, x, mean, inv_std, weight, bias, slope)  # (N, C) each
        grads: list[Any] = [None]
        if weight is not None:
            grads.append(s2.sum(axis=0).astype(weight.dtype))
        if bias is not None:
            grads.append(s1.sum(axis=0).astype(x.dtype))
        if needs[0]:
            scale = 1.0 if weight is None else weight.astype(np.float64)
            both = np.concatenate([s1 * scale, s2 * scale])
            means = plan.expand(plan.sum_groups(both) / max(plan.count, 1))
            n = s1.shape[0]
            grads[0] = kernels.channel_grad_input(g, x, mean, inv_std, weight, means[:n], means[n:], bias, slope)
        return tuple(grads)


_batch_norm, _group_norm = BatchNorm(), GroupNorm()


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    scope: str = "all",
    negative_slope: float | None = None,
) -> Tensor:
    """Normalise each channel of x over samples and positions (Ioffe and Szegedy 2015).

    Parameters
    ----------
    x : Tensor
        (N, C, *spatial); any dims split.
    running_mean, running_var : Tensor, optional
        (C,), replicated or split as the channels. Used when not training; else updated in place with the statistics of
        *all* samples, whatever the scope, so that they are equal on every rank.
    training : bool
        Use the batch's statistics; otherwise the running ones.
    momentum : float or None
        Weight of the new statistics.
    scope : {"all", "sample", "rank"}
        Over which ranks statistics are taken in training: all; those that share the same samples (per group of samples
        along the batch axes); this rank's own block (then the result depends on the partition).
    negative_slope : float, optional
        Apply leaky ReLU with this slope (0: ReLU) to the result, in the same pass.
    """
    if scope not in SCOPES:
        raise ValueError(f"batch_norm: scope is one of {', '.join(SCOPES)}, got {scope!r}")
    use_batch = training or running_mean is None
    if use_batch and prod(n for d, n in enumerate(x.shape) if d != 1) == 1 and training:
        raise ValueError(f"batch_norm: more than one value per channel is needed in training, got shape {x.shape}")
    constants, on_statistics = None, None
    if not use_batch:
        channels = signature(x.mesh, (x.shape[1],), Layout(x.sig.dims[1]))
        constants = (running_mean.moved(channels), running_var.moved(channels))
    elif running_mean is not None and training:
        on_statistics = _running_update(running_mean, running_var, 0.1 if momentum is None else momentum)
    operands = [x] + [t for t in (weight, bias) if t is not None]
    if bias is not None and weight is None:
        raise LayoutError("batch_norm: a bias without a weight is not supported; pass a weight of ones")
    return _batch_norm(tuple(operands), (scope,), (constants, eps, negative_slope, on_statistics))


def _running_update(running_mean: Tensor, running_var: Tensor, momentum: float) -> Any:
    def update(channels: Signature, mean: Any, m2: Any, count: int) -> None:
        # a batch without elements says nothing, and one that is run again has been counted
        if count == 0 or recomputing():
            return
        for buffer, value in ((running_mean, mean), (running_var, m2 / max(count - 1, 1))):
            new = move(value, channels, buffer.sig).astype(buffer.dtype)
            buffer.set_data(buffer.shard * buffer.dtype.type(1 - momentum) + new * buffer.dtype.type(momentum))

    return update


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    negative_slope: float | None = None,
) -> Tensor:
    """Normalise groups of neighbouring channels of each sample over positions (Wu and He 2018).

    Any dims may be split; groups may cross the borders of a channel split.
    """
    if bias is not None and weight is None:
        raise LayoutError("group_norm: a bias without a weight is not supported; pass a weight of ones")
    return _group_norm((x, *[t for t in (weight, bias) if t is not None]), (num_groups,), (eps, negative_slope))


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    negative_slope: float | None = None,
) -> Tensor:
    """Normalise each channel of each sample over positions (Ulyanov et al. 2016)."""
    return group_norm(x, x.shape[1], weight, bias, eps, negative_slope)
