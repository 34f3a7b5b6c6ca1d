"""How many bytes outlines would take: live now, and at most so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Ledger:
    """Bytes of the storage that arrays would have.

    Attributes
    ----------
    live, peak : int
        Bytes held now, and the largest number so far.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, nbytes: int) -> None:
        """Take storage into account, or give it back (negative)."""
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live


_ledgers: list[Ledger] = [Ledger()]


@contextmanager
def keeping() -> Iterator[Ledger]:
    """Yield a ledger of all storage made inside the block."""
    ledger = Ledger()
    _ledgers.append(ledger)
    try:
        yield ledger
    finally:
        _ledgers.remove(ledger)


class Storage:
    """The memory that an array and its views would share; it lives as long as any of them."""

    __slots__ = ("__weakref__", "_ledger", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ledger = _ledgers[-1]
        self._ledger.add(nbytes)

    def __del__(self) -> None:
        self._ledger.add(-self.nbytes)
