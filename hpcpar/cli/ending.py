"""How the command ends when it cannot go on."""

from __future__ import annotations

import os
import sys
import traceback

from hpcpar.launch.process import this_process

EXIT_USER_ERROR = 2

# Code that raises these says in the message what is wrong and what would be right.
USER_ERRORS = (ValueError, OSError, ImportError, MemoryError, FloatingPointError)


class UsageError(ValueError):
    """Wrong words on the command line."""


def launched_rank() -> int:
    """Return the rank the launcher gave this process, without starting MPI; 0 where there is no launcher."""
    return this_process().rank


def user_error(error: BaseException, parallel: bool) -> int:
    """Print one message and return the exit status, after all ranks came to an error; or end the job on all of them."""
    text = f"hpcpar: error: {describe(error)}"
    if parallel:  # else the other ranks may have left already, and MPI would wait for them to start
        try:
            from hpcpar.transport import failure, farewell
        except (ImportError, RuntimeError):  # no MPI: the error itself says so, or the launcher's rank has to do
            parallel = False
    if parallel:
        together, text = farewell.agree_to_leave(text)
        # where MPI was not found by its launcher, each rank takes itself for the whole job, yet one message is enough
        # what only some ranks met is not a plain mistake of the user: it is shown with its traceback
        _print("" if together and launched_rank() > 0 else text, error, traced=not together)
        if not together:
            failure.abort(EXIT_USER_ERROR)
    elif launched_rank() == 0:
        _print(text, error)
    return EXIT_USER_ERROR


def describe(error: BaseException) -> str:
    """Return the message of an error, with the place it comes from where that is not plain from the message."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    if type(error) not in USER_ERRORS or error.__traceback__ is None:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if (frame.line or "").startswith("raise "):  # said on purpose, not what a library says about its own arguments
        return text
    return f"{text} ({type(error).__name__} at {frame.filename}:{frame.lineno}; HPCPAR_TRACEBACK=1 shows the way there)"


def _print(text: str, error: BaseException, traced: bool = False) -> None:
    if not text:
        return
    sys.stdout.flush()
    if traced or os.environ.get("HPCPAR_TRACEBACK"):
        text = "".join(traceback.format_exception(error)) + text
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
