"""Max and average pooling under any split of samples, channels and positions.

Windows may overlap, leave gaps, hang over the ends and reach over several ranks; blocks may be empty. Which positions
count is decided by global indices, so padding and divisors are those of the whole array.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.layout.maps import out_size, window_map
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.elementwise import mul
from hpcpar.ops.elementwise import pow as power
from hpcpar.ops.spatial import Halo, Lengths, check_spatial, global_positions, per_dim, remembered, with_batch
from hpcpar.primitives.room import Room
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class Windows(NamedTuple):
    """The windows of a pooling: one entry for each spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool

    def sizes(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial lengths of the result."""
        return tuple(
            out_size("pool", n, k, s, d, p, p, ceil=self.ceil) for n, k, s, p, d in zip(spatial, *self[:4], strict=True)
        )

    def results(self, name: str, x: Signature) -> Signature:
        """Return the signature of the result; raises ValueError where the windows do not fit x."""
        ndim = len(self.kernel)
        check_spatial(f"{name}{ndim}d", x, ndim)
        sizes = self.sizes(x.shape[2:])
        if min(sizes) < 1:
            raise ValueError(f"{name}{ndim}d: a window of {self.kernel} does not fit the padded input {x.shape[2:]}")
        return pooled(x, sizes)


def pooled(x: Signature, spatial: Sequence[int]) -> Signature:
    """Return the signature of a result with other spatial lengths, which lies as x."""
    return signature(x.mesh, (*x.shape[:2], *spatial), Layout(*x.dims))


def window_halo(x: Signature, out: Signature, windows: Windows, pads: str) -> Halo:
    """Return the exchange that brings the windows of this rank's results together."""
    arguments = [(k, s, d, p, "zeros") for k, s, p, d in zip(*windows[:4], strict=True)]
    return Halo(x, out.shape[2:], [window_map] * len(arguments), arguments, pads)


class MaxPool(Op):
    """Maxima over windows; keeps, for each, where in the buffer it stood."""

    name = "max_pool"

    def rule(self, sigs: tuple[Signature, ...], windows: Windows) -> Rule:
        x = sigs[0].resolved
        out = windows.results(self.name, x)
        return Rule(out, [x], [x], sigs, _MaxPlan(x, out, windows))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        plan: _MaxPlan = rule.plan
        windows, x = plan.windows, arrays[0]
        buffer = plan.halo(x, kernels.lowest(x.dtype))
        y, index = kernels.max_pool_forward(
            buffer, windows.kernel, windows.stride, windows.dilation, rule.out.local_shape[2:], plan.valid
        )
        if extra is not None:
            extra(global_positions(index, plan.size, plan.begin, plan.spatial))
        return y, (index, buffer.shape)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        index, shape = saved
        return (rule.plan.halo.adjoint(kernels.max_pool_backward(g, index, shape), give=True),)


class _MaxPlan:
    """Halo of one max pooling, which part of the buffer is input, and where the buffer begins."""

    def __init__(self, x: Signature, out: Signature, windows: Windows) -> None:
        self.windows, self.spatial = windows, x.shape[2:]
        self.halo = window_halo(x, out, windows, "fill")
        ends = [plan.without_padding.padding for plan in self.halo.plans]
        self.size = tuple(plan.size for plan in self.halo.plans)
        self.valid = tuple((before, size - after) for (before, after), size in zip(ends, self.size, strict=True))
        self.begin = tuple(
            o0 * s - p for (o0, _), s, p in zip(out.box[2:], windows.stride, windows.padding, strict=True)
        )


class _AveragePlan(NamedTuple):
    """Halo of one average pooling, the shapes of its buffer and of its result, and what its kernel takes."""

    halo: Halo
    buffer: tuple[int, ...]
    shape: tuple[int, ...]
    arguments: tuple
    room: Room

    def average(self, buffer: Any, slope: float | None = None, signs: Any = None) -> Any:
        """Return the means, with room for the halo of who uses them."""
        y = self.room.empty(self.shape, buffer.dtype, buffer)
        return self.room.made(kernels.avg_pool_forward(buffer, *self.arguments, slope, out=y, signs=signs))


class AvgPool(Op):
    """Means over windows; the divisors count global positions."""

    name = "avg_pool"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], windows: Windows, include_pad: bool, override: int | None) -> Rule:
        x = sigs[0].resolved
        out = windows.results(self.name, x)
        halo = window_halo(x, out, windows, "kernel")
        buffer = (*x.local_shape[:2], *(plan.without_padding.size for plan in halo.plans))
        divisors = [
            window_divisors(n, *block, k, s, p, include_pad)
            for n, block, k, s, p in zip(x.shape[2:], out.box[2:], *windows[:3], strict=True)
        ]
        if override is not None:
            divisors = [np.full(len(d), float(override) if i == 0 else 1.0) for i, d in enumerate(divisors)]
        before = tuple(pad[0] for pad in halo.padding)
        arguments = (windows.kernel, windows.stride, before, tuple(divisors))
        return Rule(out, [x], [x], sigs, _AveragePlan(halo, buffer, out.local_shape, arguments, Room()))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return rule.plan.average(rule.plan.halo(arrays[0])), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        halo, shape, _, arguments, _ = rule.plan
        return (halo.adjoint(kernels.avg_pool_backward(g, shape, *arguments), give=True),)


