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
            self.asked = self.asked or bool(_early)

    def remove(self) -> None:
        """Give the signals back their meaning of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


_early: list[int] = []


@contextmanager
def held_back(for_good: bool = False) -> Iterator[None]:
    """Keep SIGUSR1 for `StopSignals` while nothing else takes it: without a handler it would end the process.

    Loading libraries and building a model takes a while, as drawing pictures does after the last step, and the warning
    before the time limit may come meanwhile. SIGTERM is let through: ending a process that has nothing to save is what
    it is for. A mask would not do, since threads that were made during training do not have it.

    Parameters
    ----------
    for_good : bool
        The process ends afterwards: nothing is restored.
    """
    if threading.current_thread() is not threading.main_thread():  # which Python does not let handle signals
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: _early.append(number))
    try:
        yield
    finally:
        if not for_good:
            signal.signal(signal.SIGUSR1, before)
            _early.clear()
