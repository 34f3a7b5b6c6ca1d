"""Augmentations that do not know the partition: functions of (seed, sample, epoch) and of global indices.

Every factor a voxel is multiplied with is computed from its global coordinates by the same operations in the same
order, one element at a time, so the blocks of any partition agree bit for bit with the whole volume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpcpar.data.orientation import Box, Orientation
from hpcpar.data.streams import stream, uniform
from hpcpar.kernels import random_normal

__all__ = ["BiasField", "Flip", "Gamma", "Key", "Noise", "ScaleShift", "SwapDims", "Transform", "make_transforms"]


class Key(NamedTuple):
    """What a draw depends on, besides the seed of the transform."""

    sample: int
    epoch: int


@dataclass(frozen=True)
class Transform:
    """One augmentation. Subclasses override `orientation`, which concerns the input and a spatial target alike, or
    `intensity`, which concerns the input only.
    """

    def orientation(self, key: Key, shape: tuple[int, ...]) -> Orientation:
        """How the sample is turned; `shape` is the global spatial shape."""
        return Orientation.identity(len(shape))

    def intensity(self, block: np.ndarray, key: Key, shape: tuple[int, ...], box: Box) -> None:
        """Change block `box` (one (start, stop) per dim) of a sample of global shape (C, *spatial) in place."""

    def draw(self, key: Key, count: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """`count` uniform numbers in [low, high) of this transform for one sample in one epoch, float64."""
        numbers = uniform(self.seed, stream(type(self).__name__, *key), count)
        return low + (high - low) * numbers


@dataclass(frozen=True)
class Flip(Transform):
    """Mirror each of the given spatial dims with a probability. A rank reads the mirrored hyperslab: no message.

    Parameters
    ----------
    dims : sequence of int
        Spatial dims, 0 = depth; negative ones count from the last.
    probability : float
        For each dim by itself.
    seed : int
    """

    dims: Sequence[int] = (-1,)
    probability: float = 0.5
    seed: int = 0

    def orientation(self, key: Key, shape: tuple[int, ...]) -> Orientation:
        spatial = len(shape)
        draws = self.draw(key, spatial)
        chosen = {spatial_dim(dim, spatial) for dim in self.dims}
        flips = tuple(bool(d in chosen and draws[d] < self.probability) for d in range(spatial))
        return Orientation(tuple(range(spatial)), flips)


@dataclass(frozen=True)
class SwapDims(Transform):
    """Exchange spatial dims at random, all orders equally likely: for cubes without a preferred direction (universes).

    Raises
    ------
    ValueError
        If the extents differ.
    """

    seed: int = 0

    def orientation(self, key: Key, shape: tuple[int, ...]) -> Orientation:
        if len(set(shape)) > 1:
            raise ValueError(f"SwapDims exchanges dims of equal extent, this sample is {shape}")
        order = np.argsort(self.draw(key, len(shape)), kind="stable")
        return Orientation(tuple(int(d) for d in order), (False,) * len(shape))


@dataclass(frozen=True)
class Log1p(Transform):
    """``log(1 + x)``: counts of matter, whose tail is long, in a range that a network can learn from. Not random."""

    def intensity(self, block: np.ndarray, key: Key, shape: tuple[int, ...], box: Box) -> None:
        np.log1p(block, out=block)


@dataclass(frozen=True)
class ScaleShift(Transform):
    """``x * a + b`` with a in [1 - scale, 1 + scale) and b in [-shift, shift), one pair for the whole sample."""

    scale: float = 0.1
    shift: float = 0.1
    seed: int = 0

    def intensity(self, block: np.ndarray, key: Key, shape: tuple[int, ...], box: Box) -> None:
        a, b = self.draw(key, 2, -1.0, 1.0)
        block *= block.dtype.type(1.0 + self.scale * a)
        block += block.dtype.type(self.shift * b)


@dataclass(frozen=True)
class Gamma(Transform):
    """``x ** g`` with log g uniform in [-log(1 + strength), log(1 + strength)), for intensities scaled to [0, 1].

    Negative values, which earlier transforms may have made, keep their sign: ``sign(x) * abs(x) ** g``.
    """

    strength: float = 0.3
    seed: int = 0

    def intensity(self, block: np.ndarray, key: Key, shape: tuple[int, ...], box: Box) -> None:
        gamma = (1.0 + self.strength) ** self.draw(key, 1, -1.0, 1.0)[0]
        magnitude = np.abs(block)
        np.power(magnitude, block.dtype.type(gamma), out=magnitude)
        np.copysign(magnitude, block, out=block)


@dataclass(frozen=True)
class BiasField(Transform):
    """Multiply by ``1 + strength * p``, where p is a smooth field of low-order cosines over the whole volume, |p| <= 1.

    This is the slowly varying gain of a magnetic resonance coil. ``p = sum_m a_m prod_d cos(pi m_d (i_d + 1/2) / n_d)``
    over all m with orders 0 to `order`, m = 0 left out, with a drawn uniformly and scaled to sum of magnitudes 1. A
    flat field along empty dims is as valid as any.

    Parameters
    ----------
    strength : float
        In [0, 1): keeps the factor positive.
    order : int
        Highest order per dim.
    """

    strength: float = 0.3
    order: int = 2
    seed: int = 0

    def intensity(self, block: np.ndarray, key: Key, shape: tuple[int, ...], box: Box) -> None:
        spatial = len(shape) - 1
        coefficients = self.draw(key, (self.order + 1) ** spatial, -1.0, 1.0)
        coefficients[0] = 0.0
        coefficients *= self.strength / max(np.abs(coefficients).sum(), np.finfo(np.float64).tiny)
        coefficients = coefficients.reshape([self.order + 1] * spatial)
        cosines = [cosine_modes(n, self.order)[:, a:b] for n, (a, b) in zip(shape[1:], box[1:], strict=True)]
        block *= (1.0 + separable_sum(coefficients, cosines)).astype(block.dtype)


@dataclass(frozen=True)
class Noise(Transform):
    """Add Gaussian noise, keyed by the global index of each voxel and channel.

    Parameters
    ----------
    sigma : float
        Largest standard deviation; each sample draws its own in [0, sigma).
    """

    sigma: float = 0.05
    seed: int = 0

    def intensity(self, block: np.ndarray, key: Key, shape: tuple[int, ...], box: Box) -> None:
        sigma = self.draw(key, 1, 0.0, self.sigma)[0]
        noise = random_normal(self.seed, stream("noise field", *key), (1, *shape), ((0, 1), *box), block.dtype)[0]
        noise *= block.dtype.type(sigma)
        block += noise


def make_transforms(
    flip: Sequence[int] = (),
    swap: bool = False,
    scale: float = 0.0,
    shift: float = 0.0,
    gamma: float = 0.0,
    bias: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Transform]:
    """The transforms that such numbers in a configuration ask for, in the order turn, gamma, bias, scale, shift, noise.

    Parameters
    ----------
    flip : sequence of int
        Spatial dims mirrored with probability 1/2.
    swap : bool
        Whether to exchange spatial dims.
    scale, shift, gamma, bias, noise : float
        Strengths, as in `ScaleShift`, `Gamma`, `BiasField` and `Noise`; 0 leaves a transform out.
    """
    chosen = [
        (bool(flip), Flip(tuple(flip), seed=seed)),
        (swap, SwapDims(seed=seed)),
        (gamma != 0, Gamma(gamma, seed=seed)),
        (bias != 0, BiasField(bias, seed=seed)),
        (scale != 0 or shift != 0, ScaleShift(scale, shift, seed=seed)),
        (noise != 0, Noise(noise, seed=seed)),
    ]
    return [transform for wanted, transform in chosen if wanted]


def spatial_dim(dim: int, spatial: int) -> int:
    """A dim counted from the front; raises ValueError for one that a sample does not have."""
    if not -spatial <= dim < spatial:
        raise ValueError(f"spatial dim {dim} of a sample with {spatial} spatial dims")
    return dim % spatial


def cosine_modes(n: int, order: int) -> np.ndarray:
    """Cosines of orders 0 to `order` at the n cell centres of one dim, shape (order + 1, n), float64."""
    return np.cos(np.pi / n * np.outer(np.arange(order + 1), np.arange(n) + 0.5))


def separable_sum(coefficients: np.ndarray, modes: list[np.ndarray]) -> np.ndarray:
    """``sum over m of coefficients[m] * prod_d modes[d][m_d]`` on the grid of the modes' points.

    Summed one term after the other in a fixed order (no matrix product), so the bits at a point do not depend on
    which other points are computed.
    """
    if not modes:
        return coefficients
    total = 0.0
    column = (slice(None),) + (None,) * (len(modes) - 1)
    for coefficient, mode in zip(coefficients, modes[0], strict=True):
        total = total + mode[column] * np.asarray(separable_sum(coefficient, modes[1:]))[None]
    return total
