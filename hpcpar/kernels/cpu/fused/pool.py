"""Pooling in one pass: whole lines of (W, C) are added, or compared window by window, with the channels innermost.

All kernels see (N, D, H, W, C) arrays, dense; missing spatial dims have size 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...arrays import Array, empty_channels_last, last, to_channels_last, zeros_channels_last
from ...generic.pool import Bounds, index_dtype, lowest, pool_sizes
from .jit import inner, kernel
from .resample import tap_sums, window_maxima

__all__ = [
    "avg_pool_backward", "avg_pool_forward", "max_pool_backward", "max_pool_forward", "sum_pool_backward",
    "sum_pool_forward", "tap_sums", "window_maxima",
]


@inner
def _sum_active(x, h, slope, out):
    """One line h of several planes (D, H, W * C), summed after leaky ReLU; a slope of 1 is none."""
    planes, size = x.shape[0], x.shape[2]
    if planes == 3:
        for i in range(size):
            a, b, c = x[0, h, i], x[1, h, i], x[2, h, i]
            a, b, c = a if a > 0 else a * slope, b if b > 0 else b * slope, c if c > 0 else c * slope
            out[i] = a + b + c
        return
    out[:] = 0
    for d in range(planes):
        for i in range(size):
            a = x[d, h, i]
            out[i] += a if a > 0 else a * slope


@inner
def _sum_lines(lines, begin, end, out):
    """Lines [begin, end) of a ring of lines, summed."""
    ring = lines.shape[0]
    if end - begin == 3:
        first, second, third = lines[begin % ring], lines[(begin + 1) % ring], lines[(begin + 2) % ring]
        for i in range(out.size):
            out[i] = first[i] + second[i] + third[i]
    elif end - begin == 2:
        first, second = lines[begin % ring], lines[(begin + 1) % ring]
        for i in range(out.size):
            out[i] = first[i] + second[i]
    else:
        out[:] = 0
        for k in range(begin, end):
            line = lines[k % ring]
            for i in range(out.size):
                out[i] += line[i]


@inner
def _pack(line, signs):
    """Set the bits of the positive numbers of a line, as `hpcpar.kernels.signs` has them."""
    run = signs.size
    signs[:] = 0
    for k in range(8):
        bit, part = np.uint8(1 << k), line[k * run:(k + 1) * run]
        for j in range(part.size):
            signs[j] |= bit if part[j] > 0 else np.uint8(0)


@kernel
def _average(x, kernel, stride, lo, scale_d, scale_h, scale_w, slope, signs, y):
    """Lines (W, C) are summed along D once, and kept for the windows that share them."""
    samples, depth, height, width, channels = x.shape
    out_d, out_h, out_w = y.shape[1], y.shape[2], y.shape[3]
    size = width * channels
    lines, line = np.empty((kernel[1], size), x.dtype), np.empty((width, channels), x.dtype)
    for n in range(samples):
        planes = x[n].reshape(depth, height, size)
        packed = depth if signs.size == 0 else 0
        for od in range(out_d):
            d0 = max(0, od * stride[0] - lo[0])
            d1 = max(d0, min(depth, od * stride[0] - lo[0] + kernel[0]))  # a negative end would count from the back
            summed = 0
            for oh in range(out_h):
                h0, h1 = max(0, oh * stride[1] - lo[1]), min(height, oh * stride[1] - lo[1] + kernel[1])
                for h in range(max(summed, h0), h1):
                    for d in range(max(packed, d0), d1):
                        _pack(planes[d, h], signs[n, d, h])
                    _sum_active(planes[d0:d1], h, slope, lines[h % kernel[1]])
                    summed = h + 1
                _sum_lines(lines, h0, h1, line.reshape(size))
                factor = scale_d[od] * scale_h[oh]
                for ow in range(out_w):
                    w0, w1 = max(0, ow * stride[2] - lo[2]), min(width, ow * stride[2] - lo[2] + kernel[2])
                    weight = factor * scale_w[ow]
                    target = y[n, od, oh, ow]
                    if w1 - w0 == 3:
                        for c in range(channels):
                            target[c] = (line[w0, c] + line[w0 + 1, c] + line[w0 + 2, c]) * weight
                    elif w1 - w0 == 2:
                        for c in range(channels):
                            target[c] = (line[w0, c] + line[w0 + 1, c]) * weight
                    else:
                        target[:] = 0
                        for w in range(w0, w1):
                            for c in range(channels):
                                target[c] += line[w, c]
                        for c in range(channels):
                            target[c] *= weight
            packed = max(packed, d1)


@inner
def _spread(g, first, end, scale, wide):
    """One plane (H, W', C) of the gradient spread along W to (H, W, C)."""
    for h in range(wide.shape[0]):
        for w in range(wide.shape[1]):
            w0, w1 = first[w], end[w]
            if w1 - w0 == 1:
                for c in range(wide.shape[2]):
                    wide[h, w, c] = g[h, w0, c] * scale[w0]
            elif w1 - w0 == 2:
                for c in range(wide.shape[2]):
                    wide[h, w, c] = g[h, w0, c] * scale[w0] + g[h, w0 + 1, c] * scale[w0 + 1]
            else:
                wide[h, w] = 0
                for ow in range(w0, w1):
                    for c in range(wide.shape[2]):
                        wide[h, w, c] += g[h, ow, c] * scale[ow]


@inner
def _merge(wide, begin, end, scale, factor, oh, out):
    """Line oh of planes [begin, end) of a ring of planes (D, H, W * C), each times its scale, summed."""
    ring = wide.shape[0]
    if end - begin == 2:
        first, second = wide[begin % ring, oh], wide[(begin + 1) % ring, oh]
        a, b = scale[begin] * factor, scale[begin + 1] * factor
        for i in range(out.size):
            out[i] = first[i] * a + second[i] * b
        return
    out[:] = 0
    for od in range(begin, end):
        line, a = wide[od % ring, oh], scale[od] * factor
        for i in range(out.size):
            out[i] += line[i] * a


@inner
def _gated(line, signs, slope, out):
    """A line times the gradient of leaky ReLU."""
    run = signs.size
    for k in range(8):
        bit, a, target = np.uint8(1 << k), line[k * run:(k + 1) * run], out[k * run:(k + 1) * run]
        for j in range(target.size):
            target[j] = a[j] if signs[j] & bit else a[j] * slope


@inner
def _gated_pair(first, second, signs, slope, out):
    """The sum of two lines times that gradient, in one pass."""
    run = signs.size
    for k in range(8):
        bit, target = np.uint8(1 << k), out[k * run:(k + 1) * run]
        a, b = first[k * run:(k + 1) * run], second[k * run:(k + 1) * run]
        for j in range(target.size):
            v = a[j] + b[j]
            target[j] = v if signs[j] & bit else v * slope


@kernel
def _average_backward(g, kernel, stride, lo, scale_d, scale_h, scale_w, slope, signs, dx):
    """Lines of g are spread along W once, (W, C) long, merged along D once, and kept for the inputs that share them."""
    samples, out_d, out_h, out_w, channels = g.shape
    depth, height, width = dx.shape[1], dx.shape[2], dx.shape[3]
    # planes, and lines of a plane, of g that one input plane, or line, is in
    planes, rows = (min(out_d, (kernel[0] + stride[0] - 1) // stride[0]), (kernel[1] + stride[1] - 1) // stride[1])
    size = width * channels
    wide, lines = np.empty((planes, out_h, width, channels), g.dtype), np.empty((rows, size), g.dtype)
    spread_planes = wide.reshape(planes, out_h, size)
    first, end = np.empty(width, np.int64), np.empty(width, np.int64)
    for w in range(width):
        first[w] = max(0, (w + lo[2] - kernel[2]) // stride[2] + 1)
        end[w] = min(out_w, (w + lo[2]) // stride[2] + 1)
    for n in range(samples):
        spread = 0
        for d in range(depth):
            d0 = max(0, (d + lo[0] - kernel[0]) // stride[0] + 1)
            d1 = min(out_d, (d + lo[0]) // stride[0] + 1)
            for od in range(max(spread, d0), d1):
                _spread(g[n, od], first, end, scale_w, wide[od % planes])
                spread = od + 1
            merged = 0
            for h in range(height):
                h0 = max(0, (h + lo[1] - kernel[1]) // stride[1] + 1)
                h1 = min(out_h, (h + lo[1]) // stride[1] + 1)
                for oh in range(max(merged, h0), h1):
                    _merge(spread_planes, d0, d1, scale_d, scale_h[oh], oh, lines[oh % rows])
                    merged = oh + 1
                target = dx[n, d, h].reshape(size)
                if signs.size and h1 - h0 == 2:
                    _gated_pair(lines[h0 % rows], lines[(h0 + 1) % rows], signs[n, d, h], slope, target)
                elif signs.size and h1 - h0 == 1:
                    _gated(lines[h0 % rows], signs[n, d, h], slope, target)
                else:
                    _sum_lines(lines, h0, h1, target)
                    if signs.size:
                        _gated(target, signs[n, d, h], slope, target)


@kernel
def _maximum(x, kernel, stride, dilation, first, end, floor, y, index):
    samples, depth, height, width, channels = x.shape
    out_d, out_h, out_w = y.shape[1], y.shape[2], y.shape[3]
    for n in range(samples):
        for od in range(out_d):
            for oh in range(out_h):
                for ow in range(out_w):
                    best, where = y[n, od, oh, ow], index[n, od, oh, ow]
                    fresh = True
                    for kd in range(kernel[0]):
                        d = od * stride[0] + kd * dilation[0]
                        if d < first[0] or d >= end[0]:
                            continue
                        for kh in range(kernel[1]):
                            h = oh * stride[1] + kh * dilation[1]
                            if h < first[1] or h >= end[1]:
                                continue
                            for kw in range(kernel[2]):
                                w = ow * stride[2] + kw * dilation[2]
                                if w < first[2] or w >= end[2]:
                                    continue
                                value, position = x[n, d, h, w], (d * height + h) * width + w
                                if fresh:
                                    for c in range(channels):
                                        best[c] = value[c]
                                        where[c] = position
                                    fresh = False
                                else:
                                    for c in range(channels):
                                        v = value[c]
                                        better = (v > best[c]) | (v != v)
                                        best[c] = v if better else best[c]
                                        where[c] = position if better else where[c]
                    if fresh:
                        for c in range(channels):
                            best[c] = floor
                            where[c] = -1


@kernel
def _scatter(g, index, dx):
    samples, positions, channels = g.shape
    for n in range(samples):
        for i in range(positions):
            for c in range(channels):
                at = index[n, i, c]
                if at >= 0:
                    dx[n, at, c] += g[n, i, c]


def max_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
                     out_shape: Sequence[int] | None = None, valid: Bounds | None = None) -> tuple[Array, Array]:
    out = pool_sizes(x.shape[2:], kernel, stride, dilation, out_shape)
    shape = (*x.shape[:2], *out)
    if x.dtype.char not in "fd" or 0 in shape:
        return NotImplemented
    valid = valid if valid is not None else [(0, n) for n in x.shape[2:]]
    y = empty_channels_last(shape, x.dtype)
    index = empty_channels_last(shape, index_dtype(math.prod(x.shape[2:])))
    _maximum(_five(to_channels_last(x)), _three(kernel, 1), _three(stride, 1), _three(dilation, 1),
             _three([max(0, lo) for lo, _ in valid], 0),
             _three([min(n, hi) for n, (_, hi) in zip(x.shape[2:], valid, strict=True)], 1),
             x.dtype.type(lowest(x.dtype)), _five(y), _five(index))
    return y, index


def max_pool_backward(g: Array, index: Array, x_shape: Sequence[int]) -> Array:
    dx = zeros_channels_last(x_shape, g.dtype)
    if g.dtype.char not in "fd":
        return NotImplemented
    if g.size and dx.size:
        n, c = g.shape[:2]
        rows = [last(to_channels_last(a)).reshape(n, math.prod(a.shape[2:]), c) for a in (g, index, dx)]
        _scatter(*rows)
    return dx


def avg_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
                     divisors: Sequence[Array], slope: float | None = None, out: Array | None = None,
                     signs: Array | None = None) -> Array:
    shape = (*x.shape[:2], *(len(d) for d in divisors))
    if x.dtype.char not in "fd":
        return NotImplemented
    y = out if out is not None else empty_channels_last(shape, x.dtype)
    if x.size == 0:
        y[...] = 0
    if x.size and y.size:
        _average(_five(to_channels_last(x)), _three(kernel, 1), _three(stride, 1), _three(padding, 0),
                 *_scales(divisors, x.dtype), x.dtype.type(1 if slope is None else slope), _four(signs),
                 _five(y))
    return y


def avg_pool_backward(g: Array, x_shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
                      padding: Sequence[int], divisors: Sequence[Array], signs: Array | None = None,
                      slope: float | None = None) -> Array:
    if g.dtype.char not in "fd":
        return NotImplemented
    dx = zeros_channels_last(x_shape, g.dtype) if g.size == 0 else empty_channels_last(x_shape, g.dtype)
    if g.size and dx.size:
        _average_backward(_five(to_channels_last(g)), _three(kernel, 1), _three(stride, 1), _three(padding, 0),
                          *_scales(divisors, g.dtype), g.dtype.type(1 if slope is None else slope),
                          _four(None if slope is None else signs), _five(dx))
    return dx


def sum_pool_forward(x: Array, kernel: Sequence[int], stride: Sequence[int]) -> Array:
    nd = x.ndim - 2
    out = pool_sizes(x.shape[2:], kernel, stride, (1,) * nd, None)
    return avg_pool_forward(x, kernel, stride, (0,) * nd, [np.ones(n) for n in out])


def sum_pool_backward(g: Array, x_shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> Array:
    return avg_pool_backward(g, x_shape, kernel, stride, (0,) * (g.ndim - 2), [np.ones(n) for n in g.shape[2:]])


def _five(a: Array) -> Array:
    """View of a channels-last array as (N, D, H, W, C)."""
    n, *spatial, c = last(a).shape
    return last(a).reshape(n, *(1,) * (3 - len(spatial)), *spatial, c)


def _four(signs: Array | None) -> Array:
    """Signs as (N, D, H, bytes); of size 0 for none."""
    if signs is None:
        return np.empty((0, 0, 0, 0), np.uint8)
    n, *spatial, size = signs.shape
    return signs.reshape(n, *(1,) * (2 - len(spatial)), *spatial, size)


def _three(values: Sequence[int], fill: int) -> tuple[int, int, int]:
    return (*(fill,) * (3 - len(values)), *(int(v) for v in values))


def _scales(divisors: Sequence[Array], dtype: np.dtype) -> list[Array]:
    ones = [np.ones(1)] * (3 - len(divisors))
    return [(1 / np.asarray(d, np.float64)).astype(dtype) for d in (*ones, *divisors)]
