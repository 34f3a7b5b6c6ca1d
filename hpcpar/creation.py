"""Tensors filled with a number or a range; no message."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.signature import signature
from hpcpar.tensors import Tensor


def full(
    shape: tuple[int, ...],
    fill_value: float,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = np.float32,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of global `shape` filled with one number; each rank makes its own block."""
    sig = signature(mesh or current_mesh(), tuple(shape), layout or Layout()).resolved
    return Tensor(np.full(sig.local_shape, fill_value, dtype), sig, requires_grad)


def zeros(shape: tuple[int, ...], **options: Any) -> Tensor:
    """Return zeros; options as in `full`."""
    return full(shape, 0, **options)


def ones(shape: tuple[int, ...], **options: Any) -> Tensor:
    """Return ones; options as in `full`."""
    return full(shape, 1, **options)


def arange(n: int, mesh: Mesh | None = None, layout: Layout | None = None, dtype: Any = np.int64) -> Tensor:
    """Return 0 to n - 1; each rank makes its own block."""
    sig = signature(mesh or current_mesh(), (int(n),), layout or Layout()).resolved
    lo, hi = sig.box[0]
    return Tensor(np.arange(lo, hi, dtype=dtype), sig)
