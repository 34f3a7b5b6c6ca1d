"""Convolution by im2col in tiles: forward, gradient of the input, gradient of the weight, any geometry.

All three passes speak of one map, ``y[o] = sum_k x[o * stride - lo + k * dilation] w[k]`` with x = 0 outside its
range, for any sizes of x and y and any ``lo``, negative too. Splitting a matrix product changes its bits, so the rows
are multiplied in tiles of a fixed count that depends on the layer alone, the last tile padded to full: the outputs are
then the same bits however the domain is cut. The gradient of the input is computed as one such convolution of dY per
phase of the stride, so it has the same property and needs no scattered additions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..arrays import Array, array_module, boxes, empty_channels_last, last, zeros_channels_last
from ..bfloat16 import operands
from .elementwise import leaky_relu

#: Bytes of one im2col tile: it stays in a CPU's second-level cache; a device wants fewer and larger products.
TILE_BYTES = {"numpy": 1 << 20, "cupy": 64 << 20}

Padding = Sequence[tuple[int, int]]


def conv_forward(
    x: Array,
    w: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int = 1,
    out: Array | None = None,
    slope: float | None = None,
    accumulate: bool = False,
    compute_dtype: str = "float32",
) -> Array:
    """Convolution of 1 to 3 spatial dims.

    Parameters
    ----------
    x : array (N, C, *spatial)
        Any strides.
    w : array (OC, C / groups, *kernel)
        Any strides; memory order (*kernel, C, OC) is the fast one.
    bias : array (OC,) or None
    stride, dilation : sequence of int
        One positive number a spatial dim.
    padding : sequence of (int, int)
        (before, after) per spatial dim; zeros for positive numbers, a crop for negative ones.
    groups : int
    out : array (N, OC, *out), optional
        Written and returned instead of a new array.
    slope : float, optional
        Applies leaky ReLU with this slope to the result (0 is ReLU).
    accumulate : bool
        The convolution is added to what ``out`` holds, before the slope: the convolution of concatenated channels is
        the sum over the parts, and need not copy them into one array.
    compute_dtype : {"float32", "bfloat16"}
        With "bfloat16" x and w, which are float32, are rounded to it; products are summed in float32, and the result
        is float32.

    Returns
    -------
    array (N, OC, *out), channels last, ``out = (n + before + after - dilation (kernel - 1) - 1) // stride + 1``.

    Raises
    ------
    ValueError
        If channels, groups or numbers of dims do not fit, ``accumulate`` has no ``out``, or bfloat16 is asked for
        arrays of another dtype than float32.
    RuntimeError
        If bfloat16 is asked for and the processor does not have it.
    """
    sizes = check(x, w, stride, padding, dilation, groups)
    x, w = operands(compute_dtype, x, w)
    shape = (x.shape[0], w.shape[0], *sizes)
    y = empty_channels_last(shape, x.dtype, like=x) if out is None else out
    if y.shape != shape:
        raise ValueError(f"conv_forward: out has shape {y.shape}, the result has {shape}")
    if accumulate and out is None:
        raise ValueError("conv_forward: accumulate adds to out, and there is none")
    if math.prod(w.shape[1:]) == 0:
        shift = 0 if bias is None else bias.reshape(-1, *(1,) * len(sizes))
        y[...] = y + shift if accumulate else shift
    else:
        _convolve(x, w, bias, stride, [lo for lo, _ in padding], dilation, groups, y, accumulate)
    if slope is not None:
        leaky_relu(y, slope, out=y)
    return y


def conv_backward_data(
    dy: Array,
    w: Array,
    x_shape: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int = 1,
    compute_dtype: str = "float32",
) -> Array:
    """Gradient of `conv_forward` in x; also the forward pass of the transposed convolution.

    Parameters
    ----------
    dy : array (N, OC, *out)
        Its sizes are taken as they are; positions outside contribute nothing.
    w : array (OC, C / groups, *kernel)
    x_shape : sequence of int
        (N, C, *spatial) of the result; need not match ``dy`` and ``padding``.
    stride, padding, dilation, groups, compute_dtype
        As in `conv_forward`; only the paddings before matter.

    Returns
    -------
    array (N, C, *spatial), channels last.
    """
    dy, w = operands(compute_dtype, dy, w)
    nd = dy.ndim - 2
    dx = empty_channels_last(x_shape, dy.dtype, like=dy)
    if dy.size == 0 or w.size == 0:
        dx[...] = 0
        return dx
    oc, cg = w.shape[:2]
    swapped = w.reshape(groups, oc // groups, cg, *w.shape[2:]).swapaxes(1, 2).reshape(
        groups * cg, oc // groups, *w.shape[2:])
    phases = [[_phase(f, s, lo, d, k) for f in range(min(s, n))]
              for s, (lo, _), d, k, n in zip(stride, padding, dilation, w.shape[2:], dx.shape[2:], strict=True)]
    for dims in itertools.product(*phases):
        target = dx[(slice(None), slice(None), *(dim[0] for dim in dims))]
        if any(dim[1] is None for dim in dims):
            target[...] = 0
            continue
        taps = swapped[(slice(None), slice(None), *(dim[1] for dim in dims))]
        _convolve(dy, taps, None, (1,) * nd, [dim[2] for dim in dims], [dim[3] for dim in dims], groups, target)
    return dx


def conv_backward_weight(
    x: Array,
    dy: Array,
    w_shape: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int = 1,
    compute_dtype: str = "float32",
) -> Array:
    """Gradient of `conv_forward` in w.

    Parameters
    ----------
    x : array (N, C, *spatial)
    dy : array (N, OC, *out)
        Sizes of both are taken as they are.
    w_shape : sequence of int
        (OC, C / groups, *kernel)
    stride, padding, dilation, groups, compute_dtype
        As in `conv_forward`; only the paddings before matter.

    Returns
    -------
    array (OC, C / groups, *kernel), memory order (*kernel, C / groups, OC).
    """
    x, dy = operands(compute_dtype, x, dy)
    xp = array_module(x)
    nd, kernel, (oc, cg) = x.ndim - 2, tuple(w_shape[2:]), w_shape[:2]
    dw = xp.zeros((*kernel, cg, oc), x.dtype).transpose(nd + 1, nd, *range(nd))
    if x.size == 0 or dy.size == 0 or dw.size == 0:
        return dw
    rows_shape = (dy.shape[0], *dy.shape[2:])
    view = _windows(x, kernel, stride, [lo for lo, _ in padding], dilation, dy.shape[2:], groups)
    grads = _grouped(last(dy), groups)
    work, cols = _work_dtype(x.dtype), math.prod(kernel) * cg
    tile = _tile_rows(xp, groups * cols, work)
    col, part = xp.empty((groups, tile, cols), work), xp.empty((groups, tile, oc // groups), work)
    total = xp.zeros((groups, cols, oc // groups), work)
    rows = math.prod(rows_shape)
    for a in range(0, rows, tile):
        n = min(tile, rows - a)
        _gather(col, view, rows_shape, a, a + n)
        _gather(part, grads, rows_shape, a, a + n)
        total += xp.matmul(col[:, :n].swapaxes(1, 2), part[:, :n])
    total = total.reshape(groups, *kernel, cg, oc // groups)
    dw[...] = xp.moveaxis(total, -1, 1).reshape(oc, *kernel, cg).transpose(0, nd + 1, *range(1, nd + 1))
    return dw


def check(x: Array, w: Array, stride: Sequence[int], padding: Padding, dilation: Sequence[int],
          groups: int) -> tuple[int, ...]:
    """Raise ValueError where the arguments of a convolution do not fit; else return the output's spatial sizes."""
    nd = x.ndim - 2
    if w.ndim != x.ndim or not len(stride) == len(padding) == len(dilation) == nd:
        raise ValueError(f"convolution of an array {x.shape} with a weight {w.shape}, stride {stride}, padding "
                         f"{padding}, dilation {dilation}: numbers of spatial dims differ")
    if groups < 1 or w.shape[0] % groups or w.shape[1] * groups != x.shape[1]:
        raise ValueError(f"convolution of {x.shape[1]} channels with a weight {w.shape} in {groups} groups: the "
                         f"weight's second dim must be channels / groups and its first a multiple of groups")
    return tuple(max(0, (n + lo + hi - d * (k - 1) - 1) // s + 1)
                 for n, k, s, (lo, hi), d in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True))


