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
from hpcpar.ops.conv_arguments import Geometry, Pairs
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


class _Pass:
    """What both passes share: the arguments of their kernels, for the whole block or one tile of it."""

    def __init__(self, out: Signature, geometry: Geometry, lay: Channels, padding: Pairs) -> None:
        self.shape, self.groups = out.local_shape, max(lay.groups, 1)
        self.stride, self.dilation = geometry.stride, geometry.dilation
        self.arguments = self.padded(padding)
        self.compute = {"compute_dtype": geometry.compute_dtype}

    def padded(self, padding: Pairs) -> tuple[Any, ...]:
        """Return the arguments of a kernel whose input has this padding."""
        return self.stride, padding, self.dilation, self.groups


class WindowPass(_Pass):
    """A convolution of what a halo exchange brings: forward, or the gradient of a transposed one."""

    def __init__(
        self, source: Signature, out: Signature, geometry: Geometry, kernel: tuple[int, ...], lay: Channels
    ) -> None:
        steps = geometry.steps(kernel)
        arguments = [(*step, geometry.mode) for step in steps]
        # where padding is zero its ends are the kernel's own
        pads = "kernel" if geometry.mode == "zeros" else "fill"
        self.halo = Halo(source, out.shape[2:], [window_map] * len(steps), arguments, pads)
        super().__init__(out, geometry, lay, self.halo.padding)
        flops = 2.0 * prod(self.shape[:1] + self.shape[2:]) * prod(lay.w.local_shape)
        make = partial(window_tiles, self.halo, self.shape[2:], steps)
        self.schedule = Schedule(self.halo, make, flops, prod(source.local_shape[:2]))
        self.room = Room()

    def finish(self, pending: Pending, w: Any, bias: Any = None, into: Any = None) -> tuple[Any, Any]:
        """Return the result and the buffer of an exchange that `Halo.start` started; `into`, if given, is added to."""
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
            kernels.conv_forward(source, w, bias, *self.padded(tile.padding), out=target, **self.compute)

        return y, tiles.run(pending, compute)

    def weight_gradient(self, buffer: Any, y: Any, shape: tuple[int, ...]) -> Any:
        """Return the gradient of a weight of this shape, from the buffer and an array `y` that lies as the result."""
        return kernels.conv_backward_weight(buffer, y, shape, *self.arguments, **self.compute)


class ScatterPass(_Pass):
    """A transposed convolution of what a halo exchange brings: forward, or the gradient of a convolution."""

    def __init__(
        self, source: Signature, out: Signature, geometry: Geometry, kernel: tuple[int, ...], lay: Channels
    ) -> None:
        steps = geometry.steps(kernel)
        self.halo = Halo(source, out.shape[2:], [transposed_map] * len(steps), steps)
        padding = []
        for block, plan, step in zip(out.box[2:], self.halo.plans, steps, strict=True):
            i0 = transposed_map(plan.n, *block, *step).start
            padding.append(scatter_padding(*block, i0, i0 + plan.size, *step))
        super().__init__(out, geometry, lay, tuple(padding))
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
            geometry = self.padded(tile.padding)
            target[...] = kernels.conv_backward_data(source, w, target.shape, *geometry, **self.compute)

        return y, tiles.run(pending, compute)

    def weight_gradient(self, buffer: Any, y: Any, shape: tuple[int, ...]) -> Any:
        """Return the gradient of a weight of this shape, from the buffer and an array `y` that lies as the result."""
        return kernels.conv_backward_weight(y, buffer, shape, *self.arguments, **self.compute)


class _Plan:
    """The passes of one convolution or transposed convolution on this rank: `ahead`, and `back` for its gradients."""

    ahead: WindowPass | ScatterPass
    back: WindowPass | ScatterPass | None

    def __init__(self, lay: Channels, geometry: Geometry) -> None:
        self.groups, self.w_shape = lay.groups, lay.w.local_shape
        self.rounding = ROUNDING if geometry.compute_dtype == "bfloat16" else 0.0

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
            grads[1] = back.weight_gradient(dy, x, w.shape).reshape(self.w_shape)
        return grads


class ConvPlan(_Plan):
    """The passes of one convolution on this rank."""

    def __init__(self, lay: Channels, result: Signature, geometry: Geometry) -> None:
        super().__init__(lay, geometry)
        kernel = lay.w.shape[2:]
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
        if needs[1] and not needs[0] and self.x_is_less:  # the first layer: a halo of its few channels does
            x, w = saved
            return self.push((self.ahead.halo.start(x).wait(), w), g, needs)
        return super().pull(saved, g, needs)

    def push(self, saved: Any, g: Any, needs: tuple[bool, ...]) -> list[Any]:
        """Gradients from the kept haloed x; dX is added up by the owners."""
        (buffer, w), ahead = saved, self.ahead
        grads: list[Any] = [None] * len(needs)
        if needs[0]:
            dx = kernels.conv_backward_data(g, w, buffer.shape, *ahead.arguments, **ahead.compute)
            pending = ahead.halo.start_adjoint(dx, give=True)
        if needs[1]:
            grads[1] = ahead.weight_gradient(buffer, g, w.shape).reshape(self.w_shape)
        if any(needs[2:]):
            grads[2] = kernels.channel_sums(g)
        if needs[0]:
            grads[0] = pending.wait()
        return grads


class TransposePlan(_Plan):
    """The passes of one transposed convolution: those of a convolution with x and y exchanged."""

    def __init__(self, lay: Channels, result: Signature, geometry: Geometry) -> None:
        super().__init__(lay, geometry)
        kernel = lay.w.shape[2:]
        self.ahead = ScatterPass(lay.x, result, geometry, kernel, lay)
        self.back = WindowPass(result.resolved, lay.x, geometry, kernel, lay)

    def forward(self, x: Any, w: Any, bias: Any) -> tuple[Any, Any]:
        """Return the result, and what is kept."""
        w = whole_groups(w, self.groups)
        y, _ = self.ahead.finish(self.ahead.halo.start(x), w)
        if bias is not None:
            y += bias.reshape(bias.size, *(1,) * (y.ndim - 2))
        return y, (x, w)
