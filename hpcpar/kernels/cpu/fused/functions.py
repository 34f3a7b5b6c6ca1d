"""Scalar functions that the compiler can vectorise: without its vendor's library, numba's own would be
called one element at a time."""

from __future__ import annotations

import numpy as np

from .jit import inlined, typed, vectorised_sum

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693145751953125)  # 16 bits: times an exponent it is exact
_LN2_LOW = np.float32(0.6931471805599453 - 0.693145751953125)
_SQRT_HALF = np.float32(0.7071067811865476)
_SMALLEST, _LARGEST = np.float32(-87.33654), np.float32(88.72284)  # logarithms of the normal numbers' ends


@inlined
def exp32(x):
    """exp in float32, within 2 units in the last place: 2**n by its bits times a polynomial on [-ln 2 / 2, ln 2 / 2]
    (the scheme of Cody and Waite 1980; degree 6, fitted to a relative error of 3e-9). Below the normal numbers 0,
    above them infinity, NaN for NaN."""
    bounded = min(max(x, _SMALLEST), _LARGEST)
    n = np.floor(bounded * _LOG2E + np.float32(0.5))
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.38145394e-3)
    p = p * r + np.float32(8.36874545e-3)
    p = p * r + np.float32(4.16683890e-2)
    p = p * r + np.float32(1.66665211e-1)
    p = p * r + np.float32(4.99999940e-1)
    p = (p * r) * r + r + np.float32(1.0)
    # two factors, for 2**128 has no bits of its own
    half = np.int32(n) >> np.int32(1)
    rest = np.int32(n) - half
    y = p * np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    y = y * np.int32((rest + np.int32(127)) << np.int32(23)).view(np.float32)
    y = np.float32(0) if x < _SMALLEST else y
    y = np.float32(np.inf) if x > _LARGEST else y
    return x if x != x else y


@inlined
def sigmoid32(x):
    """``1 / (1 + exp(-x))`` in float32; the small tail keeps its relative accuracy."""
    return np.float32(1) / (np.float32(1) + exp32(-x))


@inlined
def normal_cdf32(x):
    """Distribution function of the normal distribution in float32, relative error below 1e-6 down to -6.

    ``erfc(a) = exp(-a**2) q(1 / (1 + 0.4 a))`` for a >= 0, q a polynomial of degree 9 fitted to a relative error of
    6e-8 on [0, 10].
    """
    a = abs(x) * _SQRT_HALF
    t = np.float32(1) / (np.float32(1) + np.float32(0.4) * a)
    q = np.float32(0.0412514957)
    q = q * t + np.float32(-0.140312399)
    q = q * t + np.float32(0.0839744982)
    q = q * t + np.float32(0.0879774923)
    q = q * t + np.float32(0.0797483804)
    q = q * t + np.float32(0.19339627)
    q = q * t + np.float32(0.201886901)
    q = q * t + np.float32(0.226443196)
    q = q * t + np.float32(0.225634227)
    tail = np.float32(0.5) * q * t * exp32(-a * a)
    return np.float32(1) - tail if x > np.float32(0) else tail


@vectorised_sum
def row_sum(row):
    """Sum of a row in any order."""
    total = row.dtype.type(0)
    for i in range(row.size):
        total += row[i]
    return total


