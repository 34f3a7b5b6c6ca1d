"""Gather maps: which global input index each position of a rank's local buffer shows.

The plan of one dim is, for every rank, a map from buffer positions to global indices or FILL, and the buffer of several
dims is the product of their maps. Convolution, pooling, resampling, padding, slicing and moving between block rules
differ in the map alone; borrowing from several ranks, wrap-around, blocks that are not needed and corners follow from
intersecting maps with owned blocks. Maps are kept as runs, of which the usual one has one to three.

Every constructor has the form ``f(n, o0, o1, *arguments) -> Map``: what the output block ``[o0, o1)`` reads from a dim
of length n. Here are the maps of windowed operations; `index_maps` and `resample_maps` have the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FILL = -1
"""Marks, in `Map.indices`, a position that shows no input and takes the fill value."""

PAD_MODES = ("zeros", "reflect", "replicate", "circular")


class Run(NamedTuple):
    """Positions ``dst + j`` show index ``src + step * j`` for j in ``range(length)``; step may be 0 or negative."""

    dst: int
    src: int
    length: int
    step: int = 1


@dataclass(frozen=True)
class Map:
    """A gather map of one dim: `size` positions, shown by `runs` ascending in `dst`; positions not covered are FILL."""

    size: int
    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for run in self.runs:
            assert run.length > 0 and run.dst >= end, f"runs must ascend without overlap: {self.runs}"
            end = run.dst + run.length
        assert end <= self.size, f"runs end at {end} in a map of size {self.size}"

    @property
    def start(self) -> int:
        """Global index at the first position that is not FILL: where an interval map begins; 0 for an empty map."""
        return self.runs[0].src if self.runs else 0

    def indices(self) -> np.ndarray:
        """Return the map as an int64 array with `FILL` where nothing is shown."""
        index = np.full(self.size, FILL, np.int64)
        for dst, src, length, step in self.runs:
            index[dst : dst + length] = src + step * np.arange(length)
        return index

    def holes(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of positions that are FILL."""
        found, end = [], 0
        for run in self.runs:
            if run.dst > end:
                found.append((end, run.dst))
            end = run.dst + run.length
        return tuple([*found, (end, self.size)] if end < self.size else found)


def map_of_indices(index: Iterable[int]) -> Map:
    """Return the map that shows the given global indices, with `FILL` (any negative number) where nothing is shown."""
    values = [int(i) for i in index]
    return Map(len(values), tuple(_runs_of(values)))


def _runs_of(values: Sequence[int]) -> Iterable[Run]:
    at = 0
    while at < len(values):
        end = at + 1
        if values[at] >= 0:
            step = values[end] - values[at] if end < len(values) and values[end] >= 0 else 1
            while end < len(values) and values[end] >= 0 and values[end] - values[end - 1] == step:
                end += 1
            yield Run(at, values[at], end - at, step if end > at + 1 else 1)
        at = end


def interval_map(n: int, o0: int, o1: int) -> Map:
    """Return the map of a buffer that shows ``[o0, o1)``, which lies inside ``[0, n)``, and nothing else."""
    assert (o0 >= 0 and o1 <= n) or o0 >= o1, f"[{o0}, {o1}) is not inside a dim of length {n}"
    return Map(o1 - o0, (Run(0, o0, o1 - o0),)) if o1 > o0 else Map(0)


def window_map(n: int, o0: int, o1: int, k: int, s: int, d: int, lo: int, mode: str = "zeros") -> Map:
    """Return what outputs ``[o0, o1)`` of a window operation read.

    Parameters
    ----------
    n : int
        Length of the input.
    o0, o1 : int
        Output block.
    k, s, d : int
        Kernel size, stride and dilation.
    lo : int
        Padding before the first element. The padding after the last only sets the length of the output (`out_size`).
    mode : {"zeros", "reflect", "replicate", "circular"}
        What a position outside ``[0, n)`` shows; with zeros it is FILL.

    Notes
    -----
    Position j of the buffer is the padded coordinate ``o0 s - lo + j``, so the local kernel runs without padding on the
    buffer and output o begins at position ``(o - o0) s``. The same map with the length of dY in place of n is what
    block ``[o0, o1)`` of dX needs in a transposed convolution (its lo is that operation's padding).
    """
    if o1 <= o0:
        return Map(0)
    first = o0 * s - lo
    size = (o1 - o0 - 1) * s + d * (k - 1) + 1
    return Map(size, padded_runs(n, first, first + size, mode))


