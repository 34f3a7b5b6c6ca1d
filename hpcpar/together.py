"""Everybody or nobody: what rank 0 does for all, all know; what fails on one rank, fails on all.

The errors are those of files and of what stands in them, `OSError` and `ValueError`. Any other is a mistake of the
program, which ends the job with the traceback of its rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpcpar.transport import Comm

Result = TypeVar("Result")
_ERRORS = (OSError, ValueError)


def on_root(comm: Comm, call: Callable[[], Result]) -> Result:
    """Return what ``call()`` gave on rank 0, the only one that calls it, on every rank. Collective.

    Raises
    ------
    OSError, ValueError
        The call's, on every rank.
    """
    outcome: tuple[Any, Exception | None] = (None, None)
    if comm.rank == 0:
        try:
            outcome = (call(), None)
        except _ERRORS as error:
            outcome = (None, error)
    value, error = comm.broadcast_object(outcome)
    if error is not None:
        raise error
    return value


def on_all(comm: Comm, call: Callable[[], Result]) -> Result:
    """Return ``call()``, which every rank makes. Collective.

    Raises
    ------
    OSError, ValueError
        The first one of any rank, on every rank.
    """
    value, error = None, None
    try:
        value = call()
    except _ERRORS as caught:
        error = caught
    errors = [e for e in comm.gather_objects(error) if e is not None]
    if errors:
        raise errors[0]
    return value