@vectorised_sum
def row_dot(a, b):
    """Sum of products of two rows in any order."""
    total = a.dtype.type(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@vectorised_sum
def row_total(row):
    """Sum of a row in float64."""
    total = 0.0
    for i in range(row.size):
        total += row[i]
    return total


@vectorised_sum
def row_spread(row, center):
    """Sum of squared deviations from a center, in float64."""
    total = 0.0
    for i in range(row.size):
        d = np.float64(row[i]) - center
        total += d * d
    return total


@vectorised_sum
def row_gradients(g, x, weight, high, low):
    """Sums of ``g * weight`` and of ``g * weight * (x - mean)`` in float64, the mean in two parts."""
    first, second = 0.0, 0.0
    center = np.float64(high) + np.float64(low)
    for i in range(g.size):
        v = np.float64(g[i]) * np.float64(weight[i])
        first += v
        second += v * (np.float64(x[i]) - center)
    return first, second


@inlined
def row_max32(row):
    """Largest number of a float32 row, by the order of its bits as integers: that reduction vectorises.

    A NaN may be passed over; it shows in whatever is computed from its element.
    """
    bits = row.view(np.int32)
    top = np.int32(-(2**31))
    for i in range(bits.size):
        b = bits[i]
        top = max(top, b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


_LOG2E_64, _LN2_HIGH_64, _LN2_LOW_64 = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_SMALLEST_64, _LARGEST_64 = -708.3964185322641, 709.782712893384


@inlined
def exp64(x):
    """As `exp32` in float64: Taylor's polynomial of degree 13, whose remainder is below 1e-17."""
    bounded = min(max(x, _SMALLEST_64), _LARGEST_64)
    n = np.floor(bounded * _LOG2E_64 + 0.5)
    r = (bounded - n * _LN2_HIGH_64) - n * _LN2_LOW_64
    p = 1.6059043836821613e-10
    p = p * r + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 1.984126984126984e-04
    p = p * r + 1.388888888888889e-03
    p = p * r + 8.333333333333333e-03
    p = p * r + 4.1666666666666664e-02
    p = p * r + 1.6666666666666666e-01
    p = p * r + 0.5
    p = (p * r) * r + r + 1.0
    half = np.int64(n) >> np.int64(1)
    rest = np.int64(n) - half
    y = p * np.int64((half + np.int64(1023)) << np.int64(52)).view(np.float64)
    y = y * np.int64((rest + np.int64(1023)) << np.int64(52)).view(np.float64)
    y = 0.0 if x < _SMALLEST_64 else y
    y = np.inf if x > _LARGEST_64 else y
    return x if x != x else y


@inlined
def row_max64(row):
    """As `row_max32` in float64."""
    bits = row.view(np.int64)
    top = np.int64(-(2**63))
    for i in range(bits.size):
        b = bits[i]
        top = max(top, b ^ ((b >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF)))
    return np.int64(top ^ ((top >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF))).view(np.float64)


@inlined
def exp2_32(x):
    """2**x in float32 for x below 127, within 2 units in the last place: its whole part by bits times a polynomial of
    degree 6, fitted to a relative error of 2e-9 on [-1/2, 1/2]. Below the normal numbers 0, NaN for NaN."""
    bounded = max(x, np.float32(-126))
    n = np.floor(bounded + np.float32(0.5))
    r = bounded - n
    p = np.float32(1.5353362e-4)
    p = p * r + np.float32(1.3398875e-3)
    p = p * r + np.float32(9.618437e-3)
    p = p * r + np.float32(5.5503324e-2)
    p = p * r + np.float32(0.24022648)
    p = p * r + np.float32(0.6931472)
    p = p * r + np.float32(1.0)
    y = p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    y = np.float32(0) if x < np.float32(-126) else y
    return x if x != x else y


@inlined
def exp2_64(x):
    """As `exp2_32` in float64, by `exp64`."""
    return exp64(x * 0.6931471805599453)


def exponential2(x):
    """2**x inside kernels, by the type of x: `exp2_32` or `exp2_64`."""
    raise TypeError("for use in compiled functions")


def largest(row):
    """Largest number of a row inside kernels, by its type: `row_max32` or `row_max64`."""
    raise TypeError("for use in compiled functions")


@typed(exponential2)
def _exponential2(x):
    return (lambda x: exp2_32(x)) if x.bitwidth == 32 else (lambda x: exp2_64(x))


@typed(largest)
def _largest(row):
    return (lambda row: row_max32(row)) if row.dtype.bitwidth == 32 else (lambda row: row_max64(row))


@vectorised_sum
def exp2_row(row, shift):
    """Make a row ``2**(row - shift)`` and return its sum, in any order."""
    total = row.dtype.type(0)
    for i in range(row.size):
        e = exponential2(row[i] - shift)
        row[i] = e
        total += e
    return total
