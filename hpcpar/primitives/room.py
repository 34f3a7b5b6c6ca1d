"""Room for halos: a block that a halo will surround is written where there is space around it, and is not copied then.

Who makes a block does not know who will use it. So the first time everything is copied, and the halo exchange tells the
maker of the block how many planes it wanted around it; from then on the maker leaves that room. The first exchange of a
block takes the room, and others copy, since each has its own halo. Nothing of this is seen from outside but the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from hpcpar.kernels import empty_channels_last, outline
from hpcpar.kernels.arrays import is_outline, last
from hpcpar.transport import exchange

Widths = tuple[tuple[int, int], ...]
"""Planes before and after a block, for each spatial dim."""


class Room:
    """What the maker of blocks, a pass of an operation, knows of those who use them.

    Attributes
    ----------
    widths : tuple of (int, int), or None
        The most planes that were wanted around its blocks; None as long as nobody has wanted any.
    """

    __slots__ = ("widths",)

    def __init__(self) -> None:
        self.widths: Widths | None = None

    def empty(self, shape: Sequence[int], dtype: Any, like: Any) -> Any | None:
        """Return an uninitialised block of logical `shape` (N, C, *spatial) with room, or None where there is none.

        Its users expect the block in one run of memory: so there is room along the first spatial dim of one sample.
        """
        if self.widths is None or shape[0] != 1 or 0 in shape or any(planes != (0, 0) for planes in self.widths[1:]):
            return None
        before, after = self.widths[0]
        buffer = empty_channels_last((*shape[:2], before + shape[2] + after, *shape[3:]), dtype, like)
        block = buffer[:, :, before : before + shape[2]]
        _enter(block, self, before, after)
        return block

    def made(self, block: Any) -> Any:
        """Return a block that was made, and listen for what is wanted around it."""
        if self.widths is None and block.ndim > 2 and block.shape[0] == 1 and last(block).flags.c_contiguous:
            _enter(block, self, 0, 0)
        return block


class _Entry(NamedTuple):
    memory: ref  # what the block and its views keep alive
    room: Room
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    before: int
    after: int


_entries: dict[int, _Entry] = {}


def take(block: Any, widths: Widths | None) -> Any | None:
    """Return the buffer that shows `widths` planes around a block, if its maker left that room and nobody has it yet.

    Parameters
    ----------
    block : array (N, C, *spatial)
    widths : tuple of (int, int), or None
        None if what is wanted does not show the block whole and in one piece.
    """
    entry = _entries.get(address(block))
    if entry is None or widths is None or (entry.shape, entry.strides) != (block.shape, block.strides):
        return None
    memory = entry.memory()
    if memory is None:
        return None
    del _entries[address(block)]
    known = entry.room.widths or widths
    entry.room.widths = tuple((max(a, c), max(b, d)) for (a, b), (c, d) in zip(widths, known, strict=True))
    (before, after), *rest = widths
    if before > entry.before or after > entry.after or any(planes != (0, 0) for planes in rest):
        return None
    if is_outline(block):
        n, c, d, *others = block.shape
        memory = outline.over(memory, (n, entry.before + d + entry.after, *others, c), block.dtype)
    buffer = memory.transpose(0, block.ndim - 1, *range(1, block.ndim - 1))
    first = entry.before - before
    return buffer[:, :, first : first + before + block.shape[2] + after]


def address(array: Any) -> int:
    """Return where an array begins in memory; of an outline, which has none, what stands for its memory."""
    if type(array) is np.ndarray:
        return exchange.address(array)
    return id(array.memory) if is_outline(array) else array.data.ptr


def _enter(block: Any, room: Room, before: int, after: int) -> None:
    """Memory is known by where it begins for as long as it lives, so the entry goes when it does."""
    key = address(block)
    memory = block.memory if is_outline(block) else block if block.base is None else block.base

    def gone(dead: ref) -> None:
        if key in _entries and _entries[key].memory is dead:
            del _entries[key]

    _entries[key] = _Entry(ref(memory, gone), room, block.shape, block.strides, before, after)
