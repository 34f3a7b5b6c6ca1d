"""The byte counter: every message of the package is entered here, to be compared with closed forms by tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Tally:
    """Messages and bytes that this rank sent for one operation along one set of axes."""

    messages: int = 0
    bytes: float = 0.0

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.messages - other.messages, self.bytes - other.bytes)


class Counter:
    """Totals since the start of the process, keyed by ``(operation, communicator name)``.

    Notes
    -----
    Point-to-point operations enter the bytes sent. Collectives enter what a bandwidth-optimal algorithm sends from each
    rank (all-reduce ``2 (p - 1) / p`` of the array, all-gather and reduce-scatter what is missing or given away), since
    what the MPI library really does is its own affair; these are the closed forms of the literature. Bytes are those
    that travel: sums and extremes of half precision count 4 an element, as they are sent.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], Tally] = {}
        # the totals, and what `counting` asked for: sums of their own, as differences of totals would be rounded
        self._sums: list[dict[tuple[str, str], Tally]] = [self._totals]

    def record(self, operation: str, comm_name: str, messages: int, bytes_sent: float) -> None:
        """Enter one operation along the axes ``comm_name`` (joined by ``+``)."""
        for sums in self._sums:
            tally = sums.get((operation, comm_name))
            if tally is None:
                tally = sums[operation, comm_name] = Tally()
            tally.messages += messages
            tally.bytes += bytes_sent

    def snapshot(self) -> dict[tuple[str, str], Tally]:
        """Return a copy of the totals."""
        return {key: Tally(t.messages, t.bytes) for key, t in self._totals.items()}

    @contextmanager
    def counting(self) -> Iterator[dict[tuple[str, str], Tally]]:
        """Yield a dictionary that holds what the block has sent so far, and after it what it sent in all."""
        sums: dict[tuple[str, str], Tally] = {}
        self._sums.append(sums)
        try:
            yield sums
        finally:
            self._sums = [held for held in self._sums if held is not sums]
            for key in [key for key, tally in sums.items() if not tally.messages and not tally.bytes]:
                del sums[key]


counter = Counter()
record = counter.record
snapshot = counter.snapshot
counting = counter.counting
