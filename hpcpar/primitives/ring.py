"""Blocks that visit the ranks which need them, one hop at a time, and sums that come home behind them.

At step t a block is t hops from home. Whoever has it passes it on and works on it while it travels. What each rank adds
to the block's gradient follows one step behind, and goes home from the last rank at once; so gradients move exactly as
many words as blocks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hpcpar.grid import Grid
from hpcpar.layout.sequence import Routes
from hpcpar.transport import Comm
from hpcpar.transport.transfer import In, Out, Transfer

DIRECTIONS = (1, -1)
OPERATION = "ring"
_TAG = 51


def places(mesh: Grid, stack: Sequence[str]) -> list[int]:
    """Return for each block of a dim split by `stack` the rank that owns it, in ``mesh.comm(*stack)``."""
    coords: list[dict[str, int]] = [{}]
    for axis in stack:
        coords = [{**at, axis: i} for at in coords for i in range(mesh.shape[axis])]
    ranks = []
    for at in coords:
        rank = 0
        for axis in mesh.sort(list(stack)):
            rank = rank * mesh.shape[axis] + at[axis]
        ranks.append(rank)
    return ranks


class Ring:
    """The way of all blocks of one split dim, seen from one rank; pure arithmetic but for the communicator.

    Parameters
    ----------
    comm : Comm
    ranks : sequence of int
        The rank that owns each block.
    part : int
        This rank's own block.
    routes : Routes
    needed : sequence of sequence of bool
        ``needed[i][j]``: the owner of block i adds to the gradient of block j.
    """

    def __init__(
        self, comm: Comm, ranks: Sequence[int], part: int, routes: Routes, needed: Sequence[Sequence[bool]]
    ) -> None:
        self.comm, self.ranks, self.part, self.steps = comm, ranks, part, routes.steps
        self._count = len(ranks)
        self._hops = {1: routes.forward, -1: routes.backward}
        self._first = {d: [self._first_to_add(d, j, needed) for j in range(self._count)] for d in DIRECTIONS}

    def _first_to_add(self, d: int, j: int, needed: Sequence[Sequence[bool]]) -> int:
        """How many hops from home the first rank is that adds to a gradient."""
        hops = range(1, self._hops[d][j] + 1)
        return next((t for t in hops if needed[(j + d * t) % self._count][j]), self._count)

    def here(self, d: int, t: int) -> int | None:
        """Return the block that is here at step t >= 1, having come in direction d."""
        j = (self.part - d * t) % self._count
        return j if t <= self._hops[d][j] else None

    def _rank(self, part: int) -> int:
        return self.ranks[part % self._count]

    def visits(
        self, own: Any, sizes: Sequence[int], overlap: bool = True
    ) -> Iterator[tuple[int, list[Visitor], Passing | None]]:
        """Pass all blocks on, step by step, and show who is here. Collective; to be walked to its end.

        Parameters
        ----------
        own : array
            The own block, packed: 1-D and contiguous.
        sizes : sequence of int
            Elements of every block.
        overlap : bool
            Whether the messages of a step are under way while the caller works on it, or done before.

        Yields
        ------
        t : int
            The step.
        here : list of Visitor
            At step 0 the own block.
        moving : Passing or None
            The messages that go on meanwhile: to be tested now and then.
        """
        held: dict[int, Any] = dict.fromkeys(DIRECTIONS, own)
        for t in range(self.steps + 1):
            moving = self._pass_on(t, held, sizes, own) if t < self.steps else None
            if moving is not None and not overlap:
                moving.finish()
            if t == 0:
                here = [Visitor(1, self.part, own)]
            else:
                found = [(d, self.here(d, t)) for d in DIRECTIONS]
                here = [Visitor(d, j, held[d]) for d, j in found if j is not None]
            yield t, here, moving
            held = {} if moving is None else moving.wait()

    def _pass_on(self, t: int, held: Mapping[int, Any], sizes: Sequence[int], own: Any) -> Passing:
        """Send what is here at step t on its way and receive what will be here at step t + 1."""
        sends, receives, names = [], [], []
        for i, d in enumerate(DIRECTIONS):
            j = self.part if t == 0 else self.here(d, t)
            if j is not None and t < self._hops[d][j]:
                sends.append(Out(self._rank(self.part + d), _TAG + i, held[d]))
            j = self.here(d, t + 1)
            if j is not None:
                receives.append(In(self._rank(self.part - d), _TAG + i, sizes[j]))
                names.append(d)
        return Passing(Transfer(self.comm, sends, receives, own, OPERATION), names)

    def _hand_over(self, t: int, sums: Mapping[int, Any], sizes: Sequence[int], own: Any) -> Passing:
        """Send the sums of the blocks that were here at step t >= 1 after them, or home.

        What arrives has the key d where it goes with a block that is here at step t + 1, ``("home", d)`` where it is
        the sum of the own block.
        """
        sends, receives, names = [], [], []
        for i, d in enumerate(DIRECTIONS):
            j = self.here(d, t)
            if j is not None and t >= self._first[d][j]:
                home = t == self._hops[d][j]
                peer, tag = (self._rank(j), _TAG + 4 + i) if home else (self._rank(self.part + d), _TAG + 2 + i)
                sends.append(Out(peer, tag, sums[d]))
            j = self.here(d, t + 1)
            if j is not None and t >= self._first[d][j]:
                receives.append(In(self._rank(self.part - d), _TAG + 2 + i, sizes[j]))
                names.append(d)
            if t == self._hops[d][self.part]:
                receives.append(In(self._rank(self.part + d * t), _TAG + 4 + i, sizes[self.part]))
                names.append(("home", d))
        return Passing(Transfer(self.comm, sends, receives, own, OPERATION), names)


class Visitor(NamedTuple):
    """A block that is here: the direction it came in, whose it is, and its packed array."""

    direction: int
    block: int
    array: Any


class Homecoming:
    """Sums that ranks add to as blocks visit them, on their way home behind the blocks.

    Parameters
    ----------
    ring : Ring
    sizes : sequence of int
        Elements of every block's sum.
    total : array
        What this rank itself adds to the sum of its own block; the sum in the end.

    Attributes
    ----------
    under_way : Passing or None
        The messages that go on meanwhile.
    """

    def __init__(self, ring: Ring, sizes: Sequence[int], total: Any) -> None:
        self._ring, self._sizes, self.total = ring, sizes, total
        self._home: dict[int, Any] = {}
        self.under_way: Passing | None = None

    def hand_over(self, t: int, sums: Mapping[int, Any]) -> None:
        """After the work of step t: what this rank adds to the block of each direction, if it needs it. Collective."""
        together = dict(sums)
        self._take(together)
        self.under_way = self._ring._hand_over(t, together, self._sizes, self.total) if t else None

    def _take(self, sums: dict[int, Any]) -> None:
        """Wait for what others added, and put this rank's on top: in the order of the way, whatever arrives first."""
        for name, array in (self.under_way.wait() if self.under_way else {}).items():
            if not isinstance(name, int):
                self._home[name[1]] = array
            elif name in sums:
                array += sums[name]
                sums[name] = array
            else:
                sums[name] = array

    def finish(self) -> Any:
        """Return the sum of the own block."""
        self._take({})
        self.under_way = None
        for d in DIRECTIONS:
            if d in self._home:
                self.total += self._home[d]
        return self.total


class Passing:
    """A step of the ring under way."""

    def __init__(self, transfer: Transfer, names: Sequence[Any]) -> None:
        self._transfer, self._names = transfer, names
        self.test = transfer.test

    @property
    def busy(self) -> bool:
        """Whether there are messages."""
        return self._transfer.messages > 0

    def finish(self) -> None:
        """Return when all messages have left and arrived."""
        self._transfer.wait()

    def wait(self) -> dict[Any, Any]:
        """Return what arrived, by direction."""
        return dict(zip(self._names, self._transfer.wait(), strict=True))
