"""Resampling: weighted taps, means and maxima over windows along one dim at a time; elements at given positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..arrays import Array, array_module, empty_channels_last, last, to_channels_last, zeros_channels_last


def tap_sums(x: Array, dim: int, index: np.ndarray, weight: np.ndarray | None) -> Array:
    """Weighted sums of a few elements along a dim.

    Parameters
    ----------
    x : array (N, C, *spatial)
    dim : int
        2 or more.
    index : integer NumPy array (out, taps)
        Positions along `dim`.
    weight : NumPy array (out, taps), optional
        Ones by default.

    Returns
    -------
    array with `out` elements along `dim`, channels last; taps are added in order, so that a result does not depend on
    what else is in x.
    """
    xp, axis = array_module(x), dim - 1
    out, count = index.shape
    if out == 0 or count == 0 or x.size == 0:
        return zeros_channels_last((*x.shape[:dim], out, *x.shape[dim + 1 :]), x.dtype, like=x)
    source = last(x)
    total = None
    for t in range(count):
        part = xp.take(source, xp.asarray(index[:, t]), axis)
        if weight is not None:
            factor = weight[:, t].astype(x.dtype).reshape(out, *(1,) * (x.ndim - dim))
            part *= xp.asarray(factor)
        total = part if total is None else np.add(total, part, out=total)
    return total.transpose(0, total.ndim - 1, *range(1, total.ndim - 1))


def window_means(x: Array, dim: int, start: Sequence[int], stop: Sequence[int]) -> Array:
    """Means along a dim over the windows ``[start, stop)``, which may overlap; channels last."""
    out = empty_channels_last((*x.shape[:dim], len(start), *x.shape[dim + 1 :]), x.dtype, like=x)
    for o, (a, b) in enumerate(zip(start, stop, strict=True)):
        out[_at(dim, slice(o, o + 1))] = x[_at(dim, slice(a, b))].sum(dim, keepdims=True, dtype=x.dtype)
        out[_at(dim, slice(o, o + 1))] /= b - a
    return out


def window_means_backward(g: Array, dim: int, start: Sequence[int], stop: Sequence[int], size: int) -> Array:
    """Adjoint of `window_means`: an array with `size` elements along the dim."""
    dx = zeros_channels_last((*g.shape[:dim], size, *g.shape[dim + 1 :]), g.dtype, like=g)
    for o, (a, b) in enumerate(zip(start, stop, strict=True)):
        dx[_at(dim, slice(a, b))] += g[_at(dim, slice(o, o + 1))] / (b - a)
    return dx


def window_maxima(x: Array, start: Sequence[Sequence[int]], stop: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Maxima over the boxes ``[start, stop)``, one list a spatial dim, and where they stand.

    Returns
    -------
    y : array (N, C, *out)
    index : int64 array (N, C, *out)
        Flat position in the spatial box of x: the first maximum in row-major order, the last NaN where there is one.

    Notes
    -----
    Dims are searched from the last to the first, which keeps the row-major order of equal values.
    """
    y, index, scale = x, None, 1
    for dim in range(x.ndim - 1, 1, -1):
        y, index = _maxima_along(y, index, dim, start[dim - 2], stop[dim - 2], scale)
        scale *= x.shape[dim]
    return y, index


def _maxima_along(
    x: Array, index: Array | None, dim: int, start: Sequence[int], stop: Sequence[int], scale: int
) -> tuple[Array, Array]:
    xp = array_module(x)
    shape = (*x.shape[:dim], len(start), *x.shape[dim + 1 :])
    y = empty_channels_last(shape, x.dtype, like=x)
    found = empty_channels_last(shape, np.int64, like=x)
    for o, (a, b) in enumerate(zip(start, stop, strict=True)):
        best, place = y[_at(dim, o)], found[_at(dim, o)]
        for t in range(a, b):
            value = x[_at(dim, t)]
            position = t * scale if index is None else index[_at(dim, t)] + t * scale
            if t == a:
                best[...] = value
                place[...] = position
                continue
            better = (value > best) | (value != value)
            xp.copyto(best, value, where=better)
            xp.copyto(place, position, where=better)
    return y, found


def put_at(values: Array, places: Array, shape: Sequence[int]) -> Array:
    """Zeros of `shape` (N, C, *spatial), channels last, with values at flat spatial positions.

    Parameters
    ----------
    values, places : array (N, C, *any)
        A place of -1 leaves its value out. Of several values for one place the last in row-major order stays.
    """
    y = zeros_channels_last(shape, values.dtype, like=values)
    if values.size and y.size:
        keep = last(places >= 0)
        last(y).reshape(y.size)[last(_offsets(places, shape))[keep]] = last(values)[keep]
    return y


def take_at(x: Array, places: Array) -> Array:
    """Elements of x (N, C, *spatial) at flat spatial positions (N, C, *any), 0 where the position is -1."""
    y = zeros_channels_last(places.shape, x.dtype, like=x)
    if y.size and x.size:
        keep = places >= 0
        memory = last(to_channels_last(x)).reshape(x.size)
        y[keep] = memory[_offsets(places, x.shape)[keep]]
    return y


def _offsets(places: Array, shape: Sequence[int]) -> Array:
    """Offsets in the channels-last memory of an array of `shape`."""
    xp, (n, c), ones = array_module(places), places.shape[:2], (1,) * (places.ndim - 2)
    samples, channels = xp.arange(n).reshape(n, 1, *ones), xp.arange(c).reshape(1, c, *ones)
    return (samples * math.prod(shape[2:]) + places) * c + channels


def _at(dim: int, where: slice | int) -> tuple:
    return (slice(None),) * dim + (where,)
