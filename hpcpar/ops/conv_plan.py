"""How one convolution runs on this rank: layouts of its operands, halos, kernels, and what is done meanwhile."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

from hpcpar import kernels
from hpcpar.kernels.bfloat16 import ROUNDING
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.layout.maps import scatter_padding, transposed_map, window_map
from hpcpar.ops.contraction import Equation
from hpcpar.ops.conv_arguments import Geometry
from hpcpar.ops.linear import choose_labels, label_stacks
from hpcpar.ops.overlap import Schedule, Tile, scatter_tiles, window_tiles
from hpcpar.ops.spatial import Halo
from hpcpar.primitives.channel import Pending
from hpcpar.primitives.room import Room
from hpcpar.signature import Signature, signature


class Channels(NamedTuple):
    """Compute layouts that follow from how samples and channels are split."""

    x: Signature
    w: Signature
    bias: Signature
    out_dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]
    groups: int


def channel_layouts(
    name: str, x: Signature, w: Signature, groups: int, out: Layout | None, parameter: bool, transposed: bool = False
) -> Channels:
    """Return how the operands must lie, by the rule of einsum: one label for each axis.

    Parameters
    ----------
    x, w : Signature
        (N, C, *spatial) and (O, C / groups, *kernel); for a transposed convolution (C, O / groups, *kernel).
    groups : int
        More than one: a split of the channels must leave groups whole, at the same borders in x, w and the result.
    """
    mesh, ndim = x.mesh, len(x.shape) - 2
    spatial, kernel = "defgh"[:ndim], "uvwxy"[:ndim]
    if groups == 1:
        labels = ("co" if transposed else "oc") + kernel
        equation = Equation((f"nc{spatial}", labels), f"no{spatial}")
    else:
        equation = Equation((f"ng{spatial}", "gc" + kernel), f"ng{spatial}")
    inside = [a for stack in w.dims[2 - (groups > 1) :] for a in stack]
    if inside:
        raise LayoutError(f"{name}: axis {inside[0]!r} splits the inside of the kernel {w!r}; repartition the weight")
    try:
        chosen = choose_labels(mesh, equation, (x, w), out, (False, parameter))
    except LayoutError as error:
        raise LayoutError(f"{name}, as {error}") from None
    wrong = [a for a, c in chosen.items() if c in (*kernel, *("c" if groups > 1 else ""))]
    if wrong:
        raise LayoutError(f"{name}: axis {wrong[0]!r} would split the inside of the kernel {w!r}; choose another out=")
    stacks = label_stacks(mesh, equation, (x, w), out, chosen)
    x_need = x.with_layout(Layout(*[stacks[c] for c in equation.operands[0]]))
    w_need = w.with_layout(Layout(*[stacks[c] for c in equation.operands[1]]))
    partial = mesh.sort(stacks["c"]) if groups == 1 else ()
    out_label = "o" if groups == 1 else "g"
    channels = w.shape[1] * groups if transposed else w.shape[0]
    bias = signature(mesh, (channels,), Layout(stacks[out_label], partial=partial))
    out_dims = (stacks["n"], stacks[out_label], *[stacks[c] for c in spatial])
    local_groups = groups if groups == 1 else _local_groups(name, x_need, groups, channels)
    return Channels(x_need, w_need, bias, out_dims, partial, local_groups)


def _local_groups(name: str, x: Signature, groups: int, channels: int) -> int:
    width, out_width, p = x.shape[1] // groups, channels // groups, x.parts(1)
    if p == 1:
        return groups
    for r in range(p):
        lo, out_lo, group_lo = r * x.shape[1] // p, r * channels // p, r * groups // p
        if lo != group_lo * width or out_lo != group_lo * out_width:
            raise LayoutError(
                f"{name}: {groups} groups over {p} parts of the channels of {x!r}: block borders cut groups; choose "
                f"groups as a multiple of {p}, or repartition the channels"
            )
    return (x.box[1][1] - x.box[1][0]) // width


def whole_groups(w: Any, groups: int) -> Any:
    """The weight of a rank that has no group at all: without input channels, so that one empty group fits it."""
    return w if groups else w[:, :0]


class WindowPass:
    """A convolution of what a halo exchange brings: forward, or the gradient of a transposed one."""

    def __init__(
        self, source: Signature, out: Signature, geometry: Geometry, kernel: tuple[int, ...], lay: Channels
    ) -> None:
        steps = geometry.steps(kernel)
        arguments = [(*step, geometry.mode) for step in steps]
        # where padding is zero its ends are the kernel's own
        pads = "kernel" if geometry.mode == "zeros" else "fill"
        self.halo = Halo(source, out.shape[2:], [window_map] * len(steps), arguments, pads)
        self.shape, groups = out.local_shape, max(lay.groups, 1)
        self.stride, self.dilation, self.groups = geometry.stride, geometry.dilation, groups
        self.arguments = (geometry.stride, self.halo.padding, geometry.dilation, groups)
        self.compute = {"compute_dtype": geometry.compute_dtype}
        flops = 2.0 * prod(self.shape[:1] + self.shape[2:]) * prod(lay.w.local_shape)
        make = partial(window_tiles, self.halo, self.shape[2:], steps)
        self.schedule = Schedule(self.halo, make, flops, prod(source.local_shape[:2]))
        self.room = Room()

    def finish(self, pending: Pending, w: Any, bias: Any = None, into: Any = None) -> tuple[Any, Any]:
        """Return the result and the buffer of an exchange that `Halo.start` started; the result is added to `into`."""
        dtype, like = pending.buffer.dtype, pending.buffer
        tiles = self.schedule.chosen(dtype.itemsize)
        if into is not None and (tiles is not None or 0 in self.shape):
            y, buffer = self.finish(pending, w, bias)
            into += y
            return into, buffer
        if into is not None:
            buffer = pending.wait()
            kernels.conv_forward(buffer, w, bias, *self.arguments, out=into, accumulate=True, **self.compute)
            return into, buffer
        if tiles is None:
            buffer = pending.wait()
            y = self.room.empty(self.shape, dtype, like)
            y = self.room.made(kernels.conv_forward(buffer, w, bias, *self.arguments, out=y, **self.compute))
            return (y if y.shape == self.shape else kernels.empty_channels_last(self.shape, dtype, like)), buffer
        y = kernels.empty_channels_last(self.shape, dtype, like)

        def compute(buffer: Any, tile: Tile) -> None:
            source, target = buffer[(..., *tile.source)], y[(..., *tile.out)]
            geometry = (self.stride, tile.padding, self.dilation, self.groups)
            kernels.conv_forward(source, w, bias, *geometry, out=target, **self.compute)

        return y, tiles.run(pending, compute)


class ScatterPass:
    """A transposed convolution of what a halo exchange brings: forward, or the gradient of a convolution."""

    def __init__(
        self, source: Signature, out: Signature, geometry: Geometry, kernel: tuple[int, ...], lay: Channels
    ) -> None:
        steps = geometry.steps(kernel)
        self.halo = Halo(source, out.shape[2:], [transposed_map] * len(steps), steps)
        self.shape, groups = out.local_shape, max(lay.groups, 1)
        self.stride, self.dilation, self.groups = geometry.stride, geometry.dilation, groups
        padding = []
        for block, plan, step in zip(out.box[2:], self.halo.plans, steps, strict=True):
            i0 = transposed_map(plan.n, *block, *step).start
            padding.append(scatter_padding(*block, i0, i0 + plan.size, *step))
        self.arguments = (geometry.stride, tuple(padding), geometry.dilation, groups)
        self.compute = {"compute_dtype": geometry.compute_dtype}
        flops = 2.0 * prod(source.local_shape[:1] + source.local_shape[2:]) * prod(lay.w.local_shape)
        make = partial(scatter_tiles, self.halo, out.box[2:], steps)
        self.schedule = Schedule(self.halo, make, flops, prod(source.local_shape[:2]))

    def finish(self, pending: Pending, w: Any) -> tuple[Any, Any]:
        """Return the result and the buffer of an exchange that `Halo.start` started."""
        tiles = self.schedule.chosen(pending.buffer.dtype.itemsize)
        if tiles is None:
            buffer = pending.wait()
            return kernels.conv_backward_data(buffer, w, self.shape, *self.arguments, **self.compute), buffer
        y = kernels.empty_channels_last(self.shape, pending.buffer.dtype, pending.buffer)

        def compute(buffer: Any, tile: Tile) -> None:
            source, target = buffer[(..., *tile.source)], y[(..., *tile.out)]
            geometry = (self.stride, tile.padding, self.dilation, self.groups)
            target[...] = kernels.conv_backward_data(source, w, target.shape, *geometry, **self.compute)

        return y, tiles.run(pending, compute)


class ConvPlan:
    """The passes of one convolution on this rank."""

    def __init__(self, lay: Channels, result: Signature, geometry: Geometry) -> None:
        kernel = lay.w.shape[2:]
        self.groups, self.w_shape = lay.groups, lay.w.local_shape
        self.rounding = ROUNDING if geometry.compute_dtype == "bfloat16" else 0.0
        self.pulls = geometry.mode == "zeros"
        self.x_is_less = lay.x.size <= result.size
        self.ahead = WindowPass(lay.x, result, geometry, kernel, lay)
        self.back = ScatterPass(result.resolved, lay.x, geometry, kernel, lay) if self.pulls else None

    def forward(self, x: Any, w: Any, bias: Any) -> tuple[Any, Any]:
        """Return the result, and what is kept: x, or its buffer."""
        w = whole_groups(w, self.groups)
        y, buffer = self.ahead.finish(self.ahead.halo.start(x), w, bias)
        return y, (x if self.pulls else buffer, w)

    def pull(self, saved: Any, g: Any, needs: tuple[bool, ...]) -> list[Any]:
        """Gradients from the own block of x and a haloed dY."""
        (x, w), back = saved, self.back
        if needs[1] and not needs[0] and self.x_is_less:  # the first layer: a halo of its few channels does
            return self.push((self.ahead.halo.start(x).wait(), w), g, needs)
        grads: list[Any] = [None] * len(needs)
        g = kernels.to_channels_last(g)  # a part of a concatenation's gradient is copied once, not by each kernel
        pending = back.halo.start(g) if needs[0] or needs[1] else None
        if any(needs[2:]):
            grads[2] = kernels.channel_sums(g)
        if needs[0]:
            grads[0], dy = back.finish(pending, w)
        if needs[1]:
            dy = dy if needs[0] else pending.wait()
            dw = kernels.conv_backward_weight(x, dy, w.shape, *back.arguments, **back.compute)
            grads[1] = dw.reshape(self.w_shape)
        return grads

    def push(self, saved: Any, g: Any, needs: tuple[bool, ...]) -> list[Any]:
        """Gradients from the kept haloed x; dX is added up by the owners."""
        (buffer, w), ahead = saved, self.ahead
        grads: list[Any] = [None] * len(needs)
        if needs[0]:
            dx = kernels.conv_backward_data(g, w, buffer.shape, *ahead.arguments, **ahead.compute)
            pending = ahead.halo.start_adjoint(dx, give=True)
        if needs[1]:
            dw = kernels.conv_backward_weight(buffer, g, w.shape, *ahead.arguments, **ahead.compute)
            grads[1] = dw.reshape(self.w_shape)
        if any(needs[2:]):
            grads[2] = kernels.channel_sums(g)
        if needs[0]:
            grads[0] = pending.wait()
        return grads


class TransposePlan:
    """The passes of one transposed convolution: those of a convolution with x and y exchanged."""

    def __init__(self, lay: Channels, result: Signature, geometry: Geometry) -> None:
        kernel = lay.w.shape[2:]
        self.groups, self.w_shape = lay.groups, lay.w.local_shape
        self.rounding = ROUNDING if geometry.compute_dtype == "bfloat16" else 0.0
        self.ahead = ScatterPass(lay.x, result, geometry, kernel, lay)
        self.back = WindowPass(result.resolved, lay.x, geometry, kernel, lay)

    def forward(self, x: Any, w: Any, bias: Any) -> tuple[Any, Any]:
        """Return the result, and what is kept."""
        w = whole_groups(w, self.groups)
        y, _ = self.ahead.finish(self.ahead.halo.start(x), w)
        if bias is not None:
            y += bias.reshape(bias.size, *(1,) * (y.ndim - 2))
        return y, (x, w)

    def pull(self, saved: Any, g: Any, needs: tuple[bool, ...]) -> list[Any]:
        """Gradients from the own block of x and a haloed dY."""
        (x, w), back = saved, self.back
        grads: list[Any] = [None] * len(needs)
        g = kernels.to_channels_last(g)  # a part of a concatenation's gradient is copied once, not by each kernel
        pending = back.halo.start(g) if needs[0] or needs[1] else None
        if any(needs[2:]):
            grads[2] = kernels.channel_sums(g)
        if needs[0]:
            grads[0], dy = back.finish(pending, w)
        if needs[1]:
            dy = dy if needs[0] else pending.wait()
            dw = kernels.conv_backward_weight(dy, x, w.shape, *back.arguments, **back.compute)
            grads[1] = dw.reshape(self.w_shape)
        return grads
