"""Modules of the rarer spatial operations: pads, adaptive maxima, norms over windows, unpooling, shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcpar import functional as F
from hpcpar.nn.conv import Lengths
from hpcpar.nn.module import Module
from hpcpar.nn.norm import _Affine
from hpcpar.ops.spatial import per_dim
from hpcpar.tensors import Tensor


class _Pad(Module):
    dims: int
    mode: str

    def __init__(self, padding: Lengths) -> None:
        super().__init__()
        self.padding = per_dim(type(self).__name__, "padding", padding, 2 * self.dims)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding, self.mode)

    def extra_repr(self) -> str:
        return str(self.padding)


class _ConstantPad(_Pad):
    mode = "constant"

    def __init__(self, padding: Lengths, value: float) -> None:
        super().__init__(padding)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding, self.mode, self.value)

    def extra_repr(self) -> str:
        return f"padding={self.padding}, value={self.value}"


class _ZeroPad(_Pad):
    mode = "constant"


class _ReflectionPad(_Pad):
    mode = "reflect"


class _ReplicationPad(_Pad):
    mode = "replicate"


class _CircularPad(_Pad):
    mode = "circular"


class _AdaptiveMaxPool(Module):
    dims: int

    def __init__(self, output_size: int | Sequence[int | None], return_indices: bool = False) -> None:
        super().__init__()
        self.output_size = output_size if isinstance(output_size, int) else tuple(output_size)
        self.return_indices = return_indices

    def forward(self, x: Tensor) -> Any:
        return getattr(F, f"adaptive_max_pool{self.dims}d")(x, self.output_size, self.return_indices)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class _LPPool(Module):
    dims: int

    def __init__(
        self, norm_type: float, kernel_size: Lengths, stride: Lengths | None = None, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.norm_type, self.kernel_size, self.stride, self.ceil_mode = norm_type, kernel_size, stride, ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        function = getattr(F, f"lp_pool{self.dims}d")
        return function(x, self.norm_type, self.kernel_size, self.stride, self.ceil_mode)

    def extra_repr(self) -> str:
        return (
            f"norm_type={self.norm_type}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"ceil_mode={self.ceil_mode}"
        )


class _MaxUnpool(Module):
    dims: int

    def __init__(self, kernel_size: Lengths, stride: Lengths | None = None, padding: Lengths = 0) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding = padding

    def forward(self, x: Tensor, indices: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        function = getattr(F, f"max_unpool{self.dims}d")
        return function(x, indices, self.kernel_size, self.stride, self.padding, output_size)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


def _of_dims(base: type, ndim: int, does: str) -> type:
    """The module for `ndim` spatial dims of a base class."""
    shape = ("(N, C, W)", "(N, C, H, W)", "(N, C, D, H, W)")[ndim - 1]
    name = f"{base.__name__[1:]}{ndim}d"
    more = {"dims": ndim, "__doc__": f"{does} of {shape}; arguments as in torch.", "__module__": __name__}
    return type(name, (base,), more)


_PAD = "Pads all spatial dims, at the ends of the whole array,"
ConstantPad1d, ConstantPad2d, ConstantPad3d = (_of_dims(_ConstantPad, n, f"{_PAD} with a value;") for n in (1, 2, 3))
ZeroPad1d, ZeroPad2d, ZeroPad3d = (_of_dims(_ZeroPad, n, f"{_PAD} with zeros;") for n in (1, 2, 3))
ReflectionPad1d, ReflectionPad2d, ReflectionPad3d = (
    _of_dims(_ReflectionPad, n, f"{_PAD} by reflection;") for n in (1, 2, 3)
)
ReplicationPad1d, ReplicationPad2d, ReplicationPad3d = (
    _of_dims(_ReplicationPad, n, f"{_PAD} by the elements at the ends;") for n in (1, 2, 3)
)
CircularPad1d, CircularPad2d, CircularPad3d = (
    _of_dims(_CircularPad, n, f"{_PAD} by wrapping around;") for n in (1, 2, 3)
)
AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d = (
    _of_dims(_AdaptiveMaxPool, n, "Maxima over as many windows as give `output_size`,") for n in (1, 2, 3)
)
LPPool1d, LPPool2d, LPPool3d = (_of_dims(_LPPool, n, "Norms over windows") for n in (1, 2, 3))
MaxUnpool1d, MaxUnpool2d, MaxUnpool3d = (
    _of_dims(_MaxUnpool, n, "Values back to where the maxima of a max pooling stood,") for n in (1, 2, 3)
)


class PixelShuffle(Module):
    """(N, C r r, H, W) to (N, C, r H, r W); see `hpcpar.functional.pixel_shuffle`."""

    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.upscale_factor = upscale_factor

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, self.upscale_factor)

    def extra_repr(self) -> str:
        return f"upscale_factor={self.upscale_factor}"


class PixelUnshuffle(Module):
    """(N, C, r H, r W) to (N, C r r, H, W): the inverse of `PixelShuffle`."""

    def __init__(self, downscale_factor: int) -> None:
        super().__init__()
        self.downscale_factor = downscale_factor

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, self.downscale_factor)

    def extra_repr(self) -> str:
        return f"downscale_factor={self.downscale_factor}"


class LocalResponseNorm(Module):
    """Normalisation over neighbouring channels (Krizhevsky et al. 2012); arguments as in torch."""

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def forward(self, x: Tensor) -> Tensor:
        return F.local_response_norm(x, self.size, self.alpha, self.beta, self.k)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


class RMSNorm(_Affine):
    """Division by the root mean square over the last dims (Zhang and Sennrich 2019); arguments as in torch."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self._make_affine(shape, elementwise_affine, False, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
