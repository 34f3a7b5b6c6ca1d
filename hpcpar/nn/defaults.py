"""The dtype that parameters have unless they are told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_dtype = np.dtype(np.float32)


def get_default_dtype() -> np.dtype:
    """Return the dtype of new parameters and buffers, float32 at first."""
    return _dtype


def set_default_dtype(dtype: Any) -> None:
    """Set the dtype of new parameters and buffers: a floating one.

    Raises
    ------
    TypeError
        It is not a floating one.
    """
    global _dtype
    new = np.dtype(dtype)
    if new.kind != "f":
        raise TypeError(f"parameters have a floating dtype, got {new}")
    _dtype = new


@contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Set the dtype of parameters and buffers made inside the block."""
    before = _dtype
    set_default_dtype(dtype)
    try:
        yield
    finally:
        set_default_dtype(before)
