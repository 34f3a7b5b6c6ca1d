"""Signs of an array, one bit a number: all that the gradient of leaky ReLU needs of its argument.

The n numbers (W, C) of a line of a channels-last array take s = ceil(n / 8) bytes, and bit k of byte j is set where
number k s + j is positive: loops over whole runs of numbers, which vectorise, pack and unpack them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import Array, array_module, last, to_channels_last


def empty_signs(x: Array) -> Array:
    """Return room for the signs of x (N, C, *spatial): uint8 (N, *spatial[:-1], bytes), not initialised."""
    n, c, *spatial, width = x.shape
    return array_module(x).empty((n, *spatial, -(-width * c // 8)), np.uint8)


def pack_signs(x: Array, out: Array) -> Array:
    """Write which numbers of x are positive into what `empty_signs` made."""
    lines = last(to_channels_last(x))
    n, *spatial, width, c = lines.shape
    positive = array_module(x).zeros((*out.shape[:-1], 8 * out.shape[-1]), np.uint8)
    positive[..., : width * c] = lines.reshape(n, *spatial, width * c) > 0
    runs = positive.reshape(*out.shape[:-1], 8, out.shape[-1])
    for k in range(8):
        runs[..., k, :] <<= np.uint8(k)
    out[...] = runs.sum(axis=-2, dtype=np.uint8)
    return out


def unpack_signs(signs: Array, shape: Sequence[int]) -> Array:
    """Return as booleans of logical `shape` (N, C, *spatial) which numbers are positive."""
    n, c, *spatial, width = shape
    runs = array_module(signs).empty((*signs.shape[:-1], 8, signs.shape[-1]), bool)
    for k in range(8):
        runs[..., k, :] = signs & np.uint8(1 << k)
    lines = runs.reshape(*signs.shape[:-1], 8 * signs.shape[-1])[..., : width * c]
    whole = lines.reshape(n, *spatial, width, c)
    return whole.transpose(0, whole.ndim - 1, *range(1, whole.ndim - 1))
