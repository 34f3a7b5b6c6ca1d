"""The plan of one dim: what each rank borrows from whom, found by intersecting gather maps with owned blocks.

Both sides of a message derive it from the same sizes and maps, so nothing is negotiated. A message holds each needed
element once, in ascending order; whoever receives it expands repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from hpcpar.layout.blocks import overlapping, owned
from hpcpar.layout.maps import Map, Run, map_of_indices


@dataclass(frozen=True)
class Piece:
    """The part of a message along one dim: its length and how its elements are copied.

    In `DimPlan.recv` the runs lead from the message (src) to the buffer (dst), in `DimPlan.send` from the sender's own
    block (src) to the message (dst).
    """

    count: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class DimPlan:
    """What the rank at `coord` of `parts` needs of a dim of length `n`; made by `dim_plan`, compared by identity.

    Attributes
    ----------
    size : int
        Length of the buffer.
    block : (int, int)
        The global interval that this rank owns.
    own : tuple of Run
        Copies from the own block (src, counted from its start) to the buffer (dst).
    recv, send : mapping of int to Piece
        By coordinate, ascending; this rank itself is among them where it needs something of its own block, because
        along another dim the same piece may come from elsewhere.
    holes : tuple of (int, int)
        Intervals of the buffer that are FILL.
    padding : (int, int)
        Positions (before, after) that `without_padding` left to the local kernel.
    """

    n: int
    parts: int
    coord: int
    size: int
    block: tuple[int, int]
    own: tuple[Run, ...]
    recv: Mapping[int, Piece]
    send: Mapping[int, Piece]
    holes: tuple[tuple[int, int], ...]
    padding: tuple[int, int] = field(default=(0, 0))

    @property
    def length(self) -> int:
        """Length of the own block."""
        return self.block[1] - self.block[0]

    @property
    def is_identity(self) -> bool:
        """Whether the buffer is just the own block."""
        length = self.length
        return self.size == length and self.own == ((Run(0, 0, length),) if length else ())

    @cached_property
    def at_home(self) -> tuple[int, int]:
        """The longest interval of the buffer that is filled without a message: own elements and FILL."""
        arriving = sorted(
            (run.dst, run.dst + run.length) for q, piece in self.recv.items() if q != self.coord for run in piece.runs
        )
        best, end = (0, 0), 0
        for first, last in [*arriving, (self.size, self.size)]:
            if first - end > best[1] - best[0]:
                best = (end, first)
            end = last
        return best

    @cached_property
    def without_padding(self) -> DimPlan:
        """The plan whose buffer lacks FILL at its two ends; `padding` says how much the local kernel is to add."""
        before = self.holes[0][1] if self.holes and self.holes[0][0] == 0 else 0
        after = self.size - self.holes[-1][0] if self.holes and self.holes[-1][1] == self.size else 0
        if before == self.size:
            after = 0
        if not before and not after:
            return self

        def shifted(runs: Iterable[Run]) -> tuple[Run, ...]:
            return tuple(run._replace(dst=run.dst - before) for run in runs)

        size = self.size - before - after
        return DimPlan(
            self.n,
            self.parts,
            self.coord,
            size,
            self.block,
            shifted(self.own),
            {q: Piece(piece.count, shifted(piece.runs)) for q, piece in self.recv.items()},
            self.send,
            tuple((a - before, b - before) for a, b in self.holes if a >= before and b <= size + before),
            (before, after),
        )

    def __str__(self) -> str:
        a, b = self.block
        borrowed = ", ".join(f"{piece.count} from {q}" for q, piece in self.recv.items() if q != self.coord)
        lent = ", ".join(f"{piece.count} to {q}" for q, piece in self.send.items() if q != self.coord)
        kept = sum(run.length for run in self.own)
        filled = sum(last - first for first, last in self.holes)
        text = f"{self.coord} of {self.parts} owns [{a}, {b}) of {self.n}, buffer of {self.size}: {kept} own"
        text += f", {borrowed}" if borrowed else ""
        text += f", {filled} filled" if filled else ""
        text += f", padding {self.padding} left to the kernel" if any(self.padding) else ""
        return text + (f"; lends {lent}" if lent else "")


def dim_plan(n: int, parts: int, coord: int, map_of: Callable[[int], Map]) -> DimPlan:
    """Plan one dim.

    Parameters
    ----------
    n : int
        Global length of the dim.
    parts, coord : int
        Number of blocks and the index of this rank's block.
    map_of : callable
        ``map_of(q)`` is the gather map of the rank at coordinate q. It is asked for every q, and has to give the same
        answer on every rank.
    """
    mine = map_of(coord)
    a, b = owned(n, parts, coord)
    arriving: dict[int, list[Run]] = {}
    for run in mine.runs:
        for q, part in _by_owner(run, n, parts):
            arriving.setdefault(q, []).append(part)
    recv = {}
    for q in sorted(arriving):
        count, _, put = _message(arriving[q])
        recv[q] = Piece(count, put)
    send = {}
    for q in range(parts) if b > a else ():
        wanted = [part for run in map_of(q).runs for part in _within(run, a, b)]
        if wanted:
            count, take, _ = _message(wanted)
            send[q] = Piece(count, tuple(run._replace(src=run.src - a) for run in take))
    own = tuple(run._replace(src=run.src - a) for run in arriving.get(coord, ()))
    return DimPlan(n, parts, coord, mine.size, (a, b), own, recv, send, mine.holes())


@lru_cache(maxsize=4096)
def block_plan(builder: Callable[..., Map], n: int, parts: int, coord: int, out: int, *args: object) -> DimPlan:
    """Plan one dim for an operation whose output, of length `out`, is split into blocks like its input; cached.

    Parameters
    ----------
    builder : callable
        A constructor of maps, ``builder(n, o0, o1, *args)``: `window_map`, `transposed_map`, `pad_map`, ...
    n, parts, coord : int
        Length of the input, number of blocks, index of this rank's block.
    out : int
        Length of the output: the rank at coordinate q computes ``owned(out, parts, q)``.

    Examples
    --------
    >>> from hpcpar.layout.maps import window_map
    >>> print(block_plan(window_map, 8, 2, 0, 8, 3, 1, 1, 1))
    0 of 2 owns [0, 4) of 8, buffer of 6: 4 own, 1 from 1, 1 filled; lends 1 to 1
    """
    return dim_plan(n, parts, coord, lambda q: builder(n, *owned(out, parts, q), *args))


def _within(run: Run, a: int, b: int) -> Iterable[Run]:
    """Yield the part of a run that shows indices in ``[a, b)``."""
    dst, src, length, step = run
    if step == 0:
        if a <= src < b:
            yield run
        return
    if step > 0:
        first, last = -((src - a) // step), -((src - b) // step)
    else:
        first, last = -((b - 1 - src) // -step), -((a - 1 - src) // -step)
    first, last = max(first, 0), min(last, length)
    if first < last:
        yield Run(dst + first, src + step * first, last - first, step if last - first > 1 else 1)


def _by_owner(run: Run, n: int, parts: int) -> Iterable[tuple[int, Run]]:
    """Yield (rank, part of the run) for each rank that owns some of it, in the order of the buffer."""
    ends = run.src, run.src + run.step * (run.length - 1)
    ranks: Sequence[int] = overlapping(n, parts, min(ends), max(ends) + 1)
    for q in ranks if run.step >= 0 else reversed(ranks):
        for part in _within(run, *owned(n, parts, q)):
            yield q, part


def _message(runs: Sequence[Run]) -> tuple[int, tuple[Run, ...], tuple[Run, ...]]:
    """Return (count, take, put) of the message that holds what `runs` show, each index once and ascending.

    `take` leads from global indices to the message, `put` from the message to the positions of `runs`.
    """
    if len(runs) == 1:
        dst, src, length, step = runs[0]
        if step > 0:
            return length, (Run(0, src, length, step),), (Run(dst, 0, length),)
        if step == 0:
            return 1, (Run(0, src, 1),), (Run(dst, 0, length, 0),)
        last = src + step * (length - 1)
        return length, (Run(0, last, length, -step),), (Run(dst, length - 1, length, -1),)
    lo, hi = _hull(runs)
    if lo is not None:
        return hi - lo, (Run(0, lo, hi - lo),), tuple(run._replace(src=run.src - lo) for run in runs)
    shown = np.concatenate([Map(run.length, (run._replace(dst=0),)).indices() for run in runs])
    unique, inverse = np.unique(shown, return_inverse=True)
    take = map_of_indices(unique.tolist()).runs
    put: list[Run] = []
    at = 0
    for run in runs:
        part = map_of_indices(inverse[at : at + run.length].tolist()).runs
        put += [piece._replace(dst=piece.dst + run.dst) for piece in part]
        at += run.length
    return len(unique), take, tuple(put)


def _hull(runs: Sequence[Run]) -> tuple[int, int] | tuple[None, None]:
    """Return the interval of indices that the runs show together, or (None, None) if it has gaps."""
    spans = []
    for _, src, length, step in runs:
        if abs(step) > 1:
            return None, None
        last = src + step * (length - 1)
        spans.append((min(src, last), max(src, last) + 1))
    spans.sort()
    lo, hi = spans[0]
    for first, last in spans[1:]:
        if first > hi:
            return None, None
        hi = max(hi, last)
    return lo, hi
