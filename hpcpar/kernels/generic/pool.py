"""Pooling: windows' maxima with their positions, and windows' sums, for any geometry.

Sums are separable, so they are taken one dim after the other: 3 + 3 + 3 additions a window in place of 27.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..arrays import Array, array_module, empty_channels_last, last, sample_rows, taps, zeros_channels_last
from ..signs import pack_signs, unpack_signs
from .elementwise import leaky_relu, leaky_relu_backward

Bounds = Sequence[tuple[int, int]]


def lowest(dtype: np.dtype) -> float | int:
    """The lowest value of a dtype: -inf of a float, the minimum of an integer."""
    dtype = np.dtype(dtype)
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def index_dtype(positions: int) -> type:
    """Type of positions in a box: int32 where they fit."""
    return np.int32 if positions <= np.iinfo(np.int32).max else np.int64


def max_pool_forward(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    out_shape: Sequence[int] | None = None,
    valid: Bounds | None = None,
) -> tuple[Array, Array]:
    """Maxima over windows that lie inside the buffer, and where they stand.

    Parameters
    ----------
    x : array (N, C, *spatial)
        Buffer of shard and halo, filled with the dtype's lowest value where there is no input.
    kernel, stride, dilation : sequence of int
        One number a spatial dim.
    out_shape : sequence of int, optional
        Spatial sizes of the result; default: as many windows as fit.
    valid : sequence of (int, int), optional
        The part [lo, hi) of the buffer, per dim, that holds input. Positions outside are never chosen.

    Returns
    -------
    y : array (N, C, *out)
    index : integer array (N, C, *out)
        Flat position of the maximum in the buffer's spatial box; int32 where that fits, else int64. The first
        maximum in window order; where the window holds a NaN, the last NaN (as torch). -1, with the lowest value in
        y, where the window holds no input.

    Raises
    ------
    ValueError
        If ``out_shape`` asks for windows beyond the buffer.
    """
    xp, nd, spatial = array_module(x), x.ndim - 2, x.shape[2:]
    out = pool_sizes(spatial, kernel, stride, dilation, out_shape)
    valid = tuple(valid) if valid is not None else tuple((0, n) for n in spatial)
    shape = (*x.shape[:2], *out)
    y = empty_channels_last(shape, x.dtype, like=x)
    y[...] = lowest(x.dtype)
    index = empty_channels_last(shape, index_dtype(math.prod(spatial)), like=x)
    index[...] = -1
    if y.size == 0:
        return y, index
    for offset in itertools.product(*(range(k) for k in kernel)):
        at = [o * d for o, d in zip(offset, dilation, strict=True)]
        value = x[(slice(None), slice(None),
                   *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(at, out, stride, strict=True)))]
        position, inside = xp.zeros((1,) * nd, index.dtype), xp.ones((1,) * nd, bool)
        for d in range(nd):
            line = (at[d] + stride[d] * xp.arange(out[d], dtype=index.dtype)).reshape(*(-1 if e == d else 1
                                                                                     for e in range(nd)))
            position = position * spatial[d] + line
            inside = inside & (line >= valid[d][0]) & (line < valid[d][1])
        better = ((value > y) | (value != value) | (index < 0)) & inside
        xp.copyto(y, value, where=better)
        xp.copyto(index, xp.broadcast_to(position, shape), where=better)
    return y, index


def max_pool_backward(g: Array, index: Array, x_shape: Sequence[int]) -> Array:
    """Adjoint of the selection made by `max_pool_forward`.

    Parameters
    ----------
    g : array (N, C, *out)
    index : integer array (N, C, *out)
        From the forward pass; entries of -1 pass nothing on.
    x_shape : sequence of int
        Shape of the forward buffer.

    Returns
    -------
    array of ``x_shape``, channels last; repeated positions are summed.
    """
    xp = array_module(g)
    n, c, positions = x_shape[0], x_shape[1], math.prod(x_shape[2:])
    dx = zeros_channels_last(x_shape, g.dtype, like=g)
    if g.size == 0 or dx.size == 0:
        return dx
    rows, where = sample_rows(g), sample_rows(index).astype(np.int64)
    flat = (xp.arange(n).reshape(n, 1, 1) * positions + where) * c + xp.arange(c)
    keep = where >= 0
    sums = xp.bincount(flat[keep], weights=rows[keep].astype(np.float64), minlength=dx.size)
    last(dx)[...] = sums.reshape(last(dx).shape)
    return dx


def avg_pool_forward(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    divisors: Sequence[Array],
    slope: float | None = None,
    out: Array | None = None,
    signs: Array | None = None,
) -> Array:
    """Sums over windows divided by the product of one divisor a dim.

    Parameters
    ----------
    x : array (N, C, *spatial)
    kernel, stride : sequence of int
    padding : sequence of int
        Positions before x, per dim, at which the first window starts (negative: the first window starts inside).
        Positions outside x count as zero.
    divisors : sequence of float arrays
        Per dim, for each output position; their lengths are the output's sizes. NumPy arrays, also for a CuPy x.
    slope : float, optional
        Pools leaky ReLU of x with this slope (0 is ReLU), which then is never stored.
    out : array, optional
        Where to write the result; it lies channels last.
    signs : array, optional
        What `empty_signs` made for x: the signs that `avg_pool_backward` wants are written into it.

    Returns
    -------
    array (N, C, *out), channels last.
    """
    if signs is not None:
        pack_signs(x, signs)
    y = x if slope is None else leaky_relu(x, slope)
    for d in range(x.ndim - 2):
        y = _sum_along(y, d + 2, kernel[d], stride[d], padding[d], len(divisors[d]))
        y *= _reciprocal(divisors[d], x, d + 2)
    if out is None:
        return y
    out[...] = y
    return out


def avg_pool_backward(
    g: Array,
    x_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    divisors: Sequence[Array],
    signs: Array | None = None,
    slope: float | None = None,
) -> Array:
    """Adjoint of `avg_pool_forward`: array of ``x_shape``, channels last, from ``g`` (N, C, *out).

    With a slope it is the gradient before leaky ReLU, multiplied by the slope where x was not positive, as ``signs``
    from the forward pass say. The input itself is not needed.
    """
    for d in range(g.ndim - 2):
        g = g * _reciprocal(divisors[d], g, d + 2)
        g = _spread_along(g, d + 2, kernel[d], stride[d], padding[d], x_shape[d + 2])
    return g if slope is None else leaky_relu_backward(g, unpack_signs(signs, x_shape), slope)


def sum_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int]) -> Array:
    """Sums over the windows that lie inside x: (N, C, *spatial) to (N, C, *out), channels last."""
    for d, out in enumerate(pool_sizes(x.shape[2:], kernel, stride, (1,) * (x.ndim - 2), None)):
        x = _sum_along(x, d + 2, kernel[d], stride[d], 0, out)
    return x


def sum_pool_backward(g: Array, x_shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> Array:
    """Adjoint of `sum_pool_forward`: array of ``x_shape``, channels last, from ``g`` (N, C, *out)."""
    for d in range(g.ndim - 2):
        g = _spread_along(g, d + 2, kernel[d], stride[d], 0, x_shape[d + 2])
    return g


def pool_sizes(spatial: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
               out_shape: Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of windows that fit, or ``out_shape`` if it does not ask for more."""
    most = tuple(max(0, (n - d * (k - 1) - 1) // s + 1)
                 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True))
    if out_shape is None:
        return most
    out_shape = tuple(out_shape)
    if len(out_shape) != len(most) or any(o > m for o, m in zip(out_shape, most, strict=True)):
        raise ValueError(f"pooling a buffer {tuple(spatial)} with kernel {tuple(kernel)}, stride {tuple(stride)}, "
                         f"dilation {tuple(dilation)}: {most} windows fit, {out_shape} are asked for")
    return out_shape


def _sum_along(x: Array, dim: int, kernel: int, stride: int, lo: int, out: int) -> Array:
    shape = (*x.shape[:dim], out, *x.shape[dim + 1:])
    y = zeros_channels_last(shape, x.dtype, like=x)
    for k in range(kernel):
        outs, ins = taps(x.shape[dim], out, stride, lo, k)
        y[_at(dim, outs)] += x[_at(dim, ins)]
    return y


def _spread_along(g: Array, dim: int, kernel: int, stride: int, lo: int, size: int) -> Array:
    x = zeros_channels_last((*g.shape[:dim], size, *g.shape[dim + 1:]), g.dtype, like=g)
    for k in range(kernel):
        outs, ins = taps(size, g.shape[dim], stride, lo, k)
        x[_at(dim, ins)] += g[_at(dim, outs)]
    return x


def _at(dim: int, where: slice) -> tuple[slice, ...]:
    return (slice(None),) * dim + (where,)


def _reciprocal(divisor: Array, like: Array, dim: int) -> Array:
    xp = array_module(like)
    shape = tuple(len(divisor) if d == dim else 1 for d in range(like.ndim))
    return xp.asarray(1 / np.asarray(divisor, np.float64), dtype=like.dtype).reshape(shape)
