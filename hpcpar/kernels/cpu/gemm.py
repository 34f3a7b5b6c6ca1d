"""Products of small matrices in place, added to what is there: oneDNN's where it is installed, NumPy's otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np

from .. import registry
from ..arrays import Array
from ..precision import rounded

_NORMAL, _TURNED = b"N", b"T"


def multiply(a: Array, b: Array, out: Array, alpha: float = 1.0, add: bool = False,
             compute_dtype: str = "float32") -> None:
    """``out = alpha * a @ b``, or ``out += ...`` with ``add``, over the last two dims of dense or strided arrays.

    The rows of ``out`` are contiguous. Not for arrays without elements. A narrower `compute_dtype` is oneDNN's, which
    the caller has made sure of.
    """
    if compute_dtype != "float32":
        _narrow(a, b, out, alpha, add, compute_dtype)
        return
    if out.ndim > 2 and prod(out.shape[:-2]) == 1:
        first = (0,) * (out.ndim - 2)
        a, b, out = a[first], b[first], out[first]
    product = _library() if out.ndim == 2 and out.dtype == np.float32 else None
    if product is not None:
        left, right = _panel(a), _panel(b)
        if left is not None and right is not None:
            (m, n), k = out.shape, a.shape[1]
            status = product(left[0], right[0], m, n, k, alpha, left[1], left[2], right[1], right[2], float(add),
                             out.__array_interface__["data"][0], max(out.strides[0] // 4, n))
            if status == 0:
                return
    if add:
        part = np.matmul(a, b)
        out += part if alpha == 1 else part * out.dtype.type(alpha)
        return
    np.matmul(a, b, out=out)
    if alpha != 1:
        out *= out.dtype.type(alpha)


def _narrow(a: Array, b: Array, out: Array, alpha: float, add: bool, compute_dtype: str) -> None:
    from .onednn.matmul import matmul

    pair = (x if x.ndim < 4 else x.reshape(prod(x.shape[:-2]), *x.shape[-2:]) for x in (a, b))
    part = matmul(*pair, compute_dtype)
    if part is NotImplemented:
        part = np.matmul(rounded(a, compute_dtype), rounded(b, compute_dtype))
    part = part.reshape(out.shape)
    if alpha != 1:
        part *= out.dtype.type(alpha)
    if add:
        out += part
    else:
        out[...] = part


def _panel(a: Array) -> tuple[bytes, int, int] | None:
    """How a matrix of float32 lies: turned or not, address, elements from row to row; None if in neither way."""
    (rows, columns), (down, across) = a.shape, a.strides
    if across == 4 and down >= 4 * columns or rows == 1 and across == 4:
        return _NORMAL, a.__array_interface__["data"][0], max(down // 4, columns)
    if down == 4 and across >= 4 * rows or columns == 1 and down == 4:
        return _TURNED, a.__array_interface__["data"][0], max(across // 4, rows)
    return None


@cache
def _library() -> Callable | None:
    """oneDNN's product of float32 matrices in C order, None without the library."""
    if not registry.available("onednn"):
        return None
    from .onednn.library import load

    return load().c.dnnl_sgemm


os.register_at_fork(after_in_child=_library.cache_clear)  # see `onednn.library`
