"""Statistics and normalisation over channels.

Statistics are float64 and taken as (mean, M2), M2 the sum of squared deviations, in blocks merged by Chan's formula
(Chan, Golub, LeVeque 1983): stable however large the mean is against the spread, and ready to be merged across ranks.
Normalising subtracts the mean in two parts, ``(x - hi) - lo`` with ``mean = hi + lo`` in the dtype of x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..arrays import Array, array_module, empty_channels_last, is_device, per_channel, sample_rows
from .elementwise import leaky_relu, leaky_relu_backward

#: Elements of one block on a CPU: with its float64 copies it stays in the second-level cache.
BLOCK = 1 << 15


def merge_moments(counts: Sequence[int], means: Sequence[Array], m2s: Sequence[Array]) -> tuple[int, Array, Array]:
    """Moments of the union of blocks, merged in the order given; blocks of count 0 are skipped.

    Parameters
    ----------
    counts : sequence of int
    means, m2s : sequences of float64 arrays, all of one shape

    Returns
    -------
    (count, mean, m2); zeros for no elements.
    """
    n, mean, m2 = 0, means[0] * 0.0, m2s[0] * 0.0
    for count, other, spread in zip(counts, means, m2s, strict=True):
        if count == 0:
            continue
        total = n + count
        delta = other - mean
        mean = mean + delta * (count / total)
        m2 = m2 + spread + delta * delta * (n * count / total)
        n = total
    return n, mean, m2


def sample_moments(x: Array) -> tuple[Array, Array]:
    """Mean and M2 of each channel of each sample.

    Parameters
    ----------
    x : array (N, C, *spatial)

    Returns
    -------
    mean, m2 : float64 arrays (N, C); zeros where there are no positions. The count is the number of positions.
    """
    xp, rows = array_module(x), sample_rows(x)
    n, positions, c = rows.shape
    mean, m2 = xp.zeros((n, c)), xp.zeros((n, c))
    done = 0
    for a, b in _blocks(rows):
        part = rows[:, a:b].astype(np.float64)
        block_mean = part.mean(axis=1)
        part -= block_mean[:, None]
        part *= part
        done, mean, m2 = merge_moments((done, b - a), (mean, block_mean), (m2, part.sum(axis=1)))
    return mean, m2


def channel_moments(x: Array) -> tuple[Array, Array]:
    """Mean and M2 of each channel over samples and positions: float64 (C,) each; zeros for an empty array."""
    mean, m2 = sample_moments(x)
    if x.shape[0] == 0:
        return array_module(x).zeros(x.shape[1]), array_module(x).zeros(x.shape[1])
    return merge_equal(mean, m2, math.prod(x.shape[2:]), axis=0)


def group_moments(x: Array, groups: int) -> tuple[Array, Array]:
    """Mean and M2 of each group of neighbouring channels of each sample: float64 (N, groups) each.

    Raises
    ------
    ValueError
        If the channels do not divide into the groups.
    """
    n, c = x.shape[:2]
    if groups < 1 or c % groups:
        raise ValueError(f"group_moments: {c} channels do not divide into {groups} groups")
    mean, m2 = sample_moments(x)
    shape = (n, groups, c // groups)
    return merge_equal(mean.reshape(shape), m2.reshape(shape), math.prod(x.shape[2:]), axis=2)


def merge_equal(mean: Array, m2: Array, count: int, axis: int) -> tuple[Array, Array]:
    """Merge moments along an axis whose entries each stand for ``count`` elements."""
    if mean.shape[axis] == 0:
        return mean.sum(axis=axis), m2.sum(axis=axis)
    merged = mean.mean(axis=axis)
    delta = mean - np.expand_dims(merged, axis)
    return merged, m2.sum(axis=axis) + count * (delta * delta).sum(axis=axis)


def channel_sums(x: Array) -> Array:
    """Sum of each channel over samples and positions, accumulated in float64, in the dtype of x: (C,)."""
    return sample_rows(x).sum(axis=(0, 1), dtype=np.float64).astype(x.dtype)


def channel_normalize(
    x: Array,
    mean: Array,
    inv_std: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    slope: float | None = None,
    out: Array | None = None,
) -> Array:
    """``((x - hi) - lo) * (inv_std * weight) + bias``, then leaky ReLU if a slope is given.

    Parameters
    ----------
    x : array (N, C, *spatial)
    mean, inv_std : float64 arrays (C,) or (N, C)
    weight, bias : arrays (C,), optional
    slope : float, optional
        0 is ReLU.
    out : array, optional
        Written and returned; may be x itself.

    Returns
    -------
    array of the shape and dtype of x, channels last.
    """
    hi, lo, scale = split_scale(mean, inv_std, weight, x.dtype)
    y = empty_channels_last(x.shape, x.dtype, like=x) if out is None else out
    np.subtract(x, per_channel(hi, x.ndim), out=y)
    y -= per_channel(lo, x.ndim)
    y *= per_channel(scale, x.ndim)
    if bias is not None:
        y += per_channel(bias.astype(x.dtype, copy=False), x.ndim)
    return y if slope is None else leaky_relu(y, slope, out=y)


def channel_grad_sums(
    g: Array,
    x: Array,
    mean: Array,
    inv_std: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    slope: float | None = None,
) -> tuple[Array, Array]:
    """Sums of the gradient, and of gradient times normalised input.

    Parameters
    ----------
    g, x : arrays (N, C, *spatial)
        Gradient of the output of `channel_normalize`, and its input.
    mean, inv_std : float64 arrays (C,) or (N, C)
        As given to `channel_normalize`.
    weight, bias, slope : optional
        As given to `channel_normalize`, where leaky ReLU was fused into it: g is then the gradient behind it, and the
        sign of its argument is found again from x, which costs less than reading the output would.

    Returns
    -------
    sum of g, sum of g * xhat : float64 arrays of the shape of ``mean``; zeros for an empty array.
    """
    xp, rows, grads = array_module(x), sample_rows(x), sample_rows(g)
    n, _, c = rows.shape
    center, inv = (xp.broadcast_to(v, (n, c))[:, None] for v in (mean, inv_std))
    total, dot = xp.zeros((n, c)), xp.zeros((n, c))
    for a, b in _blocks(rows):
        part = grads[:, a:b]
        if slope is not None:
            argument = channel_normalize(rows[:, a:b].swapaxes(1, 2), mean, inv_std, weight, bias)
            part = leaky_relu_backward(part, argument.swapaxes(1, 2), slope)
        part = part.astype(np.float64)
        total += part.sum(axis=1)
        part *= (rows[:, a:b] - center) * inv
        dot += part.sum(axis=1)
    return (total, dot) if mean.ndim == 2 else (total.sum(axis=0), dot.sum(axis=0))


def channel_grad_input(
    g: Array,
    x: Array,
    mean: Array,
    inv_std: Array,
    weight: Array | None,
    s1_mean: Array,
    s2_mean: Array,
    bias: Array | None = None,
    slope: float | None = None,
) -> Array:
    """Gradient of `channel_normalize` in x, statistics included.

    ``dx = inv_std * (g * weight - s1_mean - xhat * s2_mean)``

    Parameters
    ----------
    g, x, mean, inv_std, weight, bias, slope
        As in `channel_grad_sums`.
    s1_mean, s2_mean : float64 arrays (C,) or (N, C)
        Means of ``g * weight`` and ``g * weight * xhat`` over the elements that share one statistic (over all ranks
        and, for group norm, over the channels of the group). Zeros where the statistics are constants (evaluation).

    Returns
    -------
    array of the shape and dtype of x, channels last.
    """
    hi, lo, scale = split_scale(mean, inv_std, weight, x.dtype)
    slant, shift = ((inv_std * inv_std * s2_mean).astype(x.dtype), (inv_std * s1_mean).astype(x.dtype))
    dx = empty_channels_last(x.shape, x.dtype, like=x)
    np.subtract(x, per_channel(hi, x.ndim), out=dx)
    dx -= per_channel(lo, x.ndim)
    dx *= per_channel(slant, x.ndim)
    dx += per_channel(shift, x.ndim)
    if slope is not None:
        g = leaky_relu_backward(g, channel_normalize(x, mean, inv_std, weight, bias), slope)
    return np.subtract(g * per_channel(scale, x.ndim), dx, out=dx)


def split_scale(mean: Array, inv_std: Array, weight: Array | None, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """The mean as ``hi + lo``, and ``inv_std * weight``, in ``dtype``."""
    hi = mean.astype(dtype)
    scale = inv_std if weight is None else inv_std * weight
    return hi, (mean - hi).astype(dtype), scale.astype(dtype)


def _blocks(rows: Array) -> Iterator[tuple[int, int]]:
    """Ranges of positions of (N, S, C) to work on at a time; one range on a device."""
    n, positions, c = rows.shape
    step = max(1, positions if is_device(rows) else BLOCK // max(1, n * c))
    for a in range(0, positions, step):
        yield a, min(a + step, positions)
