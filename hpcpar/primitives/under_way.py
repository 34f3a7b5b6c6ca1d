"""Changes of layout under way while the program goes on.

A move is started where its array is known and waited for where its result is needed. Messages progress only inside MPI
calls, so what computes meanwhile calls `progress` now and then. Whether overlap is on decides only when the wait comes,
at once or late: the calls are the same, and so are the bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcpar.primitives import repartition
from hpcpar.primitives.steps import Started
from hpcpar.signature import Signature


class _Settings:
    overlap = os.environ.get("HPCPAR_OVERLAP", "1") != "0"


flying: list[Move] = []
"""Moves that were started and not waited for, in order; the same on all ranks of a mesh."""

observers: list[Callable[[str, Any], None]] = []
"""Called as ``observer(event, subject)``: "start" and "end" of a `Move`, "piece" of a product cut for `progress`."""


@contextmanager
def overlap(enabled: bool) -> Iterator[None]:
    """Within the block, wait for moves where they are started (False) or where their results are needed (True).

    The environment variable ``HPCPAR_OVERLAP=0`` turns it off outside of any block.
    """
    before, _Settings.overlap = _Settings.overlap, enabled
    try:
        yield
    finally:
        _Settings.overlap = before


class Move:
    """A repartition that was started by making this; `hpcpar.primitives.repartition.move` with a wait of its own.

    Parameters
    ----------
    array : array
        This rank's shard under `source`; not to be changed before `wait` returns.
    source, target : Signature

    Notes
    -----
    Local steps before the first collective are done at once, what comes after it in `wait`. A general exchange of
    blocks is not left to fly: it is complete from the start.
    """

    __slots__ = ("_rest", "_started", "array", "result", "source", "target")

    def __init__(self, array: Any, source: Signature, target: Signature) -> None:
        self.array, self.source, self.target = array, source, target
        self.result: Any = None
        self._started: Started | None = None
        at, steps = array, repartition.plan(source, target).steps
        for number, step in enumerate(steps):
            if hasattr(step, "start"):
                self._started, self._rest = step.start(at), steps[number + 1 :]
                break
            at = step(at)
        else:
            self._complete(at)
            return
        flying.append(self)
        notify("start", self)
        if not _Settings.overlap:
            self.wait()

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether they have arrived."""
        return self._started is None or self._started.message.test()

    def wait(self) -> Any:
        """Return this rank's shard under `target`; repeated calls return it again.

        Raises
        ------
        RuntimeError
            The move was given up after an error.
        """
        if self._started is not None:
            at = self._land()
            for step in self._rest:
                at = step(at)
            self._complete(at)
        if self.result is None:
            raise RuntimeError("what a move would have brought is gone: it was given up after an error")
        return self.result

    def abandon(self) -> None:
        """Wait for the messages and drop them."""
        if self._started is not None:
            self._land()

    def _land(self) -> Any:
        started, self._started = self._started, None
        flying.remove(self)
        at = started.finish(started.message.wait())
        notify("end", self)
        return at

    def _complete(self, result: Any) -> None:
        self.result = result
        for observer in repartition.observers:
            observer(self.array, self.source, result, self.target)
        self.array = None


def notify(event: str, subject: Any) -> None:
    """Tell the observers of this module."""
    for observer in observers:
        observer(event, subject)


def progress() -> None:
    """Give MPI a chance to move the bytes of all moves under way."""
    for move in flying:
        move.test()


def finish() -> None:
    """Wait for all moves under way, in the order in which they were started."""
    while flying:
        flying[0].wait()


def abandon() -> None:
    """End all moves under way without a use for their results: after an error, which all ranks meet."""
    while flying:
        flying[0].abandon()