def _convolve(x: Array, w: Array, bias: Array | None, stride: Sequence[int], lo: Sequence[int],
              dilation: Sequence[int], groups: int, y: Array, accumulate: bool = False) -> None:
    """Write the convolution of x into y (any strides), or add it there; its spatial sizes are y's."""
    xp, nd = array_module(x), x.ndim - 2
    oc, cg, kernel = w.shape[0], w.shape[1], w.shape[2:]
    if y.size == 0:
        return
    work, cols = _work_dtype(x.dtype), math.prod(kernel) * cg
    tile = _tile_rows(xp, groups * cols, work)
    weight = w.reshape(groups, oc // groups, cg, *kernel).transpose(0, *range(3, nd + 3), 2, 1)
    weight = xp.ascontiguousarray(weight, dtype=work).reshape(groups, cols, oc // groups)
    view = _windows(x, kernel, stride, lo, dilation, y.shape[2:], groups)
    rows_shape = (y.shape[0], *y.shape[2:])
    target = _grouped(last(y), groups)
    col, part = xp.empty((groups, tile, cols), work), xp.empty((groups, tile, oc // groups), work)
    shift = None if bias is None else bias.reshape(groups, *(1,) * (nd + 1), oc // groups)
    rows = math.prod(rows_shape)
    for a in range(0, rows, tile):
        n = min(tile, rows - a)
        _gather(col, view, rows_shape, a, a + n)
        col[:, n:] = 0
        xp.matmul(col, weight, out=part)
        at = 0
        for box in boxes(rows_shape, a, a + n):
            sizes = tuple(s.stop - s.start for s in box)
            here = math.prod(sizes)
            values = part[:, at:at + here].reshape(groups, *sizes, oc // groups)
            values = values if shift is None else values + shift
            where = (slice(None), *box)
            target[where] = target[where] + values if accumulate else values
            at += here


def _gather(rows: Array, view: Array, shape: tuple[int, ...], start: int, stop: int) -> None:
    """Copy the rows [start, stop) of ``view`` (groups, *shape, ...) to the front of ``rows`` (groups, tile, cols)."""
    at, groups, tail = 0, view.shape[0], view.shape[len(shape) + 1:]
    for box in boxes(shape, start, stop):
        sizes = tuple(s.stop - s.start for s in box)
        here = math.prod(sizes)
        rows[:, at:at + here].reshape(groups, *sizes, *tail)[...] = view[(slice(None), *box)]
        at += here


def _grouped(a: Array, groups: int) -> Array:
    """View of (N, *spatial, C) as (groups, N, *spatial, C / groups)."""
    split = a.reshape(*a.shape[:-1], groups, a.shape[-1] // groups) if groups > 1 else a[..., None, :]
    return split.transpose(a.ndim - 1, *range(a.ndim - 1), a.ndim)


def _windows(x: Array, kernel: Sequence[int], stride: Sequence[int], lo: Sequence[int], dilation: Sequence[int],
             out: Sequence[int], groups: int) -> Array:
    """View (groups, N, *out, *kernel, C / groups) of the windows of x, copied first only where it must be padded."""
    xp = array_module(x)
    extent = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, stride, kernel, dilation, strict=True)]
    if all(b <= 0 and e - b <= n for b, e, n in zip(lo, extent, x.shape[2:], strict=True)):
        crop = x[(slice(None), slice(None), *(slice(-b, e - b) for b, e in zip(lo, extent, strict=True)))]
    else:
        crop = zeros_channels_last((*x.shape[:2], *extent), x.dtype, like=x)
        ranges = [(max(0, b), max(0, b, min(e, n + b)), b) for b, e, n in zip(lo, extent, x.shape[2:], strict=True)]
        crop[(slice(None), slice(None), *(slice(i, j) for i, j, _ in ranges))] = x[
            (slice(None), slice(None), *(slice(i - b, j - b) for i, j, b in ranges))]
    sn, sc, *ss = crop.strides
    cg = x.shape[1] // groups
    return xp.lib.stride_tricks.as_strided(
        crop, (groups, x.shape[0], *out, *kernel, cg),
        (sc * cg, sn, *(t * s for t, s in zip(ss, stride, strict=True)),
         *(t * d for t, d in zip(ss, dilation, strict=True)), sc))


def _phase(first: int, stride: int, lo: int, dilation: int, kernel: int) -> tuple[slice, slice | None, int, int]:
    """One dim of the gradient in x, for inputs ``first, first + stride, ...``.

    Those inputs meet only the taps k with ``first + lo - k * dilation`` divisible by the stride, an arithmetic
    progression; along it dY is read at unit stride with another dilation. Returns (their slice of dx, the slice of
    taps from last to first or None if there is none, the padding before dY, the dilation of dY).
    """
    ks = [k for k in range(kernel) if (first + lo - k * dilation) % stride == 0]
    where = slice(first, None, stride)
    if not ks:
        return where, None, 0, 1
    step = ks[1] - ks[0] if len(ks) > 1 else 1
    down = slice(ks[-1], ks[0] - 1 if ks[0] else None, -step)
    return where, down, -((first + lo - ks[-1] * dilation) // stride), max(1, step * dilation // stride)


def _work_dtype(dtype: np.dtype) -> np.dtype:
    """Half precision is multiplied in float32."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def _tile_rows(xp, cols: int, dtype: np.dtype) -> int:
    """Rows of one tile: a function of the layer only, never of the domain's size or cut."""
    rows = TILE_BYTES[xp.__name__] // (cols * dtype.itemsize)
    return 1 << max(5, min(9, rows.bit_length() - 1))
