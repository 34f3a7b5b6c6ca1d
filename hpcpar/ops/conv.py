"""Convolution under any split of samples, channels and positions, with its gradients.

The channels follow the rule of einsum (see `hpcpar.ops.linear`), the positions that of the halo engine. The gradient
pulls a halo of dY: one haloed dY serves dX of the own block, computed by one kernel, and dW from the own block of x
without any halo, since each pair of an input and an output is counted once, by the owner of the input. Nothing but the
activation is kept. (Where x needs no gradient and is smaller than dY, as in a first layer, a halo of x is pulled again
and makes dW with the own block of dY. Padding modes other than zeros keep the haloed input and push the gradient back.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from hpcpar.layout.layout import Layout
from hpcpar.ops.conv_arguments import (
    Geometry,
    check_padding_mode,
    conv_sizes,
    make_geometry,
    transposed_sizes,
)
from hpcpar.ops.conv_joined import joinable, joined_conv
from hpcpar.ops.conv_plan import ConvPlan, TransposePlan, channel_layouts
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.join import cat
from hpcpar.ops.repartition import repartition
from hpcpar.ops.spatial import check_spatial, per_dim, with_batch
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor

Parts = Tensor | Sequence[Tensor]


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
        return rule.plan.forward(*(*arrays, None)[:3])

    def rounding(self, rule: Rule) -> float:
        return rule.plan.rounding

    def flops(self, rule: Rule) -> int:
        return 2 * rule.out.size * prod(rule.grads[1].shape[1:])

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        plan: ConvPlan = rule.plan
        return (plan.pull if plan.pulls else plan.push)(saved, g, needs)


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
        return rule.plan.forward(*(*arrays, None)[:3])

    def rounding(self, rule: Rule) -> float:
        return rule.plan.rounding

    def flops(self, rule: Rule) -> int:
        return 2 * rule.grads[0].size * prod(rule.grads[1].shape[1:])

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        return rule.plan.pull(saved, g, needs)


_conv, _conv_transpose = Conv(), ConvTranspose()


def _convolve(
    ndim: int, x: Parts, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mode: str, out: Layout | None, compute_dtype: str | None,
) -> Tensor:  # fmt: skip
    name = f"conv{ndim}d"
    geometry = make_geometry(name, ndim, weight.shape, stride, padding, dilation, groups, mode, compute_dtype)
    if not isinstance(x, Tensor):
        x = list(x)
        if bias is None and all(part.ndim == ndim + 2 for part in x) and joinable(x, weight, geometry):
            y = joined_conv((weight, *x), (geometry, out, weight.is_parameter))
            return y if out is None else repartition(y, out)
        x = cat(x, dim=-ndim - 1)
    operands = (weight,) if bias is None else (weight, bias)

    def convolve(x: Tensor) -> Tensor:
        check_spatial(name, x, ndim)
        check_padding_mode(name, x.shape, geometry)
        return _conv((x, *operands), (geometry, out, weight.is_parameter))

    y = with_batch(ndim, x, convolve)
    return y if out is None else repartition(y, out)


def conv1d(
    x: Parts, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, padding_mode: str = "zeros", out: Layout | None = None, compute_dtype: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution of x (N, C, L) with weight (O, C / groups, k); see `conv3d`."""
    return _convolve(1, x, weight, bias, stride, padding, dilation, groups, padding_mode, out, compute_dtype)


def conv2d(
    x: Parts, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, padding_mode: str = "zeros", out: Layout | None = None, compute_dtype: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution of x (N, C, H, W) with weight (O, C / groups, kh, kw); see `conv3d`."""
    return _convolve(2, x, weight, bias, stride, padding, dilation, groups, padding_mode, out, compute_dtype)


def conv3d(
    x: Parts, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, padding_mode: str = "zeros", out: Layout | None = None, compute_dtype: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution (cross-correlation, as torch has it) of x with weight.

    Parameters
    ----------
    x : Tensor or sequence of Tensor
        (N, C, D, H, W), or without N. Samples, channels and positions may be split, in any mix, with uneven and empty
        blocks. A sequence stands for its concatenation along the channels, which is not made where the parts lie alike
        with whole channels and there is neither a bias nor another padding than zeros.
    weight : Tensor
        (O, C / groups, kd, kh, kw). Split over O: the result is split over channels. Split over C: the result is
        partial. A parameter that is split over an axis of the samples is gathered on use.
    bias : Tensor, optional
        (O,), added once.
    stride, dilation : int or tuple of int
    padding : int, tuple of int, "same" or "valid"
    groups : int
        A split of the channels must leave groups whole.
    padding_mode : {"zeros", "reflect", "replicate", "circular"}
    out : Layout, optional
        Layout of the result; decides where x and weight disagree (see `einsum`).
    compute_dtype : {"float32", "bfloat16"}, optional
        With "bfloat16" the operands of each pass (x, weight and the gradient of the result, all float32) are rounded to
        it; products are summed in float32, and results and gradients are float32. By default, and with "float32",
        operands are multiplied as they are.

    Raises
    ------
    ValueError
        Shapes or arguments that do not fit.
    RuntimeError
        bfloat16 where the processor does not have it: it is not emulated (`kernels.bfloat16_missing` says why).
    LayoutError
        Layouts that disagree: on all ranks, before any message.
    """
    return _convolve(3, x, weight, bias, stride, padding, dilation, groups, padding_mode, out, compute_dtype)


def _scatter(
    ndim: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any, out: Layout | None, compute_dtype: str | None,
) -> Tensor:  # fmt: skip
    name = f"conv_transpose{ndim}d"
    geometry = make_geometry(name, ndim, weight.shape, stride, padding, dilation, groups, "zeros", compute_dtype)
    geometry = geometry._replace(extra=per_dim(name, "output_padding", output_padding, ndim))
    operands = (weight,) if bias is None else (weight, bias)

    def scatter(x: Tensor) -> Tensor:
        check_spatial(name, x, ndim)
        return _conv_transpose((x, *operands), (geometry, out, weight.is_parameter))

    y = with_batch(ndim, x, scatter)
    return y if out is None else repartition(y, out)


def conv_transpose1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, out: Layout | None = None, compute_dtype: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of x (N, C, L) with weight (C, O / groups, k); see `conv_transpose3d`."""
    return _scatter(1, x, weight, bias, stride, padding, output_padding, groups, dilation, out, compute_dtype)


def conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, out: Layout | None = None, compute_dtype: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of x (N, C, H, W) with weight (C, O / groups, kh, kw).

    See `conv_transpose3d`.
    """
    return _scatter(2, x, weight, bias, stride, padding, output_padding, groups, dilation, out, compute_dtype)


def conv_transpose3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1, out: Layout | None = None, compute_dtype: str | None = None,
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
    compute_dtype : {"float32", "bfloat16"}, optional
        As in `conv3d`.
    """
    return _scatter(3, x, weight, bias, stride, padding, output_padding, groups, dilation, out, compute_dtype)