def padded_runs(n: int, u0: int, u1: int, mode: str) -> tuple[Run, ...]:
    """Return the runs that coordinates ``[u0, u1)``, 0 being the first element, show of a dim padded by `mode`.

    Raises
    ------
    ValueError
        An unknown mode, or an empty dim, of which a mode other than zeros has nothing to repeat.
    """
    if mode not in PAD_MODES:
        raise ValueError(f"padding mode {mode!r} is unknown; the modes are {', '.join(PAD_MODES)}")
    if mode == "zeros" or u0 >= u1:
        return _clipped([(0, 0, n, 1)], u0, u1)
    if n < 1:
        raise ValueError(f"padding mode {mode!r} needs at least one element to repeat, the dim is empty")
    if mode == "replicate":
        return _clipped([(min(u0, 0), 0, -min(u0, 0), 0), (0, 0, n, 1), (n, n - 1, max(u1 - n, 0), 0)], u0, u1)
    if mode == "circular":
        return _clipped([(turn * n, 0, n, 1) for turn in range(u0 // n, (u1 - 1) // n + 1)], u0, u1)
    if n == 1:
        return _clipped([(u0, 0, u1 - u0, 0)], u0, u1)
    # forth over all n elements, back over the n - 2 between the ends
    period = 2 * (n - 1)
    pieces = []
    for turn in range(u0 // period, (u1 - 1) // period + 1):
        pieces += [(turn * period, 0, n, 1), (turn * period + n, n - 2, n - 2, -1)]
    return _clipped(pieces, u0, u1)


def _clipped(pieces: Iterable[tuple[int, int, int, int]], u0: int, u1: int) -> tuple[Run, ...]:
    """Cut pieces (coordinate, src, length, step) to coordinates ``[u0, u1)`` and count positions from u0."""
    runs = []
    for at, src, length, step in pieces:
        begin, end = max(at, u0), min(at + length, u1)
        if begin < end:
            runs.append(Run(begin - u0, src + step * (begin - at), end - begin, step if end - begin > 1 else 1))
    return tuple(runs)


def transposed_map(n: int, o0: int, o1: int, k: int, s: int, d: int, lo: int) -> Map:
    """Return what outputs ``[o0, o1)`` of a transposed convolution read: an interval inside ``[0, n)``.

    Notes
    -----
    Input i adds to outputs ``i s - lo + d t`` for t in ``range(k)``. The interval begins at ``Map.start``; the paddings
    with which a local kernel maps it to the output block are `scatter_padding`. The same map with the length of dY in
    place of n is what block ``[o0, o1)`` of dX needs in a convolution with padding lo: the pulled halo of dY.
    """
    if o1 <= o0:
        return Map(0)
    first = max(0, -((d * (k - 1) - o0 - lo) // s))
    return interval_map(n, first, max(first, min(n, (o1 - 1 + lo) // s + 1)))


def scatter_padding(o0: int, o1: int, i0: int, i1: int, k: int, s: int, d: int, lo: int) -> tuple[int, int]:
    """Return the local paddings (before, after) with which inputs ``[i0, i1)`` scatter into outputs ``[o0, o1)``.

    A local transposed convolution, which is also a convolution's gradient of its input, of the buffer ``[i0, i1)``
    spans ``(i1 - i0 - 1) s + d (k - 1) + 1`` positions; cutting the paddings off its ends leaves the block. A negative
    padding adds positions that no input reaches. In a convolution's weight gradient they are the paddings of the own
    input block against the buffer of dY; a negative one crops the block.
    """
    before = o0 + lo - i0 * s
    span = (i1 - i0 - 1) * s + d * (k - 1) + 1 if i1 > i0 else 0
    return before, span - before - (o1 - o0)


def same_padding(k: int, d: int) -> tuple[int, int]:
    """Return the paddings (before, after) of ``padding="same"`` for kernel k with dilation d and stride 1."""
    total = d * (k - 1)
    return total // 2, total - total // 2


def out_size(
    kind: str, n: int, k: int, s: int = 1, d: int = 1, lo: int = 0, hi: int = 0, *, extra: int = 0, ceil: bool = False
) -> int:
    """Return the output length of a window operation; it can be zero or negative where nothing fits.

    Parameters
    ----------
    kind : {"conv", "transposed", "pool"}
        The operation; "pool" is "conv" with `ceil`.
    n, k, s, d, lo, hi : int
        Input length, kernel size, stride, dilation, paddings before and after.
    extra : int
        ``output_padding`` of the transposed convolution.
    ceil : bool
        Pooling's ``ceil_mode``: a last window may hang over the end if it starts inside the input or the padding
        before it.
    """
    reach = d * (k - 1) + 1
    if kind == "transposed":
        return (n - 1) * s - lo - hi + reach + extra
    if kind not in ("conv", "pool"):
        raise ValueError(f"kind {kind!r} is unknown; it is conv, transposed or pool")
    out = (n + lo + hi - reach + (s - 1 if ceil else 0)) // s + 1
    return out - 1 if ceil and (out - 1) * s >= n + lo else out
