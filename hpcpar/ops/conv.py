"""Convolution under any split of samples, channels and positions, with its gradients.

The channels follow the rule of einsum (see `hpcpar.ops.linear`), the positions that of the halo engine. The gradient
pulls a halo of dY: one haloed dY serves dX of the own block, computed by one kernel, and dW from the own block of x
without any halo, since each pair of an input and an output is counted once, by the owner of the input. Nothing but the
activation is kept. (Padding modes other than zeros keep the haloed input and push the gradient back instead.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from hpcpar import kernels
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.layout.maps import PAD_MODES, out_size, same_padding, scatter_padding, transposed_map, window_map
from hpcpar.ops.contraction import Equation
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.linear import choose_labels, label_stacks
from hpcpar.ops.repartition import repartition
from hpcpar.ops.spatial import Halo, per_dim
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor

Pairs = tuple[tuple[int, int], ...]


class Geometry(NamedTuple):
    """The arguments of a convolution: one entry for each spatial dim."""

    stride: tuple[int, ...]
    padding: Pairs
    dilation: tuple[int, ...]
    groups: int
    mode: str = "zeros"
    extra: tuple[int, ...] = ()


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
    chosen = choose_labels(mesh, equation, (x, w), out, (False, parameter))
    inside = [a for a, c in chosen.items() if c in (*kernel, *("c" if groups > 1 else ""))]
    if inside:
        raise LayoutError(f"{name}: axis {inside[0]!r} splits the inside of the kernel in {w!r}; repartition the weight")
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
                f"{name}: {groups} groups over {p} parts of the channels of {x!r}: block borders cut groups; choose groups as a "
                f"multiple of {p}, or repartition the channels"
            )
    return (x.box[1][1] - x.box[1][0]) // width


def whole_groups(w: Any, groups: int) -> Any:
    """The weight of a rank that has no group at all: without input channels, so that one empty group fits it."""
    return w if groups else w[:, :0]


class Conv(Op):
    """Convolution (cross-correlation, as torch) of (N, C, *spatial) with (O, C / groups, *kernel)."""

    name = "conv"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], geometry: Geometry, out: Layout | None, parameter: bool) -> Rule:
        x, w = sigs[0].resolved, sigs[1].resolved
        sizes = conv_sizes(x.shape, w.shape, geometry)
        target = signature(x.mesh, (x.shape[0], w.shape[0], *sizes), out).layout if out is not None else None
        lay = channel_layouts(self.name, x, w, geometry.groups, target, parameter)
        result = signature(x.mesh, (x.shape[0], w.shape[0], *sizes), Layout(*lay.out_dims, partial=lay.partial))
        lost = x.mesh.sort([a for d, stack in enumerate(lay.out_dims) if d != 1 for a in stack])
        moves = [lay.x, lay.w] + [lay.bias] * (len(sigs) - 2)
        # dX is summed over output channels, dW and dbias over samples and positions
        dx = lay.x.with_partial(x.mesh.sort(set(lay.out_dims[1]) - set(lay.x.split_axes)))
        grads = [dx, lay.w.with_partial(lost), lay.bias.with_partial(lost)][: len(sigs)]
        return Rule(result, moves, grads, sigs, ConvPlan(lay, result, geometry))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, w, bias = (*arrays, None)[:3]
        plan: ConvPlan = rule.plan
        geometry, w = plan.geometry, whole_groups(w, plan.groups)
        buffer = plan.halo(x)
        y = kernels.conv_forward(buffer, w, bias, geometry.stride, plan.padding, geometry.dilation, max(plan.groups, 1))
        if y.shape != rule.out.local_shape:
            y = kernels.empty_channels_last(rule.out.local_shape, y.dtype, x)
        return y, (x if plan.pulls else buffer, w)

    def flops(self, rule: Rule) -> int:
        return 2 * rule.out.size * prod(rule.grads[1].shape[1:])

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        plan: ConvPlan = rule.plan
        return (plan.pull if plan.pulls else plan.push)(saved, g, needs)


class ConvPlan:
    """Halos, paddings and gradients of one convolution on this rank."""

    def __init__(self, lay: Channels, result: Signature, geometry: Geometry) -> None:
        x, w, ndim = lay.x, lay.w, len(geometry.stride)
        self.geometry, self.groups = geometry, lay.groups
        self.pulls = geometry.mode == "zeros"
        windows = [
            (k, s, d, lo, geometry.mode)
            for k, s, d, (lo, _) in zip(w.shape[2:], geometry.stride, geometry.dilation, geometry.padding, strict=True)
        ]
        pads = "kernel" if self.pulls else "fill"
        self.halo = Halo(x, result.shape[2:], [window_map] * ndim, windows, pads)
        # the end of the padding belongs to the kernel where the last output does not reach it
        self.padding = self.halo.padding
        self.w_shape = w.local_shape
        if self.pulls:
            steps = [window[:4] for window in windows]
            self.pulled = Halo(result.resolved, x.shape[2:], [transposed_map] * ndim, steps)
            self.x_shape = x.local_shape
            self.pull_padding = tuple(
                _pull_padding(x.box[d + 2], result.shape[d + 2], *steps[d], plan.size) for d, plan in enumerate(self.pulled.plans)
            )

    def pull(self, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        """Gradients from the own block of x and a haloed dY."""
        (x, w), geometry = saved, self.geometry
        grads: list[Any] = [None, None]
        if needs[0] or needs[1]:
            dy = self.pulled(g)
            arguments = (geometry.stride, self.pull_padding, geometry.dilation, max(self.groups, 1))
            if needs[0]:
                grads[0] = kernels.conv_backward_data(dy, w, self.x_shape, *arguments)
            if needs[1]:
                grads[1] = kernels.conv_backward_weight(x, dy, w.shape, *arguments).reshape(self.w_shape)
        if len(needs) == 3:
            grads.append(kernels.channel_sums(g) if needs[2] else None)
        return tuple(grads)

    def push(self, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        """Gradients from the kept haloed x; dX is added up by the owners."""
        (buffer, w), geometry = saved, self.geometry
        arguments = (geometry.stride, self.padding, geometry.dilation, max(self.groups, 1))
        grads: list[Any] = [None, None]
        if needs[0]:
            dx = kernels.conv_backward_data(g, w, buffer.shape, *arguments)
            grads[0] = self.halo.adjoint(dx)
        if needs[1]:
            grads[1] = kernels.conv_backward_weight(buffer, g, w.shape, *arguments).reshape(self.w_shape)
        if len(needs) == 3:
            grads.append(kernels.channel_sums(g) if needs[2] else None)
        return tuple(grads)


def _pull_padding(block: tuple[int, int], out: int, k: int, s: int, d: int, lo: int, size: int) -> tuple[int, int]:
    i0 = transposed_map(out, *block, k, s, d, lo).start
    return scatter_padding(*block, i0, i0 + size, k, s, d, lo)


class ConvTranspose(Op):
    """Transposed convolution of (N, C, *spatial) with (C, O / groups, *kernel): the adjoint of a convolution."""

    name = "conv_transpose"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], geometry: Geometry, out: Layout | None, parameter: bool) -> Rule:
        x, w = sigs[0].resolved, sigs[1].resolved
        sizes = transposed_sizes(x.shape, w.shape, geometry)
        shape = (x.shape[0], w.shape[1] * geometry.groups, *sizes)
        target = signature(x.mesh, shape, out).layout if out is not None else None
        lay = channel_layouts(self.name, x, w, geometry.groups, target, parameter, transposed=True)
        result = signature(x.mesh, shape, Layout(*lay.out_dims, partial=lay.partial))
        lost = x.mesh.sort([a for d, stack in enumerate(lay.out_dims) if d != 1 for a in stack])
        moves = [lay.x, lay.w] + [lay.bias] * (len(sigs) - 2)
        dx = lay.x.with_partial(x.mesh.sort(set(lay.out_dims[1]) - set(lay.x.split_axes)))
        grads = [dx, lay.w.with_partial(lost), lay.bias.with_partial(lost)][: len(sigs)]
        return Rule(result, moves, grads, sigs, TransposePlan(lay, result, geometry))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, w, bias = (*arrays, None)[:3]
        plan: TransposePlan = rule.plan
        w = whole_groups(w, plan.groups)
        y = kernels.conv_backward_data(plan.halo(x), w, rule.out.local_shape, *plan.scatter)
        if bias is not None:
            y += bias.reshape(-1, *(1,) * (y.ndim - 2))
        return y, (x, w)

    def flops(self, rule: Rule) -> int:
        return 2 * rule.grads[0].size * prod(rule.grads[1].shape[1:])

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        (x, w), plan = saved, rule.plan
        grads: list[Any] = [None, None]
        if needs[0] or needs[1]:
            dy = plan.pulled(g)
            if needs[0]:
                dx = kernels.conv_forward(dy, w, None, *plan.gather)
                grads[0] = dx if dx.shape == x.shape else kernels.empty_channels_last(x.shape, x.dtype, x)
            if needs[1]:
                grads[1] = kernels.conv_backward_weight(dy, x, w.shape, *plan.gather).reshape(plan.w_shape)
        if len(needs) == 3:
            grads.append(kernels.channel_sums(g) if needs[2] else None)
        return tuple(grads)


class TransposePlan:
    """Halos and paddings of one transposed convolution: those of a convolution with x and y exchanged."""

    def __init__(self, lay: Channels, result: Signature, geometry: Geometry) -> None:
        x, w, ndim = lay.x, lay.w, len(geometry.stride)
        steps = [
            (k, s, d, lo)
            for k, s, d, (lo, _) in zip(w.shape[2:], geometry.stride, geometry.dilation, geometry.padding, strict=True)
        ]
        self.halo = Halo(x, result.shape[2:], [transposed_map] * ndim, steps)
        scatter = tuple(
            _pull_padding(result.box[d + 2], x.shape[d + 2], *steps[d], plan.size) for d, plan in enumerate(self.halo.plans)
        )
        self.pulled = Halo(result.resolved, x.shape[2:], [window_map] * ndim, [(*step, "zeros") for step in steps], "kernel")
        self.groups = lay.groups
        self.scatter = (geometry.stride, scatter, geometry.dilation, max(lay.groups, 1))
        self.gather = (geometry.stride, self.pulled.padding, geometry.dilation, max(lay.groups, 1))
        self.w_shape = w.local_shape


# ---- arguments


def conv_sizes(x: tuple[int, ...], w: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Return the spatial output lengths; an error names what does not fit."""
    if x[1] != w[1] * geometry.groups or w[0] % geometry.groups:
        raise ValueError(f"conv: x of shape {x} does not fit a weight of shape {w} with {geometry.groups} groups")
    sizes = tuple(
        out_size("conv", n, k, s, d, lo, hi)
        for n, k, s, d, (lo, hi) in zip(x[2:], w[2:], geometry.stride, geometry.dilation, geometry.padding, strict=True)
    )
    if min(sizes) < 0 or (min(sizes) < 1 and 0 not in x[2:]):
        raise ValueError(f"conv: a kernel of {w[2:]} with dilation {geometry.dilation} is larger than the padded input {x[2:]}")
    return sizes


