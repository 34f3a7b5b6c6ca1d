"""Computing the inside of a block while its halo travels.

Two things are kept apart. *Tiling* decides whether a block is cut at all: into pieces of the interior, whose windows
need nothing borrowed, and the boxes of the rim. It belongs to the plan and may change bits, since libraries round a cut
product otherwise than a whole one. *Overlap* decides whether the interior is computed before the messages are waited
for or after. It moves only the wait, so results have the same bits with it and without.

Messages progress only inside MPI calls, so the interior is computed in pieces with a test between them.

Where "auto" draws the line is an estimate from round numbers, and was never measured: there has been no run on several
nodes yet. The network is taken to carry 10 GB/s for each rank, somewhat less than the 12.5 of a 100 Gbit/s link that a
rank has to itself; more than a rank gets where many share it. A rank is taken to compute 50 GFLOP/s, less than half of
what cores reached in float32 (docs/performance.md), and the rim to run at half the speed of a whole block; a rank with
a GPU is far off these figures. What was measured is the case of one node: there cutting never paid, so "auto" leaves
blocks whole. The choice changes speed and rounding, nothing else: on a machine of several nodes time
``HPCPAR_TILING=split`` beside ``whole``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

from hpcpar.layout.interior import Interval, rim, windows_inside
from hpcpar.layout.maps import scatter_padding, transposed_map
from hpcpar.ops.spatial import Halo
from hpcpar.primitives import under_way
from hpcpar.primitives.channel import Pending

PIECES = 16
"""Into how many pieces, at most, the interior is cut."""

TILINGS = ("auto", "split", "whole")

NETWORK_BYTES_PER_SECOND = 10e9
"""What a rank is taken to send to other nodes, for the choice in "auto"; see this module."""
RANK_FLOPS_PER_SECOND = 50e9
"""What a rank is taken to compute, likewise."""


class _Settings:
    tiling = os.environ.get("HPCPAR_TILING", "auto")
    overlap = os.environ.get("HPCPAR_OVERLAP", "1") != "0"


if _Settings.tiling not in TILINGS:
    raise ValueError(f"HPCPAR_TILING is one of {', '.join(TILINGS)}, got {_Settings.tiling!r}")


@contextmanager
def tiling(how: str) -> Iterator[None]:
    """Within the block, cut convolutions into interior and rim as `how` says. Equal on all ranks.

    Parameters
    ----------
    how : {"auto", "split", "whole"}
        With "auto" a block is cut where ranks that share the positions are on several nodes, the interior is at least
        half of the block, and the exchange is estimated to take longer than the rim. The environment variable
        ``HPCPAR_TILING`` sets the value outside of any block.
    """
    if how not in TILINGS:
        raise ValueError(f"tiling is one of {', '.join(TILINGS)}, got {how!r}")
    before, _Settings.tiling = _Settings.tiling, how
    try:
        yield
    finally:
        _Settings.tiling = before


@contextmanager
def overlap(enabled: bool) -> Iterator[None]:
    """Within the block, wait for halos before the interior (False) or after it; the same bits either way.

    So it is with other messages that a plan overlaps (`hpcpar.primitives.under_way`).

    The environment variable ``HPCPAR_OVERLAP=0`` turns it off outside of any block.
    """
    before, _Settings.overlap = _Settings.overlap, enabled
    try:
        with under_way.overlap(enabled):
            yield
    finally:
        _Settings.overlap = before


def overlapping() -> bool:
    """Whether work is done while messages travel."""
    return _Settings.overlap


class Tile(NamedTuple):
    """One box of the result: where it lies, what it reads of the buffer, and the paddings of the kernel on it."""

    out: tuple[slice, ...]
    source: tuple[slice, ...]
    padding: tuple[tuple[int, int], ...]


class Tiles:
    """The boxes of one block of results.

    Parameters
    ----------
    shape : sequence of int
        Spatial lengths of the block.
    inner : sequence of (int, int)
        The part of it that needs nothing borrowed.
    reads : callable
        From a dim and an interval of results there to (interval of the buffer, padding of the kernel).
    """

    __slots__ = ("interior", "part", "rim")

    def __init__(
        self,
        shape: Sequence[int],
        inner: Sequence[Interval],
        reads: Callable[[int, int, int], tuple[Interval, tuple[int, int]]],
    ) -> None:
        def tile(box: Sequence[Interval]) -> Tile:
            read = [reads(d, a, b) for d, (a, b) in enumerate(box)]
            source = tuple(slice(*interval) for interval, _ in read)
            return Tile(tuple(slice(a, b) for a, b in box), source, tuple(padding for _, padding in read))

        empty = any(b <= a for a, b in inner)
        self.interior = [] if empty else [tile(box) for box in _pieces(inner)]
        self.rim = [tile(box) for box in rim([(0, n) for n in shape], inner)]
        self.part = 0.0 if empty or 0 in shape else prod(b - a for a, b in inner) / prod(shape)

    def run(self, pending: Pending, compute: Callable[[Any, Tile], None]) -> Any:
        """Compute all boxes, the interior while the messages travel; return the complete buffer."""
        if not _Settings.overlap:
            pending.wait()
        for tile in self.interior:
            compute(pending.buffer, tile)
            pending.test()
        buffer = pending.wait()
        for tile in self.rim:
            compute(buffer, tile)
        return buffer


def _pieces(inner: Sequence[Interval]) -> list[list[Interval]]:
    """Cut the interior along its first dim that is long enough."""
    lengths = [b - a for a, b in inner]
    d = next((d for d, n in enumerate(lengths) if n >= PIECES // 2), lengths.index(max(lengths)))
    a, n = inner[d][0], lengths[d]
    count = min(PIECES, n)
    edges = [a + i * n // count for i in range(count + 1)]
    return [[*inner[:d], (lo, hi), *inner[d + 1 :]] for lo, hi in zip(edges, edges[1:], strict=False)]


def window_tiles(halo: Halo, shape: Sequence[int], steps: Sequence[tuple[int, int, int, int]]) -> Tiles:
    """Return the tiles of a convolution that reads the buffer of `halo`; `steps` are (kernel, stride, dilation, lo)."""
    sizes = [plan.size - sum(pad) for plan, pad in zip(halo.plans, halo.padding, strict=True)]
    inner = [
        windows_inside(*plan.at_home, n, k, s, d)
        for plan, n, (k, s, d, _) in zip(halo.plans, shape, steps, strict=True)
    ]

    def reads(dim: int, a: int, b: int) -> tuple[Interval, tuple[int, int]]:
        k, s, d, _ = steps[dim]
        size = sizes[dim]
        first = a * s - halo.padding[dim][0]
        last = first + (b - a - 1) * s + d * (k - 1) + 1
        lo, hi = min(max(-first, 0), last - first), min(max(last - size, 0), last - first)
        return (min(max(first, 0), size), max(min(last, size), 0)), (lo, hi)

    return Tiles(shape, inner, reads)


def scatter_tiles(
    halo: Halo, block: Sequence[Interval], steps: Sequence[tuple[int, int, int, int]]
) -> Tiles:
    """Return the tiles of a transposed convolution, or gradient of x, of global box `block` that reads `halo`."""
    lengths = [plan.n for plan in halo.plans]
    begins = [
        transposed_map(n, *interval, *step).start for n, interval, step in zip(lengths, block, steps, strict=True)
    ]

    def reads(dim: int, a: int, b: int) -> tuple[Interval, tuple[int, int]]:
        first, last = block[dim][0] + a, block[dim][0] + b
        needed = transposed_map(lengths[dim], first, last, *steps[dim])
        start = needed.start if needed.size else begins[dim]
        inside = start - begins[dim]
        return (inside, inside + needed.size), scatter_padding(first, last, start, start + needed.size, *steps[dim])

    inner = []
    for dim, (plan, (a, b)) in enumerate(zip(halo.plans, block, strict=True)):
        home = plan.at_home
        good = [t for t in range(b - a) if _within(reads(dim, t, t + 1)[0], home)]
        inner.append((good[0], good[-1] + 1) if good and good[-1] - good[0] + 1 == len(good) else (0, 0))
    return Tiles([b - a for a, b in block], inner, reads)


def _within(needed: Interval, home: Interval) -> bool:
    return needed[0] >= needed[1] or (home[0] <= needed[0] and needed[1] <= home[1])


class Schedule:
    """Tiles made when they are first needed, and the choice whether to use them.

    Parameters
    ----------
    halo : Halo
    make : callable
        Returns the `Tiles`.
    flops : float
        Floating point operations for the whole block.
    words : int
        Elements borrowed for one element of the plans' dims: samples times channels of the buffer.
    """

    __slots__ = ("_far", "_make", "_tiles", "flops", "halo", "words")

    def __init__(self, halo: Halo, make: Callable[[], Tiles], flops: float, words: int) -> None:
        self.halo, self.flops, self.words = halo, flops, words
        self._make, self._tiles = make, None
        self._far = _crosses_nodes(halo)

    @property
    def tiles(self) -> Tiles:
        """The tiles of this rank's block."""
        if self._tiles is None:
            self._tiles = self._make()
        return self._tiles

    def chosen(self, itemsize: int) -> Tiles | None:
        """Return the tiles if the block is to be cut, else None."""
        how = _Settings.tiling
        if how == "whole" or self.halo.part is not None or (how == "auto" and not self._far):
            return None
        if how == "split":
            return self.tiles
        return self.tiles if self.pays(itemsize) else None

    def pays(self, itemsize: int) -> bool:
        """Whether the exchange is estimated to take longer than the rim, which runs at half speed."""
        tiles = self.tiles
        if tiles.part < 0.5:
            return False
        borrowed = prod(plan.size for plan in self.halo.plans) - prod(plan.length for plan in self.halo.plans)
        exchange = max(borrowed, 0) * self.words * itemsize / NETWORK_BYTES_PER_SECOND
        return exchange > 2 * (1 - tiles.part) * self.flops / RANK_FLOPS_PER_SECOND


def _crosses_nodes(halo: Halo) -> bool:
    """Whether ranks that share the split positions are on several nodes."""
    mesh, axes = halo.mesh, {a for stack in halo.stacks for a in stack}
    if not axes or mesh.virtual:
        return False
    hosts = mesh.node.hosts
    members = mesh.members(*axes)
    return len({hosts[r] for r in members}) > 1
