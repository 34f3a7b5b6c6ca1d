"""A signal to any one rank asks all ranks to save and leave: Slurm's warning before the time limit, or preemption.

The handler only makes a note. Between two steps, and between two batches of a validation, the ranks exchange their
notes, so that all of them stop at the same step (`Trainer`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

EXIT_REQUEUE = 75
"""Exit status of a run that saved and left because it was asked to (EX_TEMPFAIL of sysexits.h: try again later)."""


class Interrupted(Exception):
    """The run was asked to stop, on all ranks at the same step, and its checkpoint is on the disk.

    Attributes
    ----------
    step : int
        Where it goes on.
    """

    def __init__(self, step: int = 0) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step


class StopSignals:
    """Notes SIGUSR1 and SIGTERM while installed.

    Attributes
    ----------
    asked : bool
        Whether this rank got one of them.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Begin to take notes. Python allows that in the main thread only; elsewhere nothing is installed."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see held_back

    def remove(self) -> None:
        """Give the signals back their meaning of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def held_back() -> Iterator[None]:
    """Let SIGUSR1 wait for `StopSignals.install`: where there is no handler yet, it would end the process.

    Loading libraries and building a model takes a while, and the warning before the time limit may come meanwhile.
    SIGTERM is let through: ending a process that has nothing to save is what it is for.
    """
    warning = {signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, warning)
    try:
        yield
    finally:
        if warning & signal.sigpending():  # nobody took it, and now it is late
            handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            signal.signal(signal.SIGUSR1, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
