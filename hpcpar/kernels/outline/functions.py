"""NumPy's functions on outlines, those that the package uses: what has no entry is an error, never a wrong shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arrays import Outline, empty, empty_as

TABLE: dict[Callable, Callable] = {}


def stands_for(*functions: Callable) -> Callable:
    """Say which NumPy functions the decorated one replaces."""

    def enter(own: Callable) -> Callable:
        TABLE.update(dict.fromkeys(functions, own))
        return own

    return enter


def _dtype(*arrays: Any) -> np.dtype:
    """NumPy's common dtype; Python numbers are weak."""
    return np.result_type(*[np.ones((1,) * a.ndim, a.dtype) if isinstance(a, Outline) else a for a in arrays])


# ---- making


@stands_for(np.empty_like, np.zeros_like, np.ones_like)
def empty_like(a: Any, dtype: Any = None, *, shape: Any = None, **_: Any) -> Outline:
    return empty_as(a, dtype) if shape is None else empty(tuple(shape), dtype or a.dtype)


@stands_for(np.full_like)
def full_like(a: Any, fill_value: Any, dtype: Any = None, *, shape: Any = None, **_: Any) -> Outline:
    return empty_as(a, dtype) if shape is None else empty(tuple(shape), dtype or a.dtype)


@stands_for(np.copy)
def copy(a: Outline, order: str = "K", **_: Any) -> Outline:
    return a.copy(order)


@stands_for(np.where)
def where(condition: Any, x: Any, y: Any) -> Outline:
    shape = np.broadcast_shapes(np.shape(condition), np.shape(x), np.shape(y))
    pattern = next((a for a in (condition, x, y) if isinstance(a, Outline) and a.shape == shape), None)
    return empty(shape, _dtype(x, y)) if pattern is None else empty_as(pattern, _dtype(x, y))


@stands_for(np.concatenate)
def concatenate(arrays: Sequence[Any], axis: int = 0, **_: Any) -> Outline:
    shape = list(arrays[0].shape)
    shape[axis] = sum(a.shape[axis] for a in arrays)
    return empty_as(arrays[0], _dtype(*arrays), shape)


@stands_for(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, **_: Any) -> Outline:
    return concatenate([np.expand_dims(a, axis) for a in arrays], axis)


@stands_for(np.take)
def take(a: Any, indices: Any, axis: int | None = None, **_: Any) -> Outline:
    if axis is None or np.ndim(a) == 1:
        return empty_as(indices, a.dtype) if isinstance(indices, Outline) else empty(np.shape(indices), a.dtype)
    return empty((*a.shape[:axis], *np.shape(indices), *a.shape[axis + 1 :]), a.dtype)


@stands_for(np.take_along_axis)
def take_along_axis(a: Any, indices: Any, axis: int, **_: Any) -> Outline:
    return empty(np.shape(indices), a.dtype)


@stands_for(np.repeat)
def repeat(a: Any, repeats: int, axis: int) -> Outline:
    shape = list(a.shape)
    shape[axis] *= repeats
    return empty(shape, a.dtype)


@stands_for(np.einsum)
def einsum(equation: str, *arrays: Any, **_: Any) -> Outline:
    operands, _, result = equation.replace(" ", "").partition("->")
    lengths: dict[str, int] = {}
    spread: tuple[int, ...] = ()
    for labels, array in zip(operands.split(","), arrays, strict=True):
        head, dots, tail = labels.partition("...")
        shape = np.shape(array)
        lengths.update(zip(head, shape, strict=False))
        if tail:
            lengths.update(zip(tail, shape[-len(tail) :], strict=True))
        if dots:
            spread = np.broadcast_shapes(spread, shape[len(head) : len(shape) - len(tail)])
    head, dots, tail = result.partition("...")
    shape = (*[lengths[c] for c in head], *(spread if dots else ()), *[lengths[c] for c in tail])
    return empty(shape, _dtype(*arrays))


@stands_for(np.ascontiguousarray)
def ascontiguousarray(a: Any, dtype: Any = None, **_: Any) -> Any:
    """Not dispatched by NumPy; for those who ask `array_module`."""
    if not isinstance(a, Outline):
        return np.ascontiguousarray(a, dtype)
    same = dtype is None or a.dtype == np.dtype(dtype)
    return a if same and a.flags.c_contiguous else empty(a.shape, dtype or a.dtype)


@stands_for(np.clip)
def clip(a: Outline, *_: Any, out: Any = None, **__: Any) -> Outline:
    return empty_as(a) if out is None else out


# ---- viewing


@stands_for(np.moveaxis)
def moveaxis(a: Outline, source: Any, destination: Any) -> Outline:
    return a._show(np.moveaxis(a._view, source, destination))


@stands_for(np.swapaxes)
def swapaxes(a: Outline, axis1: int, axis2: int) -> Outline:
    return a.swapaxes(axis1, axis2)


@stands_for(np.transpose)
def transpose(a: Outline, axes: Any = None) -> Outline:
    return a.transpose(axes)


@stands_for(np.expand_dims)
def expand_dims(a: Outline, axis: Any) -> Outline:
    return a._show(np.expand_dims(a._view, axis))


@stands_for(np.broadcast_to)
def broadcast_to(array: Outline, shape: Any, **_: Any) -> Outline:
    return array._show(np.broadcast_to(array._view, shape))


@stands_for(np.reshape)
def reshape(a: Outline, shape: Any = None, order: str = "C", **_: Any) -> Outline:
    return a.reshape(shape)


@stands_for(np.ravel)
def ravel(a: Outline, order: str = "C") -> Outline:
    return a.ravel()


@stands_for(np.squeeze)
def squeeze(a: Outline, axis: Any = None) -> Outline:
    return a.squeeze(axis)


# ---- asking


@stands_for(np.may_share_memory, np.shares_memory)
def may_share_memory(a: Any, b: Any, **_: Any) -> bool:
    return isinstance(a, Outline) and a.shares(b)


@stands_for(np.result_type)
def result_type(*arrays: Any) -> np.dtype:
    return _dtype(*arrays)


@stands_for(np.shape)
def shape(a: Outline) -> tuple[int, ...]:
    return a.shape


@stands_for(np.ndim)
def ndim(a: Outline) -> int:
    return a.ndim


@stands_for(np.size)
def size(a: Outline, axis: int | None = None) -> int:
    return a.size if axis is None else a.shape[axis]


@stands_for(np.copyto)
def copyto(dst: Any, src: Any, **_: Any) -> None:
    """Values are not kept."""


def _reduction(name: str) -> Callable:
    return lambda a, axis=None, **options: a._reduced(name, axis, **options)


for _name in ("sum", "mean", "max", "min", "any", "all", "argmax", "argmin"):
    TABLE[getattr(np, _name)] = _reduction(_name)
