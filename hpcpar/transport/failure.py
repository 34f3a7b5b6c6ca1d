"""Everybody or nobody: an exception that nobody catches on one rank ends the job on all of them."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from mpi4py import MPI

from hpcpar.transport import farewell

EXIT_CRASH = 1
EXIT_USER_ERROR = 2

_installed = False


def abort(code: int = EXIT_CRASH) -> None:
    """End the whole job now; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(code)


def install_excepthook() -> None:
    """Make an uncaught exception print its rank and traceback once and abort the job; idempotent.

    An exception with a true attribute `everywhere` is raised on all ranks that take part in something: one of them
    shows the traceback, after it has heard whether the others say the same.
    With one rank the interpreter's own hook is kept: there is nobody else to stop.
    """
    global _installed
    if _installed or MPI.COMM_WORLD.Get_size() == 1:
        return
    _installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, SystemExit):
            previous(kind, value, trace)
            return
        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        text = "".join(traceback.format_exception(kind, value, trace))
        if getattr(value, "everywhere", False):
            said = str(value)
            _, heard = farewell.agree_to_leave(said)
            if not heard:  # rank 0 shows it, and ends the job
                abort(EXIT_CRASH)
            text += heard.removeprefix(said).lstrip("\n")
        # one write, so that the lines of several failing ranks do not mix
        sys.stderr.write(f"rank {rank} of {size} failed and stops the job:\n{text}")
        abort(EXIT_CRASH)

    sys.excepthook = hook
