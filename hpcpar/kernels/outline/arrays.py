"""Outline: an array without storage, which knows its shape, dtype and strides and shares the rest of NumPy's manners.

Programs run on outlines as they are: operations make outlines of the right shape, views share storage, in-place
operations make nothing. Where a program looks at a value it finds zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .ledger import Storage

SMALL = 4096
"""Outlines of at most so many elements become real zeros where NumPy asks for values."""

_ground = np.zeros(1, np.uint8)


class NotKnown(TypeError):
    """A program asks an outline for what it does not have: values, or a function without an entry."""


class Outline(np.lib.mixins.NDArrayOperatorsMixin):
    """An array without storage; made by `empty` or by an operation on another one.

    Attributes
    ----------
    shape, dtype, ndim, size, itemsize, nbytes, strides, flags
        As of a NumPy array with the same history of views.
    """

    __slots__ = ("__weakref__", "_storage", "_view")

    def __init__(self, view: np.ndarray, storage: Storage) -> None:
        # an array over one byte of memory with the strides of the real one; only ever viewed, never read or written
        self._view = view
        self._storage = storage

    # ---- what it is

    shape = property(lambda self: self._view.shape)
    dtype = property(lambda self: self._view.dtype)
    ndim = property(lambda self: self._view.ndim)
    size = property(lambda self: self._view.size)
    itemsize = property(lambda self: self._view.itemsize)
    nbytes = property(lambda self: self._view.nbytes)
    strides = property(lambda self: self._view.strides)
    flags = property(lambda self: self._view.flags)

    @property
    def base(self) -> Storage | None:
        """The storage, where this shows only a part of it."""
        return self._storage if self._storage.nbytes != self.nbytes else None

    @property
    def memory(self) -> Storage:
        """What an array would share with its views."""
        return self._storage

    def __len__(self) -> int:
        return len(self._view)

    def __repr__(self) -> str:
        return f"Outline({self.shape}, {self.dtype})"

    def shares(self, other: Any) -> bool:
        """Whether another array could show the same memory."""
        return isinstance(other, Outline) and other._storage is self._storage

    # ---- views

    def _show(self, view: np.ndarray) -> Outline:
        return Outline(view, self._storage)

    def __getitem__(self, item: Any) -> Any:
        items = item if isinstance(item, tuple) else (item,)
        if any(isinstance(i, (Outline, np.ndarray, list)) for i in items):
            return self._picked(items)
        whole = any(i is Ellipsis for i in items)
        return self._show(self._view[items if whole else (*items, ...)])  # the ellipsis: a view also of one element

    def _picked(self, items: tuple) -> Any:
        """Selection by arrays: by a mask nothing is chosen, as all values are zero."""
        if len(items) == 1 and items[0].dtype == bool:
            return np.zeros((0, *self.shape[items[0].ndim :]), self.dtype)
        raise NotKnown("outlines are indexed by numbers, slices and masks of the whole, not by arrays of positions")

    def __setitem__(self, item: Any, value: Any) -> None:
        shape = self.shape if item is Ellipsis else self[item].shape
        if np.broadcast_shapes(shape, np.shape(value)) != shape:
            raise ValueError(f"could not broadcast input array from shape {np.shape(value)} into shape {shape}")

    def reshape(self, *shape: Any, order: str = "C") -> Outline:
        """Return a view where strides allow it, else a copy, as NumPy does."""
        given = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        view = viewed(self._view, given)
        if view is not None:
            return self._show(view)
        known = prod(n for n in given if n != -1)
        return empty([self.size // known if n == -1 else n for n in given], self.dtype)

    def ravel(self, order: str = "C") -> Outline:
        """Return the elements in one dim."""
        return self.reshape(self.size)

    def transpose(self, *axes: Any) -> Outline:
        """Return a view with dims in another order."""
        return self._show(self._view.transpose(*axes))

    def swapaxes(self, first: int, second: int) -> Outline:
        """Return a view with two dims exchanged."""
        return self._show(self._view.swapaxes(first, second))

    def squeeze(self, axis: Any = None) -> Outline:
        """Return a view without dims of length 1."""
        return self._show(self._view.squeeze(axis))

    def view(self, dtype: Any = None) -> Outline:
        """Return a view, under another dtype if one is given."""
        return self._show(self._view if dtype is None else self._view.view(dtype))

    @property
    def T(self) -> Outline:
        """The dims in reverse order."""
        return self._show(self._view.T)

    # ---- copies

    def astype(self, dtype: Any, order: str = "K", copy: bool = True, **_: Any) -> Outline:
        """Return a copy in another dtype, or self."""
        return self if not copy and np.dtype(dtype) == self.dtype else empty_as(self, dtype)

    def copy(self, order: str = "C") -> Outline:
        """Return a copy."""
        return empty_as(self) if order == "K" else empty(self.shape, self.dtype)

    def fill(self, value: Any) -> None:
        """Do nothing: values are not kept."""

    # ---- values, which are zero

    def item(self) -> Any:
        """Return zero."""
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.dtype.type(0).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__

    def _reduced(self, name: str, axis: Any = None, keepdims: bool = False, dtype: Any = None, **_: Any) -> Any:
        axes = range(self.ndim) if axis is None else [a % self.ndim for a in np.atleast_1d(axis)]
        options = {} if dtype is None else {"dtype": dtype}
        result = getattr(np.zeros(1, self.dtype), name)(**options).dtype
        shape = [1 if d in axes else n for d, n in enumerate(self.shape)]
        made = empty(shape, result) if name.startswith("arg") else empty_as(self, result, shape)
        return made if keepdims else made[tuple(0 if d in axes else slice(None) for d in range(self.ndim))]

    def sum(self, axis: Any = None, **options: Any) -> Any:
        """Return the sum along `axis`; the following likewise."""
        return self._reduced("sum", axis, **options)

    def mean(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("mean", axis, **options)

    def max(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("max", axis, **options)

    def min(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("min", axis, **options)

    def any(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("any", axis, **options)

    def all(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("all", axis, **options)

    def argmax(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("argmax", axis, **options)

    def argmin(self, axis: Any = None, **options: Any) -> Any:
        return self._reduced("argmin", axis, **options)

    def dot(self, other: Any) -> Any:
        """Return the matrix product of arrays of one or two dims."""
        return np.matmul(self, other)

    # ---- NumPy's functions

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Real zeros, for few elements only: anything else would be a mistake in a dry run."""
        if self.size > SMALL:
            raise NotKnown(f"{self!r} has no values; NumPy was asked for them by a function that outlines do not know")
        return np.zeros(self.shape, dtype or self.dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__":
            if method == "reduce" and out is None:
                return self._reduced({"add": "sum", "maximum": "max", "minimum": "min"}[ufunc.__name__], **options)
            return NotImplemented
        if out is not None and all(o is not None for o in out):
            return out[0] if len(out) == 1 else out
        shape = _matmul_shape(*inputs) if ufunc is np.matmul else np.broadcast_shapes(*[np.shape(i) for i in inputs])
        ones = [np.ones((1,) * np.ndim(i), i.dtype) if hasattr(i, "dtype") else i for i in inputs]
        with np.errstate(all="ignore"):
            results = ufunc(*ones, **{k: v for k, v in options.items() if k == "dtype"})
        alike = [i for i in inputs if isinstance(i, Outline) and i.shape == shape and ufunc is not np.matmul]
        pattern = alike[0] if alike else None
        made = [
            empty(shape, r.dtype) if pattern is None else empty_as(pattern, r.dtype)
            for r in (results if isinstance(results, tuple) else (results,))
        ]
        return tuple(made) if isinstance(results, tuple) else made[0]

    def __array_function__(self, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        from .functions import TABLE

        known = TABLE.get(function)
        if known is None:
            raise NotKnown(f"np.{function.__name__} is not known for outlines")
        return known(*args, **kwargs)


def empty(shape: Sequence[int] | int, dtype: Any = float, order: str = "C") -> Outline:
    """Return an outline in C order."""
    dtype = np.dtype(dtype)
    shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    storage = Storage(prod(shape) * dtype.itemsize)
    return Outline(_drawn(shape, dtype, range(len(shape))), storage)


def over(memory: Storage, shape: Sequence[int], dtype: Any) -> Outline:
    """Return an outline in C order of the memory of another one (`Outline.memory`)."""
    return Outline(_drawn(shape, np.dtype(dtype), range(len(shape))), memory)


def empty_as(pattern: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> Outline:
    """Return an outline whose dims lie in memory in the order of those of `pattern` (NumPy's order "K")."""
    dtype = np.dtype(pattern.dtype if dtype is None else dtype)
    shape = tuple(pattern.shape if shape is None else shape)
    order = sorted(range(len(shape)), key=lambda d: -abs(pattern.strides[d]))
    return Outline(_drawn(shape, dtype, order), Storage(prod(shape) * dtype.itemsize))


def viewed(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """Return `array` in another shape without a copy, None where strides do not allow it."""
    view = array.view()
    known = prod(n for n in shape if n != -1)
    full = tuple((array.size // known if known else 0) if n == -1 else int(n) for n in shape)
    if prod(full) != array.size:
        raise ValueError(f"cannot reshape array of size {array.size} into shape {tuple(shape)}")
    strides = _new_strides(view, full)
    return None if strides is None else _strided(full, array.dtype, strides)


def _new_strides(array: np.ndarray, shape: tuple[int, ...]) -> list[int] | None:
    """Strides of a reshaped view: groups of dims with equal products must each be evenly spaced."""
    old = [(n, s) for n, s in zip(array.shape, array.strides, strict=True) if n != 1]
    if array.size == 0:
        return [array.itemsize] * len(shape)
    strides, i = [], 0
    new = [n for n in shape if n != 1]
    j = 0
    while j < len(new):
        a, b, first, start = old[i][0], new[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                if old[i - 1][1] != old[i][0] * old[i][1]:
                    return None
                a, i = a * old[i][0], i + 1
            else:
                b, j = b * new[j], j + 1
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(first, i - 1)):
            return None
        step = old[i - 1][1]
        group = []
        for n in reversed(new[start:j]):
            group.append(step)
            step *= n
        strides += reversed(group)
    rest = iter(strides)
    return [array.itemsize if n == 1 else next(rest) for n in shape]


def _drawn(shape: tuple[int, ...], dtype: np.dtype, order: Sequence[int]) -> np.ndarray:
    """A dense array whose dims lie in memory in `order`, slowest first."""
    strides, step = [0] * len(shape), dtype.itemsize
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return _strided(shape, dtype, strides)


def _strided(shape: tuple[int, ...], dtype: np.dtype, strides: Sequence[int]) -> np.ndarray:
    ground = np.empty(1, dtype)
    return np.lib.stride_tricks.as_strided(ground, shape, tuple(strides))


def _matmul_shape(a: Any, b: Any) -> tuple[int, ...]:
    first, second = np.shape(a), np.shape(b)
    if len(first) == 1 or len(second) == 1:
        return (*first[:-1], *second[1:]) if len(second) > 1 else first[:-1]
    return (*np.broadcast_shapes(first[:-2], second[:-2]), first[-2], second[-1])