class LeakyAvgPool(AvgPool):
    """Means over windows of leaky ReLU, which is never stored: `extra` is its slope. Of its argument signs are kept."""

    linear = None

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        buffer = rule.plan.halo(arrays[0])
        signs = kernels.empty_signs(buffer)
        return rule.plan.average(buffer, extra, signs), (signs, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        halo, shape, _, arguments, _ = rule.plan
        return (halo.adjoint(kernels.avg_pool_backward(g, shape, *arguments, *saved), give=True),)


def window_divisors(n: int, o0: int, o1: int, k: int, s: int, p: int, include_pad: bool) -> np.ndarray:
    """Return how many positions of a dim of length n count in the windows of outputs ``[o0, o1)``; float64.

    With `include_pad` the padding p on both sides counts, but nothing behind it (where ``ceil_mode`` leads).
    """
    first = np.arange(o0, o1) * s - p
    last = np.minimum(first + k, n + p)
    if not include_pad:
        first, last = np.maximum(first, 0), np.minimum(last, n)
    return (last - first).astype(np.float64)


_max_pool, _avg_pool, _leaky_avg_pool = MaxPool(), AvgPool(), LeakyAvgPool()


@remembered
def make_windows(
    name: str, ndim: int, kernel: Lengths, stride: Lengths | None, padding: Lengths, dilation: Lengths, ceil: bool
) -> Windows:
    """Return checked window arguments."""
    kernel = per_dim(name, "kernel_size", kernel, ndim)
    stride = per_dim(name, "stride", kernel if stride is None else stride, ndim)
    padding, dilation = per_dim(name, "padding", padding, ndim), per_dim(name, "dilation", dilation, ndim)
    if min(kernel + stride + dilation) < 1:
        raise ValueError(f"{name}: kernel, stride and dilation are at least 1, got {kernel}, {stride}, {dilation}")
    if any(not 0 <= 2 * p <= d * (k - 1) + 1 for k, p, d in zip(kernel, padding, dilation, strict=True)):
        raise ValueError(f"{name}: padding {padding} is more than half of the window {kernel} (dilation {dilation})")
    return Windows(kernel, stride, padding, dilation, bool(ceil))


def _max(
    ndim: int, x: Tensor, kernel: Lengths, stride: Lengths | None, padding: Lengths, dilation: Lengths, ceil: bool,
    indices: bool,
) -> Any:  # fmt: skip
    name = f"max_pool{ndim}d"
    windows = make_windows(name, ndim, kernel, stride, padding, dilation, ceil)

    def pool(x: Tensor) -> Any:
        if not indices:
            return _max_pool((x,), (windows,))
        kept: list[Any] = []
        y = _max_pool((x,), (windows,), kept.append)
        return y, Tensor(kept[0], y.sig)

    return with_batch(ndim, x, pool)


def _avg(
    ndim: int, x: Tensor, kernel: Lengths, stride: Lengths | None, padding: Lengths, ceil: bool, include_pad: bool,
    override: int | None, slope: float | None = None,
) -> Tensor:  # fmt: skip
    name = f"avg_pool{ndim}d"
    windows = make_windows(name, ndim, kernel, stride, padding, 1, ceil)
    if override == 0:
        raise ValueError(f"{name}: divisor_override is not zero")

    def pool(x: Tensor) -> Tensor:
        static = (windows, bool(include_pad), override)
        return _avg_pool((x,), static) if slope is None else _leaky_avg_pool((x,), static, float(slope))

    return with_batch(ndim, x, pool)


def max_pool1d(
    x: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0, dilation: Lengths = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Return maxima over windows of x (N, C, L); see `max_pool3d`."""
    return _max(1, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(
    x: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0, dilation: Lengths = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Return maxima over windows of x (N, C, H, W); see `max_pool3d`."""
    return _max(2, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(
    x: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0, dilation: Lengths = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Return maxima over windows of x.

    Parameters
    ----------
    x : Tensor
        (N, C, D, H, W), or without N; any dims split, blocks may be empty. Partial values are resolved first.
    kernel_size, stride, padding, dilation : int or tuple of int
        The stride is the kernel by default; the padding, minus infinity, is at most half of a window.
    ceil_mode : bool
        A last window may hang over the end if it begins inside the input or the padding before it.
    return_indices : bool
        Also return where the maxima stand.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        The maxima, laid out as x; int64 flat positions in the global spatial box, as in torch, for `max_unpool3d`.

    Raises
    ------
    ValueError
        Arguments that do not fit.

    Notes
    -----
    Of equal maxima the first in window order is chosen and takes the gradient; of NaN the last. A window without any
    input gives the lowest value and position -1 and passes no gradient on.
    """
    return _max(3, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def avg_pool1d(
    x: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, *, negative_slope: float | None = None,
) -> Tensor:  # fmt: skip
    """Return means over windows of x (N, C, L); see `avg_pool3d`."""
    return _avg(1, x, kernel_size, stride, padding, ceil_mode, count_include_pad, None, negative_slope)


def avg_pool2d(
    x: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, *, negative_slope: float | None = None,
) -> Tensor:  # fmt: skip
    """Return means over windows of x (N, C, H, W); see `avg_pool3d`."""
    return _avg(2, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, negative_slope)


def avg_pool3d(
    x: Tensor, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, *, negative_slope: float | None = None,
) -> Tensor:  # fmt: skip
    """Return means over windows of x.

    Parameters
    ----------
    x : Tensor
        (N, C, D, H, W), or without N; any dims split, blocks may be empty.
    kernel_size, stride, padding : int or tuple of int
        The stride is the kernel by default; the padding, zeros, is at most half of a window.
    ceil_mode : bool
        See `max_pool3d`.
    count_include_pad : bool
        Whether the padding counts in the divisor. Only the padding at the ends of the whole array is meant.
    divisor_override : int, optional
        Divide by this instead.
    negative_slope : float, optional
        Take the means of ``leaky_relu(x, negative_slope)``: one pass over memory less, forward and backward, than the
        two calls, and the activation is not kept.
    """
    return _avg(3, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, negative_slope)


def lp_pool(ndim: int, x: Tensor, norm_type: float, kernel: Lengths, stride: Lengths | None, ceil: bool) -> Tensor:
    """Return norms over windows of 1 to 3 dims; see `lp_pool1d`."""
    sizes = per_dim(f"lp_pool{ndim}d", "kernel_size", kernel, ndim)
    means = _avg(ndim, power(x, norm_type), sizes, stride, 0, ceil, True, None)
    return power(mul(means, float(prod(sizes))), 1.0 / norm_type)


def lp_pool1d(
    x: Tensor, norm_type: float, kernel_size: Lengths, stride: Lengths | None = None, ceil_mode: bool = False
) -> Tensor:
    """Return ``sum(x ** norm_type) ** (1 / norm_type)`` over windows of x (N, C, L), or (C, L).

    With `ceil_mode`, a last window that hangs over the end counts the mean of what it holds for the rest, as in torch.
    """
    return lp_pool(1, x, norm_type, kernel_size, stride, ceil_mode)


def lp_pool2d(
    x: Tensor, norm_type: float, kernel_size: Lengths, stride: Lengths | None = None, ceil_mode: bool = False
) -> Tensor:
    """Return norms over windows of x (N, C, H, W), or (C, H, W); see `lp_pool1d`."""
    return lp_pool(2, x, norm_type, kernel_size, stride, ceil_mode)


def lp_pool3d(
    x: Tensor, norm_type: float, kernel_size: Lengths, stride: Lengths | None = None, ceil_mode: bool = False
) -> Tensor:
    """Return norms over windows of x (N, C, D, H, W), or (C, D, H, W); see `lp_pool1d`."""
    return lp_pool(3, x, norm_type, kernel_size, stride, ceil_mode)
