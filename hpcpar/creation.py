"""Tensors filled with a number or a range; no message."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.signature import signature
from hpcpar.tensors import Tensor, check_dtype


def full(
    shape: tuple[int, ...],
    fill_value: float,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = np.float32,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of global `shape` filled with one number; each rank makes its own block."""
    check_dtype(np.dtype(dtype), requires_grad)
    sig = signature(mesh or current_mesh(), global_shape((shape,)), layout or Layout()).resolved
    return Tensor(np.full(sig.local_shape, fill_value, dtype), sig, requires_grad)


def zeros(*shape: int, **options: Any) -> Tensor:
    """Return zeros of global `shape`, given as one tuple or as numbers; options as in `full`."""
    return full(global_shape(shape), 0, **options)


def ones(*shape: int, **options: Any) -> Tensor:
    """Return ones of global `shape`, given as one tuple or as numbers; options as in `full`."""
    return full(global_shape(shape), 1, **options)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return the numbers from `start` on, below `end`, in steps of `step`; each rank makes its own block.

    With one number it is the end, and the start is 0. Whole numbers are int64 by default, others float32.
    """
    start, end = (0, start) if end is None else (start, end)
    if step == 0 or (end - start) / step < 0:
        raise ValueError(f"arange: no steps of {step} lead from {start} to {end}")
    whole = all(isinstance(number, int | np.integer) for number in (start, end, step))
    dtype = np.dtype(dtype or (np.int64 if whole else np.float32))
    check_dtype(dtype, requires_grad)
    length = -(-(end - start) // step) if whole else ceil((end - start) / step)
    sig = signature(mesh or current_mesh(), (int(length),), layout or Layout()).resolved
    return Tensor((start + np.arange(*sig.box[0]) * step).astype(dtype), sig, requires_grad)


def global_shape(given: tuple) -> tuple[int, ...]:
    """Return a shape that was given as numbers, as one tuple or as one number."""
    shape = given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in shape):
        raise ValueError(f"a shape consists of whole numbers >= 0, got {tuple(shape)}")
    return tuple(int(n) for n in shape)
