"""Files and ranks: what the first rank finds, all know; what fails on one, fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpcpar.transport import Comm

Result = TypeVar("Result")
_ERRORS = (OSError, ValueError)


def from_first(comm: Comm, call: Callable[[], Result]) -> Result:
    """Return what rank 0 got from `call`, or raise its error, on every rank. Collective."""
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
    """Return ``call()``, or raise the first error of any rank on every rank. Collective."""
    value, error = None, None
    try:
        value = call()
    except _ERRORS as caught:
        error = caught
    errors = [e for e in comm.gather_objects(error) if e is not None]
    if errors:
        raise errors[0]
    return value
