"""Pooling and resampling modules of 1 to 3 spatial dims; names, arguments and defaults as in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcpar import functional as F
from hpcpar.nn.conv import Lengths
from hpcpar.nn.module import Module
from hpcpar.tensors import Tensor


class _Pool(Module):
    """What maxima and means over windows share: where the windows lie."""

    dims: int

    def __init__(self, kernel_size: Lengths, stride: Lengths | None, padding: Lengths, ceil_mode: bool) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode = padding, ceil_mode

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class _MaxPool(_Pool):
    def __init__(
        self,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        padding: Lengths = 0,
        dilation: Lengths = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.dilation, self.return_indices = dilation, return_indices

    def forward(self, x: Tensor) -> Any:
        function = getattr(F, f"max_pool{self.dims}d")
        return function(
            x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dilation={self.dilation}, ceil_mode={self.ceil_mode}"


class MaxPool1d(_MaxPool):
    """Maximum over windows of (N, C, W); `stride` is `kernel_size` by default."""

    dims = 1


class MaxPool2d(_MaxPool):
    """Maximum over windows of (N, C, H, W); see `MaxPool1d`."""

    dims = 2


class MaxPool3d(_MaxPool):
    """Maximum over windows of (N, C, D, H, W); see `MaxPool1d`."""

    dims = 3


class _AvgPool(_Pool):
    def __init__(
        self,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        padding: Lengths = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        negative_slope: float | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad, self.negative_slope = count_include_pad, negative_slope

    def forward(self, x: Tensor) -> Tensor:
        function = getattr(F, f"avg_pool{self.dims}d")
        return function(
            x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad,
            negative_slope=self.negative_slope,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.negative_slope is None else f"{text}, negative_slope={self.negative_slope}"


class AvgPool1d(_AvgPool):
    """Mean over windows of (N, C, W); `stride` is `kernel_size` by default.

    With a `negative_slope`, means are of leaky ReLU of the input, which is taken in the same pass over memory.
    """

    dims = 1


class AvgPool2d(_AvgPool):
    """Mean over windows of (N, C, H, W); see `AvgPool1d`."""

    dims = 2


class AvgPool3d(_AvgPool):
    """Mean over windows of (N, C, D, H, W); see `AvgPool1d`."""

    dims = 3


class _AdaptiveAvgPool(Module):
    dims: int

    def __init__(self, output_size: int | Sequence[int | None]) -> None:
        super().__init__()
        self.output_size = output_size if isinstance(output_size, int) else tuple(output_size)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, f"adaptive_avg_pool{self.dims}d")(x, self.output_size)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Mean over windows of (N, C, W), as many as `output_size` says and placed as in torch."""

    dims = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Mean over windows of (N, C, H, W); see `AdaptiveAvgPool1d`."""

    dims = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """Mean over windows of (N, C, D, H, W); see `AdaptiveAvgPool1d`."""

    dims = 3


class Upsample(Module):
    """Resample space to `size`, or by `scale_factor`; modes and corner rules as in torch."""

    def __init__(
        self,
        size: Lengths | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
    ) -> None:
        super().__init__()
        if (size is None) == (scale_factor is None):
            raise ValueError(f"Upsample takes either a size or a scale_factor, got {size} and {scale_factor}")
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)

    def extra_repr(self) -> str:
        how = f"size={self.size}" if self.scale_factor is None else f"scale_factor={self.scale_factor}"
        return f"{how}, mode={self.mode!r}"
