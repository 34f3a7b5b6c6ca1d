"""Sums with the scale of their terms, when two of them are equal up to rounding, and the error where they are not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class CheckError(AssertionError):
    """Something is not what it claims; raised on all ranks that took part, with the same text."""

    everywhere = True


class Value(NamedTuple):
    """A sum, and the root of the sum of its squared terms: what rounding is compared with."""

    value: float
    scale: float


def epsilon(*dtypes: Any) -> float:
    """Return the spacing of numbers at 1 in the coarsest of the dtypes; that of float64 where none is floating."""
    found = [2.0**-7 if np.dtype(d).kind == "V" else np.finfo(d).eps for d in dtypes if np.dtype(d).kind in "fV"]
    return float(max(found, default=np.finfo(np.float64).eps))


def tolerance(*dtypes: Any) -> float:
    """Return the relative difference that rounding may make: between 4e-10 (float64) and 2e-2 (half precision)."""
    return epsilon(*dtypes) ** 0.6


def agree(first: Value, second: Value, within: float, floor: float = 0.0) -> bool:
    """Whether two values are equal up to `within` of their scale or `floor`; what is not finite cannot be judged."""
    if not all(np.isfinite([*first, *second])):
        return True
    return abs(first.value - second.value) <= max(within * max(first.scale, second.scale), floor)
