"""Random numbers that are functions of (seed, stream, index): the data side of the package-wide rule.

Element i of a random stream is word i of `numpy.random.Philox(key=[seed, stream])` (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). Nothing here keeps a state, so every rank and every partition draws the same.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["permutation", "stream", "uniform", "words"]


def stream(purpose: str, *numbers: int) -> int:
    """Number of the random stream that serves one purpose, e.g. ``stream("flip", sample, epoch)``.

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
    """A permutation of ``range(count)``, int64: the order that sorts the words of the stream.

    Sorting words is used in place of `Generator.permutation`, whose results NumPy may change between releases.
    """
    return np.argsort(words(seed, stream_number, count), kind="stable")
