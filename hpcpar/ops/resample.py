"""Interpolation to other lengths, in all modes of torch, under any split.

Each output is a weighted sum of a few inputs along each dim, so the operation is a product of one-dimensional ones.
A rank fetches the hull of the inputs that its own outputs use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.maps import interval_map
from hpcpar.layout.resample_maps import resampled_size, taps, taps_map
from hpcpar.ops.adaptive import adaptive_avg_pool
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.pool import pooled
from hpcpar.ops.spatial import Halo, per_dim
from hpcpar.tensors import Tensor

MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
    "area": (1, 2, 3),
}
"""Modes, and for how many spatial dims."""

_BASE = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


class Interpolate(Op):
    """Weighted taps along each dim."""

    name = "interpolate"
    linear = "each"

    def rule(
        self, sigs: tuple[Any, ...], sizes: tuple[int, ...], mode: str, align: bool, scales: tuple[float | None, ...]
    ) -> Rule:
        x = sigs[0].resolved
        out = pooled(x, sizes)
        free = mode in ("nearest", "linear")
        same = [n == m and (free or s is None) for n, m, s in zip(x.shape[2:], sizes, scales, strict=True)]
        arguments = [() if keep else (m, mode, align, s) for keep, m, s in zip(same, sizes, scales, strict=True)]
        halo = Halo(x, sizes, [interval_map if keep else taps_map for keep in same], arguments)
        rows = []
        for d, keep in enumerate(same):
            n, block = x.shape[d + 2], out.box[d + 2]
            begin = 0 if keep else taps_map(n, *block, *arguments[d]).start
            rows.append(None if keep else Rows(*taps(n, *block, *arguments[d]), begin, halo.plans[d].size))
        return Rule(out, [x], [x], sigs, (halo, rows))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        halo, rows = rule.plan
        y = halo(arrays[0])
        for d, row in enumerate(rows):
            if row is not None:
                y = kernels.tap_sums(y, d + 2, row.index, row.weight)
        return y, None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        halo, rows = rule.plan
        for d, row in reversed(list(enumerate(rows))):
            if row is not None:
                g = kernels.tap_sums(g, d + 2, row.back_index, row.back_weight)
        return (halo.adjoint(g),)


class Rows:
    """The taps of one dim by position in the buffer, and those of the adjoint.

    Attributes
    ----------
    index, weight : ndarray (outputs, taps); weight is None where all are 1
    back_index, back_weight : ndarray (buffer, most outputs that use one position)
        Which outputs use a position, and with what weight; 0 where fewer do.
    """

    __slots__ = ("back_index", "back_weight", "index", "weight")

    def __init__(self, index: np.ndarray, weight: np.ndarray, begin: int, size: int) -> None:
        self.index = index - begin
        self.weight = None if (weight == 1).all() else weight
        outputs = np.broadcast_to(np.arange(len(index))[:, None], index.shape).ravel()
        used = self.index.ravel()
        order = np.argsort(used, kind="stable")
        counts = np.bincount(used, minlength=size)
        most = int(counts.max(initial=0))
        place = np.arange(used.size) - np.repeat(np.cumsum(counts) - counts, counts)
        self.back_index = np.zeros((size, most), np.int64)
        self.back_index[used[order], place] = outputs[order]
        back = np.zeros((size, most))
        back[used[order], place] = weight.ravel()[order]
        self.back_weight = None if (back == 1).all() else back


_interpolate = Interpolate()


def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Return x resampled to other spatial lengths.

    Parameters
    ----------
    x : Tensor
        (N, C, *spatial); any dims split, blocks may be empty.
    size : int or sequence of int, optional
        Spatial lengths of the result.
    scale_factor : float or sequence of float, optional
        In place of `size`: lengths are rounded down, and positions follow from the factor, or from the lengths where
        `recompute_scale_factor` is set.
    mode : {"nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic", "area"}
    align_corners : bool, optional
        Of the linear and cubic modes: the centres of the corner elements coincide.

    Notes
    -----
    Where torch contradicts itself one rule is taken: the nearest modes find positions in float32 for all dtypes; with
    equal lengths nearest and the linear modes are the identity. Cubic convolution after Keys (IEEE ASSP 29, 1981) with
    a = -0.75. Antialiasing is not offered.
    """
    ndim = x.ndim - 2
    if mode not in MODES or ndim not in MODES[mode]:
        known = [m for m, dims in MODES.items() if ndim in dims]
        raise ValueError(f"interpolate: x of shape {x.shape} takes a mode of {', '.join(known)}, got {mode!r}")
    if align_corners is not None and (mode.startswith("nearest") or mode == "area"):
        raise ValueError(f"interpolate: align_corners has no meaning for mode {mode!r}")
    sizes, scales = _lengths(x, ndim, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return adaptive_avg_pool(ndim, x, sizes)
    return _interpolate((x,), (sizes, _BASE.get(mode, mode), bool(align_corners), scales))


def _lengths(
    x: Tensor, ndim: int, size: Any, scale_factor: Any, recompute: bool | None
) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    if (size is None) == (scale_factor is None):
        raise ValueError(f"interpolate takes either a size or a scale_factor, got {size} and {scale_factor}")
    if size is not None:
        if recompute:
            raise ValueError("interpolate: recompute_scale_factor is for scale_factor, not for size")
        sizes: tuple[int, ...] = per_dim("interpolate", "size", size, ndim)
        scales: tuple[float | None, ...] = (None,) * ndim
    else:
        factors = (scale_factor,) * ndim if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
        if len(factors) != ndim:
            raise ValueError(f"interpolate: scale_factor is a number or {ndim} of them, got {scale_factor!r}")
        factors = tuple(float(f) for f in factors)
        sizes = tuple(resampled_size(n, f) for n, f in zip(x.shape[2:], factors, strict=True))
        scales = (None,) * ndim if recompute else factors
    if min(sizes) < 1 or min(x.shape[2:]) < 1:
        raise ValueError(f"interpolate: lengths are at least 1, got {x.shape[2:]} to {sizes}")
    return sizes, scales


def upsample(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """Return x resampled; the older name of `interpolate`."""
    return interpolate(x, size, scale_factor, mode, align_corners)
