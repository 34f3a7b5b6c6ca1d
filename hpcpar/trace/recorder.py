"""The recorder: where spans are kept while the program runs. Knows nothing of operations, messages or files."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter_ns as now
from typing import Any, NamedTuple

from hpcpar import scope

CATEGORIES = {
    "step": "one optimizer step",
    "phase": "forward, backward, optimizer, validation, checkpoint",
    "operation": "an operation of the tape: what is not spent in its kernels and messages is NumPy and Python",
    "compute": "a kernel or a matrix product",
    "halo": "packing, sending and unpacking planes of neighbours",
    "reduction": "sums: all-reduce, reduce-scatter, gradients",
    "message": "all other messages: gathers, changes of layout, agreement",
    "wait": "waiting for a message that was started before",
    "io": "reading batches, writing checkpoints and results",
    "flight": "a message under way, from its start to the end of waiting for it",
}
"""What spans are of."""

MESSAGES = ("halo", "reduction", "message", "wait")
"""Categories whose time a rank spends in messages, where nothing is computed meanwhile."""


class Event(NamedTuple):
    """One span.

    Attributes
    ----------
    begin, end : int
        Nanoseconds of this process's clock.
    category : str
        A key of `CATEGORIES`.
    name : str
    module : str
        Full name of the module it ran for, forward or backward; "" outside of any.
    phase : str
    thread : int
        Identifier of the thread.
    facts : tuple
        Of a message (axes, bytes sent, number among the collectives along these axes or -1), of an operation (floating
        point operations of all ranks,); () for others.
    """

    begin: int
    end: int
    category: str
    name: str
    module: str
    phase: str
    thread: int
    facts: tuple = ()


class Recorder:
    """Keeps the last spans.

    Parameters
    ----------
    capacity : int
        How many spans are kept; older ones are dropped, and counted.

    Attributes
    ----------
    main : int
        Identifier of the thread that made it.
    phase : str
        What the program is at.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)
        self.added = 0
        self.main = get_ident()
        self.phase = ""

    @property
    def dropped(self) -> int:
        """How many spans had to go."""
        return self.added - len(self.events)

    def seconds(self, *categories: str) -> float:
        """Return for how long the main thread was inside of spans of some categories; nested ones count once."""
        mine = sorted((e.begin, e.end) for e in self.events if e.category in categories and e.thread == self.main)
        total, until = 0, 0
        for begin, end in mine:
            total += max(0, end - max(begin, until))
            until = max(until, end)
        return total / 1e9

    def add(self, begin: int, category: str, name: str, facts: tuple = (), module: str | None = None) -> None:
        """Enter a span that ends now; it belongs to the running module unless `module` says another."""
        end, thread = now(), get_ident()
        phase = ""
        if thread == self.main:
            phase = self.phase
            if module is None:
                module = scope.current()
        self.added += 1
        self.events.append(Event(begin, end, category, name, module or "", phase, thread, facts))


class _Span:
    __slots__ = ("_before", "_begin", "_category", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, category: str) -> None:
        self._recorder, self._name, self._category = recorder, name, category

    def __enter__(self) -> None:
        recorder = self._recorder
        self._before = recorder.phase
        if self._category == "phase":
            recorder.phase = self._name
        self._begin = now()

    def __exit__(self, *exc: object) -> None:
        self._recorder.add(self._begin, self._category, self._name)
        if self._category == "phase":
            self._recorder.phase = self._before


_nothing: AbstractContextManager[Any] = nullcontext()
_active: Recorder | None = None


def active() -> Recorder | None:
    """Return the recorder at work, None while there is none."""
    return _active


def activate(recorder: Recorder | None) -> None:
    """Let `recorder` take all spans from now on; None stops recording."""
    global _active
    _active = recorder


def span(name: str, category: str = "phase") -> AbstractContextManager[Any]:
    """Return a context whose time is entered under a name, if somebody records.

    Parameters
    ----------
    name : str
    category : str
        A key of `CATEGORIES`; a span of category ``phase`` also names the phase of all spans inside it.
    """
    return _nothing if _active is None else _Span(_active, name, category)
