"""Memory order, views and index boxes shared by all kernels.

Logical order is (N, C, *spatial), memory order is channels last (N, *spatial, C). Everything here works for NumPy and
CuPy arrays and for arrays of size 0: sizes are always written out, never left to ``reshape(..., -1)``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from . import arena

Array = Any  #: a numpy.ndarray or a cupy.ndarray


def is_device(a: Array) -> bool:
    """Whether ``a`` is a CuPy array (decided without importing CuPy)."""
    return type(a).__module__.partition(".")[0] == "cupy"


def is_outline(a: Array) -> bool:
    """Whether ``a`` is an array without storage, of a dry run."""
    return type(a).__module__.startswith("hpcpar.kernels.outline")


def array_module(a: Array) -> ModuleType:
    """The module that made ``a``: ``cupy`` for a CuPy array, `kernels.outline` for an outline, else ``numpy``."""
    if type(a) is np.ndarray:
        return np
    if is_device(a):
        return sys.modules["cupy"]
    return sys.modules["hpcpar.kernels.outline"] if is_outline(a) else np


def empty_channels_last(shape: Sequence[int], dtype: Any, like: Array = None) -> Array:
    """An uninitialised array of logical ``shape`` (N, C, *spatial) that lies channels last in memory.

    A large one of NumPy gets its memory from the `arena`.

    Parameters
    ----------
    shape : sequence of int
        Logical shape. With fewer than three dims there is no spatial dim and the array is plain C order.
    dtype : dtype
    like : array, optional
        The new array is made by the module (NumPy or CuPy) of this array.
    """
    module = array_module(like)
    return _first_to_last(arena.empty if module is np else module.empty, shape, dtype)


def zeros_channels_last(shape: Sequence[int], dtype: Any, like: Array = None) -> Array:
    """As `empty_channels_last`, filled with zeros."""
    module = array_module(like)
    if module is not np:
        return _first_to_last(module.zeros, shape, dtype)
    a = _first_to_last(arena.empty, shape, dtype)
    a[...] = 0
    return a


def _first_to_last(create: Callable, shape: Sequence[int], dtype: Any) -> Array:
    nd = len(shape)
    if nd < 3:
        return create(tuple(shape), dtype)
    return create((shape[0], *shape[2:], shape[1]), dtype).transpose(0, nd - 1, *range(1, nd - 1))


def last(a: Array) -> Array:
    """View of ``a`` in memory order: (N, C, *spatial) as (N, *spatial, C)."""
    return a.transpose(0, *range(2, a.ndim), 1)


def is_channels_last(a: Array) -> bool:
    """Whether the memory of ``a`` (N, C, *spatial) is dense and channels last."""
    return bool((last(a) if a.ndim > 2 else a).flags.c_contiguous)


def to_channels_last(a: Array) -> Array:
    """``a`` itself where it already is dense and channels last, else a copy that is."""
    if is_channels_last(a):
        return a
    out = _first_to_last(array_module(a).empty, a.shape, a.dtype)  # no result that comes again: not from the arena
    out[...] = a
    return out


def sample_rows(a: Array) -> Array:
    """(N, S, C) array in memory order, S the product of the spatial dims; a view where ``a`` is channels last."""
    a = to_channels_last(a)
    return (last(a) if a.ndim > 2 else a).reshape(a.shape[0], math.prod(a.shape[2:]), a.shape[1])


def per_channel(v: Array, ndim: int) -> Array:
    """View of statistics (C,) or (N, C) that broadcasts against (N, C, *spatial) of ``ndim`` dims."""
    lead = (1, v.shape[0]) if v.ndim == 1 else v.shape
    return v.reshape(*lead, *(1,) * (ndim - 2))


def memory_order(a: Array) -> tuple[int, ...] | None:
    """The dims of ``a`` from slowest to fastest if ``a`` fills its memory densely in that order, else None."""
    order = tuple(sorted(range(a.ndim), key=lambda d: (-a.strides[d], -a.shape[d])))
    return order if a.transpose(order).flags.c_contiguous else None


def memory_view(a: Array) -> Array | None:
    """One-dimensional view of a dense array in memory order, or None where memory has gaps or repeats."""
    if a.flags.c_contiguous:
        return a.reshape(a.size)
    order = memory_order(a)
    return None if order is None else a.transpose(order).reshape(a.size)


def like_memory(a: Array, pattern: Array) -> Array:
    """``a``, or a copy of it, with exactly the strides of ``pattern`` (same shape, dense)."""
    if a.shape != pattern.shape:
        raise ValueError(f"shapes differ: {a.shape} and {pattern.shape}")
    if a.strides == pattern.strides or a.size == 0:
        return a
    out = array_module(pattern).empty_like(pattern, dtype=a.dtype)
    out[...] = a
    return out


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Cut the row-major index range [start, stop) of ``shape`` into boxes, in ascending order.

    At most ``2 * len(shape) - 1`` boxes, each a tuple of slices; together they hold exactly the range.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (slice(start, stop),)
        return
    inner = math.prod(shape[1:])
    i, head = divmod(start, inner)
    j, tail = divmod(stop, inner)
    if i == j:
        yield from ((slice(i, i + 1), *rest) for rest in boxes(shape[1:], head, tail))
        return
    if head:
        yield from ((slice(i, i + 1), *rest) for rest in boxes(shape[1:], head, inner))
        i += 1
    if i < j:
        yield (slice(i, j), *(slice(0, n) for n in shape[1:]))
    if tail:
        yield from ((slice(j, j + 1), *rest) for rest in boxes(shape[1:], 0, tail))


def taps(n: int, out: int, stride: int, lo: int, step: int) -> tuple[slice, slice]:
    """The part of one window tap that meets the input, for one dim.

    Output ``o`` reads input ``o * stride - lo + step``. Returns (outputs whose index lies in [0, n), their inputs).
    """
    first = max(0, -((step - lo) // stride))
    end = max(first, min(out, (n - 1 + lo - step) // stride + 1))
    begin = first * stride - lo + step
    return slice(first, end), slice(begin, begin + (end - first - 1) * stride + 1 if end > first else begin, stride)
