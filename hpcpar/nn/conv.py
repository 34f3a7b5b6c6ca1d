"""Convolutions and transposed convolutions of 1 to 3 spatial dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcpar import functional as F
from hpcpar.kernels.bfloat16 import COMPUTE_DTYPES
from hpcpar.layout.layout import Layout
from hpcpar.nn import init
from hpcpar.nn.module import Module
from hpcpar.tensors import Tensor

Lengths = int | Sequence[int]


def per_dim(value: Lengths, dims: int, what: str) -> tuple[int, ...]:
    """Return one number for each spatial dim.

    Raises
    ------
    ValueError
        Another number of them.
    """
    if isinstance(value, int):
        return (value,) * dims
    numbers = tuple(int(n) for n in value)
    if len(numbers) != dims:
        raise ValueError(f"{what} takes one number or {dims}, got {value}")
    return numbers


class _Convolution(Module):
    """What convolutions and transposed ones share: arguments, parameters, representation.

    The weight has torch's shape and lies kernel first in memory: (*kernel, second dim, first dim).
    """

    dims: int
    transposed = False
    compute_dtypes = COMPUTE_DTYPES

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Lengths,
        stride: Lengths = 1,
        padding: Lengths | str = 0,
        dilation: Lengths = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        out: Layout | None = None,
        layouts: Mapping[str, Layout] | None = None,
        dtype: Any = None,
        compute_dtype: str = "float32",
    ) -> None:
        super().__init__()
        name, n = type(self).__name__, self.dims
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"{name}: {in_channels} and {out_channels} channels do not divide into {groups} groups")
        self.in_channels, self.out_channels, self.groups, self.out = in_channels, out_channels, groups, out
        self.kernel_size = per_dim(kernel_size, n, f"{name}: kernel_size")
        self.stride = per_dim(stride, n, f"{name}: stride")
        self.padding = padding if isinstance(padding, str) else per_dim(padding, n, f"{name}: padding")
        self.dilation = per_dim(dilation, n, f"{name}: dilation")
        self.padding_mode, self.compute_dtype = padding_mode, compute_dtype
        channels = (in_channels, out_channels // groups) if self.transposed else (out_channels, in_channels // groups)
        layouts = layouts or {}
        self.weight = init.parameter(
            (*channels, *self.kernel_size), init.default_weight_, layout=layouts.get("weight"), dtype=dtype,
            order=(*range(2, n + 2), 1, 0),
        )  # fmt: skip
        biased = init.default_bias(init.fans(self.weight)[0])
        self.register_parameter(
            "bias", init.parameter((out_channels,), biased, layout=layouts.get("bias"), dtype=dtype) if bias else None
        )

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        n = self.dims
        if self.padding != (0,) * n:
            text += f", padding={self.padding}"
        if self.dilation != (1,) * n:
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.bias is None:
            text += ", bias=False"
        if self.compute_dtype != "float32":
            text += f", compute_dtype={self.compute_dtype}"
        return text if self.padding_mode == "zeros" else f"{text}, padding_mode={self.padding_mode}"


class _Conv(_Convolution):
    parallel_dims = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Return the convolution of x, or of x and further channels."""
        function = getattr(F, f"conv{self.dims}d")
        return function(
            (x, *more) if more else x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups,
            padding_mode=self.padding_mode, out=self.out, compute_dtype=self.compute_dtype,
        )  # fmt: skip


class Conv1d(_Conv):
    """Convolution (cross-correlation) of (N, C, W); arguments, defaults and names as in torch.

    Parameters
    ----------
    padding : int, sequence of int or {"same", "valid"}
        Zeros (or what `padding_mode` says) at both ends of the array, wherever it is split.
    out : Layout, optional
        The layout of the result.
    layouts : mapping of str to Layout, optional
        Layouts of ``"weight"`` (out_channels, in_channels / groups, *kernel) and ``"bias"``; replicated by default.
    dtype : dtype, optional
        `nn.get_default_dtype` by default.
    compute_dtype : {"float32", "bfloat16"}
        In which float32 operands are multiplied, see `functional.conv3d`; an attribute that may be changed at any time.
    """

    dims = 1


class Conv2d(_Conv):
    """Convolution (cross-correlation) of (N, C, H, W); see `Conv1d`."""

    dims = 2


class Conv3d(_Conv):
    """Convolution (cross-correlation) of (N, C, D, H, W); see `Conv1d`."""

    dims = 3


class _ConvTranspose(_Convolution):
    transposed = True
    parallel_dims = {"column": {"weight": 1, "bias": 0}, "row": {"weight": 0}}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Lengths,
        stride: Lengths = 1,
        padding: Lengths = 0,
        output_padding: Lengths = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Lengths = 1,
        *,
        out: Layout | None = None,
        layouts: Mapping[str, Layout] | None = None,
        dtype: Any = None,
        compute_dtype: str = "float32",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, out=out, layouts=layouts,
            dtype=dtype, compute_dtype=compute_dtype,
        )  # fmt: skip
        self.output_padding = per_dim(output_padding, self.dims, f"{type(self).__name__}: output_padding")

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Return the result; `output_size` (of space) chooses among the sizes that the stride leaves open."""
        function = getattr(F, f"conv_transpose{self.dims}d")
        extra = self.output_padding if output_size is None else self._extra(x, output_size)
        return function(
            x, self.weight, self.bias, self.stride, self.padding, extra, self.groups, self.dilation, out=self.out,
            compute_dtype=self.compute_dtype,
        )  # fmt: skip

    def _extra(self, x: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        geometry = zip(x.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in geometry]
        extra = tuple(int(want) - have for want, have in zip(output_size, least, strict=True))
        if any(not 0 <= e < max(s, 1) for e, s in zip(extra, self.stride, strict=True)):
            most = [n + s - 1 for n, s in zip(least, self.stride, strict=True)]
            raise ValueError(f"{type(self).__name__}: output_size {tuple(output_size)} is outside {least} to {most}")
        return extra

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.output_padding == (0,) * self.dims else f"{text}, output_padding={self.output_padding}"


class ConvTranspose1d(_ConvTranspose):
    """The adjoint of a convolution, of (N, C, W), with weight (in_channels, out_channels / groups, *kernel)."""

    dims = 1


class ConvTranspose2d(_ConvTranspose):
    """The adjoint of a convolution, of (N, C, H, W); see `ConvTranspose1d`."""

    dims = 2


class ConvTranspose3d(_ConvTranspose):
    """The adjoint of a convolution, of (N, C, D, H, W); see `ConvTranspose1d`."""

    dims = 3
