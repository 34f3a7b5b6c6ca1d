"""A sequence of tokens in blocks: at which positions they are, and which blocks of keys a block of queries needs.

Pure arithmetic of lengths, orders and conditions, so every rank comes to the same answer for every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hpcpar.layout.blocks import owned

Interval = tuple[int, int]
Window = tuple[int, int] | None


def zigzag(n: int, p: int) -> np.ndarray:
    """Return the order in which `n` tokens lie so that `p` ranks have equal work under a causal condition.

    Element i, int64, is the position of the token at index i: tokens are laid by ``tokens[:, zigzag(n, p)]`` and taken
    back by its ``argsort``. Rank r, whose block has b tokens, takes the next b // 2 from the front of the sequence and
    the next b - b // 2 from its back, in turn r = 0, 1, ...: what early queries save, late ones of the same rank spend.

    Examples
    --------
    >>> zigzag(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    parts = [np.arange(a, b) for r in range(p) for a, b in intervals(n, p, r, "zigzag")]
    return np.concatenate([np.zeros(0, np.int64), *parts])


@lru_cache(maxsize=64)
def positions(n: int, turns: int) -> np.ndarray:
    """Return `zigzag` of `n` tokens for as many ranks as there are turns, made once; 1 is the natural order."""
    made = zigzag(n, turns)
    made.flags.writeable = False
    return made


def intervals(n: int, p: int, r: int, order: str) -> tuple[Interval, ...]:
    """Return the positions of the tokens of part `r` of `p`, as ascending intervals that are not empty."""
    a, b = owned(n, p, r)
    if order == "natural":
        found: tuple[Interval, ...] = ((a, b),)
    else:
        # the parts before took a tokens, half of each block from the front
        front = sum((hi - lo) // 2 for lo, hi in (owned(n, p, q) for q in range(r)))
        back, half = n - (a - front), (b - a) // 2
        found = ((front, front + half), (back - (b - a - half), back))
    return tuple((lo, hi) for lo, hi in found if lo < hi)


def sees(queries: Sequence[Interval], keys: Sequence[Interval], causal: bool, window: Window) -> bool:
    """Whether any of the queries sees any of the keys."""
    left, right = reach(causal, window)
    for a, b in queries:
        for c, d in keys:
            early = left is not None and d - 1 < a - left
            late = right is not None and c > b - 1 + right
            if not early and not late:
                return True
    return False


def reach(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """Return how far before and after its own position a query sees; None: without end."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def visible_pairs(queries: int, keys: int, causal: bool, window: Window) -> int:
    """Return how many pairs of a query and a key it sees there are, positions counting from 0 in both."""
    left, right = reach(causal, window)
    q = np.arange(queries)
    first = np.zeros_like(q) if left is None else np.clip(q - left, 0, keys)
    last = np.full_like(q, keys) if right is None else np.clip(q + right + 1, 0, keys)
    return int(np.maximum(last - first, 0).sum())


class Routes(NamedTuple):
    """How far each block travels: over how many ranks forward (to r + 1) and backward (to r - 1)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The longest way."""
        return max((*self.forward, *self.backward), default=0)


def routes(needed: Sequence[Sequence[bool]], sizes: Sequence[int]) -> Routes:
    """Return the routes on which all blocks come to those who need them, with the fewest words.

    Parameters
    ----------
    needed : sequence of sequence of bool
        ``needed[i][j]``: rank i needs block j.
    sizes : sequence of int
        Length of each block.

    Notes
    -----
    Either all blocks go round a ring, forward, as far as the last that needs them; or each goes along the line of ranks
    in both directions, which is shorter where a window keeps need close to home. Equal words: the ring, where every
    rank sends alike.
    """
    p = len(sizes)
    who = [[i for i in range(p) if needed[i][j] and i != j] for j in range(p)]
    ring = [max(((i - j) % p for i in who[j]), default=0) for j in range(p)]
    up = [max((i - j for i in who[j]), default=0) for j in range(p)]
    down = [max((j - i for i in who[j]), default=0) for j in range(p)]
    up, down = [max(n, 0) for n in up], [max(n, 0) for n in down]
    around = sum(n * size for n, size in zip(ring, sizes, strict=True))
    along = sum((a + b) * size for a, b, size in zip(up, down, sizes, strict=True))
    if along < around:
        return Routes(tuple(up), tuple(down))
    return Routes(tuple(ring), (0,) * p)
