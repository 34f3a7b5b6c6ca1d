"""Random numbers that are functions of (seed, stream, index): the data side of the package-wide rule.

Element i of a random stream is word i of `numpy.random.Philox(key=[seed, stream])` (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). Nothing here keeps a state, so every rank and every partition draws the same.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["normal", "permutation", "stream", "uniform", "words"]


def stream(purpose: str, *numbers: int) -> int:
    """
    Number of the random stream that serves one purpose, e.g. ``stream("flip", sample, epoch)``.

    Parameters
    ----------
    purpose : str
        What the numbers are for. Two purposes never share a stream (but for a 64-bit hash collision).
    *numbers : int
        What tells streams of one purpose apart: sample index, epoch, universe.

    Returns
    -------
    int
        In [0, 2**64); the same on every machine and in every process (no Python ``hash``).
    """
    name = "/".join([purpose, *(str(int(n)) for n in numbers)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def words(seed: int, stream_number: int, count: int) -> np.ndarray:
    """The first `count` 64-bit words of a stream, shape (count,), uint64."""
    key = np.array([seed % 2**64, stream_number], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def uniform(seed: int, stream_number: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1), float64: the top 53 bits of each word."""
    return (words(seed, stream_number, count) >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, stream_number: int, count: int) -> np.ndarray:
    """
    A permutation of ``range(count)``, int64: the order that sorts the words of the stream.

    Sorting words is used in place of `Generator.permutation`, whose results NumPy may change between releases.
    """
    return np.argsort(words(seed, stream_number, count), kind="stable")


def normal(seed: int, stream_number: int, shape: tuple[int, ...], box, dtype=np.float64) -> np.ndarray:
    """
    Block `box` of an array of standard normal numbers, each a function of (seed, stream, global index).

    Element i (row-major, global) comes from words 2i and 2i + 1 by Box and Muller's formula (Ann. Math. Stat. 29,
    1958), cosine branch.

    Parameters
    ----------
    shape : tuple of int
        Global shape.
    box : tuple of (start, stop)
        The block, one pair per dim.
    dtype : dtype
        Computed in float64 and rounded to this.
    """
    extent = [b - a for a, b in box]
    out = np.empty(extent, np.float64)
    if out.size == 0:
        return out.astype(dtype)
    split = len(shape)  # dims from `split` on are whole, so that their elements follow each other
    while split > 0 and extent[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    run = int(np.prod(extent[split:]))
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    key = np.array([seed % 2**64, stream_number], dtype=np.uint64)
    for index in np.ndindex(*extent[:split]):
        first = sum((box[d][0] + i) * int(strides[d]) for d, i in enumerate(index))
        if split < len(shape):
            first += box[split][0] * int(strides[split])
        generator = np.random.Philox(key=key).advance(2 * first // 4)
        skip = 2 * first % 4
        raw = generator.random_raw(skip + 2 * run)[skip:].reshape(run, 2)
        u = ((raw >> np.uint64(11)) + 1.0) * 2.0**-53  # in (0, 1], so that the logarithm is finite
        radius = np.sqrt(-2.0 * np.log(u[:, 0]))
        out[index] = (radius * np.cos(2.0 * np.pi * u[:, 1])).reshape(extent[split:])
    return out.astype(dtype)
