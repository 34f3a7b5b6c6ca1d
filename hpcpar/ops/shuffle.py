"""Pixel shuffle and unshuffle: channels to positions and back, under any split of samples and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar.layout.index_maps import shuffle_map, unshuffle_map
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.spatial import Halo, check_spatial, with_batch
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


def _whole_channels(name: str, x: Signature, channels: int, r: int) -> None:
    """The blocks of a split of the channels must hold whole groups of r * r."""
    p = x.parts(1)
    many = max(x.shape[1], channels)
    if any((q * many) // p != (q * (many // (r * r))) // p * r * r for q in range(p)):
        raise LayoutError(
            f"{name} of {x!r}: the blocks of the channels cut groups of {r * r}; repartition to "
            f"{x.layout.replace(1, None)!r} first"
        )


class PixelShuffle(Op):
    """(N, C r r, H, W) to (N, C, r H, r W)."""

    name = "pixel_shuffle"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], r: int) -> Rule:
        x = sigs[0].resolved
        n, c, h, w = x.shape
        _whole_channels(self.name, x, c, r)
        out = signature(x.mesh, (n, c // (r * r), h * r, w * r), Layout(*x.dims))
        halo = Halo(x, out.shape[2:], [shuffle_map] * 2, [(r,)] * 2)
        cuts = tuple(slice(a % r, a % r + b - a) for a, b in out.box[2:])
        return Rule(out, [x], [x], sigs, (halo, cuts, r))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        halo, cuts, r = rule.plan
        return to_positions(halo(arrays[0]), r)[(..., *cuts)], None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        halo, cuts, r = rule.plan
        n, c = g.shape[:2]
        h, w = (plan.size * r for plan in halo.plans)
        full = np.zeros_like(g, shape=(n, c, h, w), order="C")
        full[(..., *cuts)] = g
        return (halo.adjoint(to_channels(full, r)),)


class PixelUnshuffle(Op):
    """(N, C, r H, r W) to (N, C r r, H, W)."""

    name = "pixel_unshuffle"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], r: int) -> Rule:
        x = sigs[0].resolved
        n, c, h, w = x.shape
        _whole_channels(self.name, x, c * r * r, r)
        out = signature(x.mesh, (n, c * r * r, h // r, w // r), Layout(*x.dims))
        return Rule(out, [x], [x], sigs, (Halo(x, out.shape[2:], [unshuffle_map] * 2, [(r,)] * 2), r))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        halo, r = rule.plan
        return to_channels(halo(arrays[0]), r), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        halo, r = rule.plan
        return (halo.adjoint(to_positions(g, r)),)


def to_positions(x: Any, r: int) -> Any:
    """(N, C r r, H, W) to (N, C, r H, r W) on one rank, channels last."""
    n, c, h, w = x.shape
    parts = x.transpose(0, 2, 3, 1).reshape(n, h, w, c // (r * r), r, r)
    return parts.transpose(0, 1, 4, 2, 5, 3).reshape(n, h * r, w * r, c // (r * r)).transpose(0, 3, 1, 2)


def to_channels(x: Any, r: int) -> Any:
    """(N, C, r H, r W) to (N, C r r, H, W) on one rank, channels last."""
    n, c, h, w = x.shape
    parts = x.transpose(0, 2, 3, 1).reshape(n, h // r, r, w // r, r, c)
    return parts.transpose(0, 1, 3, 5, 2, 4).reshape(n, h // r, w // r, c * r * r).transpose(0, 3, 1, 2)


_shuffle, _unshuffle = PixelShuffle(), PixelUnshuffle()


def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """Return x (N, C r r, H, W), or without N, as (N, C, r H, r W) (Shi et al. 2016).

    Samples and positions may be split in any way; a split of the channels must leave groups of r r whole, else a
    LayoutError says so.
    """
    r = upscale_factor

    def shuffle(x: Tensor) -> Tensor:
        check_spatial("pixel_shuffle", x, 2)
        if r < 1 or x.shape[1] % (r * r):
            raise ValueError(f"pixel_shuffle: {x.shape[1]} channels do not divide into groups of {r} * {r}")
        return _shuffle((x,), (r,))

    return with_batch(2, x, shuffle)


def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """Return x (N, C, r H, r W), or without N, as (N, C r r, H, W): the inverse of `pixel_shuffle`."""
    r = downscale_factor

    def unshuffle(x: Tensor) -> Tensor:
        check_spatial("pixel_unshuffle", x, 2)
        if r < 1 or x.shape[2] % r or x.shape[3] % r:
            raise ValueError(f"pixel_unshuffle: positions {x.shape[2:]} do not divide by {r}")
        return _unshuffle((x,), (r,))

    return with_batch(2, x, unshuffle)
