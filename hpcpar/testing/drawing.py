"""What the random draws of operations share: small integers, shapes, optional arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcpar.testing.cases import Array

Drawn = tuple[str, list[Array], dict[str, Any]]
Rng = np.random.Generator


class Family(NamedTuple):
    """How to draw the cases of some operations, how often, and how operands lie.

    Attributes
    ----------
    follow : str or callable
        What further operands are to the first, which lies anyhow: "weight", "same" or "voxels". Or a function of
        (generator, operands, arguments, mesh) that lays out all of them, and may add arguments.
    """

    draw: Callable[[Rng], Drawn]
    weight: float = 1.0
    follow: str | Callable[[Rng, list[Array], dict[str, Any], dict[str, int]], None] = "weight"


def lengths(rng: Rng, ndim: int, low: int, high: int) -> tuple[int, ...]:
    """Return `ndim` integers of ``[low, high)``."""
    return tuple(int(v) for v in rng.integers(low, high, ndim))


def spatial_shape(rng: Rng, ndim: int, most: int | None = None) -> tuple[int, ...]:
    """Return (N, C, *spatial), smaller with more dims; now and then without samples."""
    most = most or {1: 24, 2: 11, 3: 8}[ndim]
    samples = 0 if rng.random() < 0.02 else int(rng.integers(1, 4))
    return (samples, int(rng.integers(1, 5)), *lengths(rng, ndim, 1, most + 1))


def some(rng: Rng, arguments: dict[str, Any], share: float = 0.75) -> dict[str, Any]:
    """Return a random part of optional arguments."""
    return {name: value for name, value in arguments.items() if rng.random() < share}


def one_or_all(rng: Rng, values: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return the values, or sometimes the first as an integer for all dims."""
    return values[0] if rng.random() < 0.2 else values
