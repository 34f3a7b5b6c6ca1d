"""The ranks of a test run: one outcome for all, a watchdog, and who writes where. The hooks that use it: `plugin`."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

WATCHDOG_SECONDS = float(os.environ.get("HPCPAR_TEST_WATCHDOG", "100"))
"""Seconds one phase of a test may take."""

PATIENCE_SECONDS = float(os.environ.get("HPCPAR_TEST_PATIENCE", "15"))
"""Seconds the other ranks have to come out of a test that failed on this one."""

PASSED, SKIPPED, FAILED = range(3)
Outcome = tuple[int, str]


class Ranks:
    """The ranks of this test run: agreement, watchdog, and who writes where."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.processes = self.comm.allgather((MPI.Get_processor_name(), os.getpid()))
        # pytest replaces the file behind descriptor 2 during a test
        self.terminal = os.fdopen(os.dup(2), "w")
        logs = os.environ.get("HPCPAR_TEST_LOGS")
        self.logs = Path(logs) if logs else None
        self.log = open(self.logs / f"rank-{self.rank}.log" if self.logs else os.devnull, "w")  # noqa: SIM115
        self.position = open(self.logs / f"rank-{self.rank}.test", "w") if self.logs else None  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=self.terminal, all_threads=True)

    # ---- agreement

    def settle(self, item: pytest.Item, phase: str, error: BaseException | None) -> None:
        """End one phase of a test, which raised `error` here, with the same outcome on all ranks.

        Returns where the caller is to go on as it would alone: with its own error, or without one on any rank.
        """
        try:
            if self.size > 1:
                self._exchange(item, phase, _outcome(item, error))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _exchange(self, item: pytest.Item, phase: str, mine: Outcome) -> None:
        """Exchange outcomes; raise where this rank passed and another did not."""
        codes = np.empty(self.size, np.int8)
        request = self.comm.Iallgather(np.array([mine[0]], np.int8), codes)
        if not _wait(request, PATIENCE_SECONDS if mine[0] == FAILED else None):
            self._give_up(item, phase, mine[1])
        if not codes.any():
            return
        outcomes: list[Outcome] = self.comm.allgather(mine)
        failed = {r: text for r, (code, text) in enumerate(outcomes) if code == FAILED}
        names = [f"{phase} on rank {r} of {self.size}" for r in failed]
        if mine[0] == FAILED:
            for name, (rank, text) in zip(names, failed.items(), strict=True):
                if rank != self.rank:
                    item.add_report_section(phase, name, text)
        elif failed:
            texts = "\n".join(f"{name}:\n{text}" for name, text in zip(names, failed.values(), strict=True))
            pytest.fail(f"failed in {texts}", pytrace=False)
        elif len({code for code, _ in outcomes}) > 1:
            skipped = [r for r, (code, _) in enumerate(outcomes) if code == SKIPPED]
            pytest.fail(f"ranks {skipped} of {self.size} skipped the test, the others did not", pytrace=False)

    def _give_up(self, item: pytest.Item, phase: str, text: str) -> None:
        """Failed here, and the others wait for this rank in vain: show everything and end the run."""
        self.say(f"{item.nodeid} failed in {phase}, and not all other ranks came out of it:\n{text}")
        host = self.processes[self.rank][0]
        for rank, (name, pid) in enumerate(self.processes):
            if name == host and rank != self.rank:
                self.say(f"stacks of rank {rank}:")
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)  # one after the other, or their lines mix
        self.comm.Abort(1)

    def agree_on_collection(self, session: pytest.Session) -> None:
        """Stop all ranks where they would not run the same tests in the same order.

        Raises
        ------
        Session.Interrupted
            With the tests that ranks have and others do not.
        """
        names = hashlib.sha1("\n".join(item.nodeid for item in session.items).encode()).hexdigest()
        views = self.comm.allgather((session.testsfailed, len(session.items), names))
        if len(set(views)) > 1:
            lines = [f"rank {r}: {tests} tests, {bad} errors" for r, (bad, tests, _) in enumerate(views)]
            raise session.Interrupted("the ranks collected different tests: " + "; ".join(lines))

    # ---- watchdog

    def watch(self, seconds: float) -> None:
        """Show all threads of this rank after `seconds`; rank 0 ends the run once the others have shown theirs."""
        faulthandler.dump_traceback_later(
            seconds + (2 if self.rank == 0 else 0), exit=self.rank == 0, file=self.terminal
        )

    def note(self, nodeid: str) -> None:
        """Leave the name of the running test where an outer time limit can find it."""
        if self.position:
            self.position.seek(0)
            self.position.write(f"rank {self.rank} of {self.size}: {nodeid}\n")
            self.position.truncate()
            self.position.flush()

    def say(self, text: str) -> None:
        """Write to the real standard error, past pytest's capture."""
        self.terminal.write(f"[rank {self.rank} of {self.size}] {text}\n")
        self.terminal.flush()

    def close(self) -> None:
        """Let every rank write its report before the first one ends with a status that stops the job."""
        if _wait(self.comm.Ibarrier(), PATIENCE_SECONDS):
            self.comm.Free()
        faulthandler.unregister(signal.SIGUSR1)
        for file in (self.log, self.position):
            if file:
                file.close()


def _wait(request: MPI.Request, seconds: float | None) -> bool:
    """Wait without burning the core another rank needs; False if `seconds` pass first."""
    for _ in range(200):
        if request.Test():
            return True
    deadline = None if seconds is None else time.monotonic() + seconds
    while not request.Test():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def _outcome(item: pytest.Item, error: BaseException | None) -> Outcome:
    if error is None:
        return PASSED, ""
    if isinstance(error, pytest.skip.Exception):
        return SKIPPED, str(error)
    try:
        return FAILED, str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
    except Exception:  # noqa: BLE001 - a traceback that pytest cannot draw is drawn plainly
        return FAILED, "".join(traceback.format_exception(error))
