"""Arrays without storage as a module like NumPy or CuPy, for dry runs: `kernels.array_module` returns it for outlines.

`rules` holds what each kernel returns. Creation functions make outlines; whatever else is asked for is NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import rules
from .arrays import Outline, empty, empty_as, over
from .functions import ascontiguousarray, concatenate, empty_like, full_like, stack, where
from .ledger import Ledger, keeping

__all__ = [
    "Ledger", "Outline", "arange", "array", "asarray", "ascontiguousarray", "concatenate", "empty", "empty_as",
    "empty_like", "full", "full_like", "keeping", "ones", "ones_like", "over", "rules", "stack", "where", "zeros",
    "zeros_like",
]  # fmt: skip

zeros = ones = empty
zeros_like = ones_like = empty_like


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Outline:
    """Return an outline of that shape."""
    return empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype)


def asarray(a: Any, dtype: Any = None, order: Any = None) -> Any:
    """Return `a`, an outline in another dtype where one is asked for, or what NumPy makes of anything else."""
    if isinstance(a, Outline):
        return a if dtype is None else a.astype(dtype, copy=False)
    return np.asarray(a, dtype)


array = asarray


def arange(*args: Any, dtype: Any = None) -> Any:
    """Return NumPy's range: short, one dim."""
    return np.arange(*args, dtype=dtype)


def __getattr__(name: str) -> Any:
    return getattr(np, name)
