"""Memory for large results, which come and go in the same sizes in every step.

A layer's result that is dropped in the forward pass leaves a hole as large as the gradient that comes in its place in
backward. malloc fills such holes with smaller arrays that stay, so that the gradient needs new memory: a step of
CosmoFlow then takes a quarter more than all of its arrays. Here a block of memory is shared only by arrays of at least
a quarter of its size. Blocks are kept for the next step; those too small for what is asked for next are given up before
a new one is made. ``HPCPAR_MALLOC=0`` leaves all of it to NumPy.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST = 16 << 20
"""Bytes of an array from which it gets its memory here."""
SHARE = 4
"""An array takes at least this part of its block: half a block that stays would cost more than a new one."""

_PAGE = 4096
_enabled = os.environ.get("HPCPAR_MALLOC") != "0"
_lock = threading.Lock()
_blocks: list[_Block] = []
_returned: deque[tuple[_Block, int, int]] = deque()  # by the garbage collector, whenever it likes


class _Block:
    """One piece of memory, of which ranges are free."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes + _PAGE, np.uint8)
        begin = self.memory.ctypes.data
        self.begin, self.nbytes = begin + -begin % _PAGE, nbytes
        self.free = [(0, nbytes)]

    def take(self, begin: int, nbytes: int) -> None:
        """Take the first bytes of the free range that begins there."""
        at = next(i for i, (start, _) in enumerate(self.free) if start == begin)
        end = self.free[at][1]
        self.free[at : at + 1] = [(begin + nbytes, end)] if begin + nbytes < end else []

    def give(self, begin: int, end: int) -> None:
        """Have a range back; it is joined with those beside it."""
        merged: list[tuple[int, int]] = []
        for a, b in sorted([*self.free, (begin, end)]):
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self.free = merged


class _Range:
    """The owner of an array's memory: it lives as long as the array and its views."""

    __slots__ = ("__array_interface__", "_block", "_place")

    def __init__(self, block: _Block, begin: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._block, self._place = block, (begin, begin + nbytes)
        self.__array_interface__ = {
            "version": 3, "shape": shape, "typestr": dtype.str, "data": (block.begin + begin, False),
        }  # fmt: skip

    def __del__(self, returned: deque = _returned) -> None:
        returned.append((self._block, *self._place))


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an uninitialised array in C order, as `numpy.empty` does."""
    dtype = np.dtype(dtype)
    wanted = math.prod(shape) * dtype.itemsize
    if wanted < LEAST or not _enabled or dtype.hasobject:
        return np.empty(shape, dtype)
    nbytes = wanted + -wanted % _PAGE
    with _lock:
        _take_back()
        ranges = [
            (end - begin, i, begin)
            for i, block in enumerate(_blocks)
            if block.nbytes <= SHARE * nbytes
            for begin, end in block.free
            if end - begin >= nbytes
        ]
        if ranges:
            _, i, begin = min(ranges)
            block = _blocks[i]
        else:
            _give_up(nbytes)
            block, begin = _Block(nbytes), 0
            _blocks.append(block)
        block.take(begin, nbytes)
    return np.asarray(_Range(block, begin, nbytes, tuple(shape), dtype))


def _forked() -> None:
    """In a forked child nobody gives back the lock that another thread held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def trim() -> None:
    """Give up all blocks that no array uses."""
    with _lock:
        _take_back()
        _give_up(math.inf)


def held() -> int:
    """Return the bytes of all blocks, in use or not."""
    return sum(block.nbytes for block in _blocks)


def _take_back() -> None:
    """Have back what the garbage collector returned."""
    while _returned:
        block, begin, end = _returned.popleft()
        block.give(begin, end)


def _give_up(most: float) -> None:
    """Forget unused blocks of at most so many bytes."""
    _blocks[:] = [b for b in _blocks if b.nbytes > most or b.free != [(0, b.nbytes)]]