def transposed_sizes(x: tuple[int, ...], w: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Return the spatial output lengths of a transposed convolution."""
    if x[1] != w[0] or x[1] % geometry.groups:
        raise ValueError(f"conv_transpose: x of shape {x} does not fit a weight of shape {w} with {geometry.groups} groups")
    sizes = []
    for d, n in enumerate(x[2:]):
        extra, stride, dilation = geometry.extra[d], geometry.stride[d], geometry.dilation[d]
        if not 0 <= extra < max(stride, dilation):
            raise ValueError(f"conv_transpose: output_padding {extra} must be smaller than stride {stride} or dilation {dilation}")
        sizes.append(out_size("transposed", n, w[d + 2], stride, dilation, *geometry.padding[d], extra=extra))
    if min(sizes) < 1:
        raise ValueError(f"conv_transpose: input {x[2:]} with padding {geometry.padding} leaves no output")
    return tuple(sizes)


def _geometry(name: str, ndim: int, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, mode: str) -> Geometry:
    if w.ndim != ndim + 2:
        raise ValueError(f"{name} takes weights with {ndim + 2} dims, got shape {w.shape}")
    stride, dilation = per_dim(name, "stride", stride, ndim), per_dim(name, "dilation", dilation, ndim)
    if min(stride) < 1 or min(dilation) < 1 or groups < 1:
        raise ValueError(f"{name}: stride, dilation and groups are at least 1, got {stride}, {dilation}, {groups}")
    if mode not in PAD_MODES:
        raise ValueError(f"{name}: padding_mode is one of {', '.join(PAD_MODES)}, got {mode!r}")
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ValueError(f"{name}: padding='same' needs stride 1, got {stride}")
        pairs = tuple(same_padding(k, d) for k, d in zip(w.shape[2:], dilation, strict=True))
    elif padding == "valid":
        pairs = ((0, 0),) * ndim
    elif isinstance(padding, str):
        raise ValueError(f"{name}: padding is 'same', 'valid' or integers, got {padding!r}")
    else:
        pairs = tuple((p, p) for p in per_dim(name, "padding", padding, ndim))
    if min(min(p) for p in pairs) < 0:
        raise ValueError(f"{name}: padding is not negative, got {padding!r}; use pad to crop")
    return Geometry(stride, pairs, dilation, groups, mode)


_conv, _conv_transpose = Conv(), ConvTranspose()


def _check_padding_mode(name: str, shape: tuple[int, ...], geometry: Geometry) -> None:
    """Reflection and wrap-around need enough input, as in torch."""
    for n, (lo, hi) in zip(shape[2:], geometry.padding, strict=True):
        most = {"reflect": n - 1, "circular": n, "replicate": max(lo, hi) if n else 0}.get(geometry.mode, max(lo, hi))
        if max(lo, hi) > most:
            raise ValueError(f"{name}: padding {(lo, hi)} is too wide for mode {geometry.mode!r} on a dim of length {n}")


def _convolve(
    ndim: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int, mode: str,
    out: Layout | None,
) -> Tensor:  # fmt: skip
    name = f"conv{ndim}d"
    if x.ndim != ndim + 2:
        raise ValueError(f"{name} takes x of shape (N, C, {ndim} spatial dims), got {x.shape}")
    geometry = _geometry(name, ndim, weight, stride, padding, dilation, groups, mode)
    _check_padding_mode(name, x.shape, geometry)
    operands = (x, weight) if bias is None else (x, weight, bias)
    y = _conv(operands, (geometry, out, weight.is_parameter))
    return y if out is None else repartition(y, out)


def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, padding_mode: str = "zeros", out: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution of x (N, C, L) with weight (O, C / groups, k); see `conv3d`."""
    return _convolve(1, x, weight, bias, stride, padding, dilation, groups, padding_mode, out)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, padding_mode: str = "zeros", out: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution of x (N, C, H, W) with weight (O, C / groups, kh, kw); see `conv3d`."""
    return _convolve(2, x, weight, bias, stride, padding, dilation, groups, padding_mode, out)


def conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, padding_mode: str = "zeros", out: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution (cross-correlation, as torch has it) of x with weight.

    Parameters
    ----------
    x : Tensor
        (N, C, D, H, W). Samples, channels and positions may be split, in any mix, with uneven and empty blocks.
    weight : Tensor
        (O, C / groups, kd, kh, kw). Split over O: the result is split over channels. Split over C: the result is partial.
        A parameter that is split over an axis of the samples is gathered on use.
    bias : Tensor, optional
        (O,), added once.
    stride, dilation : int or tuple of int
    padding : int, tuple of int, "same" or "valid"
    groups : int
        A split of the channels must leave groups whole.
    padding_mode : {"zeros", "reflect", "replicate", "circular"}
    out : Layout, optional
        Layout of the result; decides where x and weight disagree (see `einsum`).

    Raises
    ------
    ValueError
        Shapes or arguments that do not fit.
    LayoutError
        Layouts that disagree: on all ranks, before any message.
    """
    return _convolve(3, x, weight, bias, stride, padding, dilation, groups, padding_mode, out)


def _scatter(
    ndim: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any, groups: int,
    dilation: Any, out: Layout | None,
) -> Tensor:  # fmt: skip
    name = f"conv_transpose{ndim}d"
    if x.ndim != ndim + 2:
        raise ValueError(f"{name} takes x of shape (N, C, {ndim} spatial dims), got {x.shape}")
    geometry = _geometry(name, ndim, weight, stride, padding, dilation, groups, "zeros")
    geometry = geometry._replace(extra=per_dim(name, "output_padding", output_padding, ndim))
    operands = (x, weight) if bias is None else (x, weight, bias)
    y = _conv_transpose(operands, (geometry, out, weight.is_parameter))
    return y if out is None else repartition(y, out)


def conv_transpose1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, out: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of x (N, C, L) with weight (C, O / groups, k); see `conv_transpose3d`."""
    return _scatter(1, x, weight, bias, stride, padding, output_padding, groups, dilation, out)


def conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, out: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of x (N, C, H, W) with weight (C, O / groups, kh, kw); see `conv_transpose3d`."""
    return _scatter(2, x, weight, bias, stride, padding, output_padding, groups, dilation, out)


def conv_transpose3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, out: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution: the gradient of `conv3d` in its input, with a bias.

    Parameters
    ----------
    x : Tensor
        (N, C, D, H, W), any dims split.
    weight : Tensor
        (C, O / groups, kd, kh, kw). Split over O / groups (with one group): the result is split over channels; over C:
        partial.
    output_padding : int or tuple of int
        Added to one end of the output; smaller than stride or dilation.
    """
    return _scatter(3, x, weight, bias, stride, padding, output_padding, groups, dilation, out)
