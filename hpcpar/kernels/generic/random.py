"""Random numbers as a function of (seed, stream, global index): the same under every partition.

A stream is the sequence of 64-bit words of ``numpy.random.Philox(key=[seed, stream])`` (Salmon et al. 2011), counted
from 0. Element i of a global array, i its row-major index in logical (torch) order, takes

- uniform: word i, ``(word >> 11) * 2**-53`` in [0, 1), which is what ``Generator(Philox(...)).random()`` draws;
- dropout mask: the same uniform number, kept where it is at least p;
- normal: words 2 i and 2 i + 1 as uniform numbers u, v: ``sqrt(-2 log(1 - u)) cos(2 pi v)`` (Box, Muller 1958).

A rank asks for its box and gets exactly the elements of the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Array, array_module, to_channels_last

Box = Sequence[tuple[int, int]]

#: Rows shorter than this are cut out of longer ones instead of being drawn one by one,
SHORT_RUN = 256
#: as long as no more than this many times the elements needed are drawn.
WASTE = 4


def random_words(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                 words: int = 1) -> np.ndarray:
    """The words of a box of a global array.

    Parameters
    ----------
    seed, stream : int
        0 to 2**64 - 1.
    shape_global : sequence of int
    box : sequence of (int, int), optional
        [lo, hi) per dim; default: the whole array.
    words : int
        Words an element takes.

    Returns
    -------
    uint64 array (*box sizes, words), C order.

    Raises
    ------
    ValueError
        If the box does not lie in the array.
    """
    shape = tuple(shape_global)
    box = check_box(shape, box)
    sizes = tuple(hi - lo for lo, hi in box)
    if 0 in sizes:
        return np.empty((*sizes, words), np.uint64)
    source = WordStream(seed, stream)
    strides = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    outer = _row_dims(sizes, strides)
    inner, inner_strides = sizes[outer:], strides[outer:]
    row_words = _hull(inner, inner_strides) * words
    out = np.empty((math.prod(sizes[:outer]), *inner, words), np.uint64)
    base = sum(lo * s for (lo, _), s in zip(box, strides, strict=True))
    for row, index in enumerate(np.ndindex(*sizes[:outer])):
        start = base + sum(i * s for i, s in zip(index, strides, strict=False))
        drawn = source.words(start * words, row_words)
        out[row] = np.lib.stride_tricks.as_strided(
            drawn, (*inner, words), (*(s * words * drawn.itemsize for s in inner_strides), drawn.itemsize))
    return out.reshape(*sizes, words)


def random_uniform(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                   dtype: Any = np.float64, like: Array = None) -> Array:
    """Uniform numbers in [0, 1) of a box of a global array.

    Parameters
    ----------
    seed, stream, shape_global, box
        As in `random_words`.
    dtype : float dtype
        Drawn as float64 and rounded; a number that would round up to 1 becomes the largest one below.
    like : array, optional
        The result is made by the module of this array. Words are always drawn on the host.

    Returns
    -------
    array of the box's sizes; channels last in memory if it has 3 to 5 dims.
    """
    return uniform_of(random_words(seed, stream, shape_global, box), dtype, like)


def random_normal(seed: int, stream: int, shape_global: Sequence[int], box: Box | None = None,
                  dtype: Any = np.float64, like: Array = None) -> Array:
    """Standard normal numbers of a box of a global array; arguments and result as of `random_uniform`."""
    return normal_of(random_words(seed, stream, shape_global, box, words=2), dtype, like)


def dropout_mask(seed: int, stream: int, shape_global: Sequence[int], box: Box | None, p: float,
                 like: Array = None) -> Array:
    """Bernoulli mask of a box of a global array: True (keep) with probability 1 - p.

    Parameters
    ----------
    seed, stream, shape_global, box, like
        As in `random_uniform`.
    p : float
        Probability of False, 0 to 1.

    Returns
    -------
    bool array of the box's sizes; channels last in memory if it has 3 to 5 dims.
    """
    return mask_of(random_words(seed, stream, shape_global, box), p, like)


class WordStream:
    """Random access to the words of one Philox stream."""

    def __init__(self, seed: int, stream: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, stream], np.uint64))
        self._block = 0  # blocks of four words consumed so far

    def words(self, start: int, count: int) -> np.ndarray:
        """Words [start, start + count) as uint64."""
        first, skip = divmod(start, 4)
        # advance counts modulo 2**256 and drops what is buffered, so going back is going forward
        self._bits.advance((first - self._block) % (1 << 256))
        drawn = self._bits.random_raw(skip + count)
        self._block = first + -(-(skip + count) // 4)
        return drawn[skip:]


def uniform_of(words: np.ndarray, dtype: Any, like: Array) -> Array:
    """Words (*sizes, 1) as uniform numbers."""
    u = np.asarray(_unit(words[..., 0])).astype(dtype)  # arithmetic makes a scalar of a 0-dim array
    np.minimum(u, np.nextafter(u.dtype.type(1), u.dtype.type(0)), out=u)
    return _deliver(u, like)


def normal_of(words: np.ndarray, dtype: Any, like: Array) -> Array:
    """Words (*sizes, 2) as standard normal numbers."""
    radius = np.sqrt(-2 * np.log1p(-_unit(np.asarray(words[..., 0], order="C"))))
    angle = _unit(np.asarray(words[..., 1], order="C")) * (2 * np.pi)
    return _deliver(np.asarray(radius * np.cos(angle)).astype(dtype), like)


def mask_of(words: np.ndarray, p: float, like: Array) -> Array:
    """Words (*sizes, 1) as a mask that is False with probability p."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_mask: p is {p}, a probability is between 0 and 1")
    threshold = math.ceil(p * 2**53) << 11  # (word >> 11) * 2**-53 >= p, without leaving the integers
    kept = words[..., 0] >= np.uint64(threshold) if threshold < 2**64 else np.zeros(words.shape[:-1], bool)
    return _deliver(kept, like)


def check_box(shape: tuple[int, ...], box: Box | None) -> tuple[tuple[int, int], ...]:
    """The box as a tuple, the whole array for None; ValueError if it does not lie in the array."""
    box = tuple((lo, hi) for lo, hi in box) if box is not None else tuple((0, n) for n in shape)
    if len(box) != len(shape) or any(not 0 <= lo <= hi <= n for (lo, hi), n in zip(box, shape, strict=True)):
        raise ValueError(f"box {box} does not lie in an array of shape {shape}")
    return box


def _unit(words: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) of 53 bits."""
    return (words >> np.uint64(11)) * 2.0**-53


def _deliver(a: np.ndarray, like: Array) -> Array:
    a = to_channels_last(a) if 3 <= a.ndim <= 5 else a
    return array_module(like).asarray(a)


def _hull(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of the global array from the first to the last of a box."""
    return sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1


def _row_dims(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """First dim of the rows that are drawn in one piece.

    A row is drawn from its first element to its last, so cut dims inside it waste words: none are wasted if the rows
    are long, a few if that saves drawing many short ones.
    """
    outer = len(sizes)
    while outer:
        length, longer = math.prod(sizes[outer:]), math.prod(sizes[outer - 1:])
        hull = _hull(sizes[outer - 1:], strides[outer - 1:])
        if hull > longer and (length >= SHORT_RUN or hull > WASTE * longer):
            break
        outer -= 1
    return outer
