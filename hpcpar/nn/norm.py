"""Normalisation modules; statistics span the ranks as the layout of the input, and the scope, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar import creation
from hpcpar import functional as F
from hpcpar.autograd import recomputing
from hpcpar.nn import init
from hpcpar.nn.defaults import get_default_dtype
from hpcpar.nn.module import Module
from hpcpar.tensors import Tensor


class _Affine(Module):
    """A module with an elementwise weight of ones and bias of zeros, or neither."""

    def _make_affine(self, shape: Sequence[int], weight: bool, bias: bool, dtype: Any) -> None:
        self.register_parameter("weight", init.parameter(shape, init.ones_, dtype=dtype) if weight else None)
        self.register_parameter("bias", init.parameter(shape, init.zeros_, dtype=dtype) if bias else None)


class _BatchNorm(_Affine):
    dims: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        scope: str = "all",
        negative_slope: float | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self.track_running_stats, self.scope, self.negative_slope = track_running_stats, scope, negative_slope
        self._make_affine((num_features,), affine, affine, dtype)
        tracked = track_running_stats
        dtype = dtype or get_default_dtype()
        self.register_buffer("running_mean", creation.zeros((num_features,), dtype=dtype) if tracked else None)
        self.register_buffer("running_var", creation.ones((num_features,), dtype=dtype) if tracked else None)
        self.register_buffer("num_batches_tracked", creation.zeros((), dtype=np.int64) if tracked else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in self.dims:
            raise ValueError(f"{type(self).__name__} takes {' or '.join(map(str, self.dims))} dims, got {x.shape}")
        if x.shape[1] != self.num_features:
            raise ValueError(f"{type(self).__name__} of {self.num_features} channels, got shape {x.shape}")
        momentum = self.momentum
        if self.training and self.track_running_stats:
            if not recomputing():
                self.num_batches_tracked.shard[...] += 1
            if momentum is None:  # the plain mean over all batches so far
                momentum = 1.0 / int(self.num_batches_tracked)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, momentum, self.eps,
            scope=self.scope, negative_slope=self.negative_slope,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, scope={self.scope!r}"
        )
        return text if self.negative_slope is None else f"{text}, negative_slope={self.negative_slope}"


class BatchNorm1d(_BatchNorm):
    """Batch normalisation of (N, C) or (N, C, W) (Ioffe and Szegedy 2015); arguments, defaults and names as in torch.

    Parameters
    ----------
    momentum : float or None
        Weight of a batch in the running statistics; None for the mean over all batches.
    scope : {"all", "sample", "rank"}
        Over which ranks statistics are taken in training: all of them; those that hold parts of the same samples; this
        one alone (the result then depends on the partition). Running statistics are those of all ranks in any case.
    negative_slope : float, optional
        Apply leaky ReLU with this slope (0 for ReLU) behind, in the same pass over memory.
    dtype : dtype, optional
        `nn.get_default_dtype` by default.
    """

    dims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalisation of (N, C, H, W); see `BatchNorm1d`."""

    dims = (4,)


class BatchNorm3d(_BatchNorm):
    """Batch normalisation of (N, C, D, H, W); see `BatchNorm1d`."""

    dims = (5,)


class GroupNorm(_Affine):
    """Normalisation of groups of channels of each sample (Wu and He 2018); arguments as in torch."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        negative_slope: float | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"GroupNorm: {num_channels} channels do not divide into {num_groups} groups")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.negative_slope = negative_slope
        self._make_affine((num_channels,), affine, affine, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, negative_slope=self.negative_slope)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class _InstanceNorm(_Affine):
    dims: int

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = False,
        *,
        negative_slope: float | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.affine, self.negative_slope = num_features, eps, affine, negative_slope
        self._make_affine((num_features,), affine, affine, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != self.dims or x.shape[1] != self.num_features:
            raise ValueError(f"{type(self).__name__}({self.num_features}) takes {self.dims} dims, got shape {x.shape}")
        return F.instance_norm(x, self.weight, self.bias, self.eps, negative_slope=self.negative_slope)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


class InstanceNorm1d(_InstanceNorm):
    """Normalisation of each channel of each sample (Ulyanov et al. 2016), of (N, C, W); no running statistics."""

    dims = 3


class InstanceNorm2d(_InstanceNorm):
    """Normalisation of each channel of each sample, of (N, C, H, W); see `InstanceNorm1d`."""

    dims = 4


class InstanceNorm3d(_InstanceNorm):
    """Normalisation of each channel of each sample, of (N, C, D, H, W); see `InstanceNorm1d`."""

    dims = 5


class LayerNorm(_Affine):
    """Normalisation over the last dims (Ba, Kiros and Hinton 2016), split or not; arguments as in torch."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self._make_affine(shape, elementwise_affine, elementwise_affine and bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
