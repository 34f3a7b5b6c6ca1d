"""Before each collective: do all ranks call the same one, with shapes and dtypes that fit each other?"""

from __future__ import annotations

from typing import Any

from hpcpar.checks.values import CheckError

OPERATION = "operation"
"""What an announcement begins with that is not of a collective: the ranks apply an operation of the tape."""

Announcement = tuple[str, Any]


def compare(comm: Any, operation: str, facts: Any) -> None:
    """Gather what every rank of `comm` is about to do; raise CheckError on all of them where it does not fit.

    Called by `hpcpar.transport` before the message itself, which would hang or deliver garbage.
    """
    if comm.handle is None or comm.size == 1:
        return
    everyone = comm.handle.allgather((operation, facts))
    same_call(f"ranks along {comm.name} differ", everyone)
    if operation == "exchange":
        _compare_exchange(comm, [facts for _, facts in everyone])


def same_call(what: str, everyone: list[Announcement]) -> None:
    """Raise CheckError unless all ranks announce the same; an operation and a collective may meet here too."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other[0] != first[0] or (first[0] != "exchange" and other[1] != first[1]):
            raise CheckError(f"{what}: rank 0 {_shown(*first)}; rank {rank} {_shown(*other)}")


def _compare_exchange(comm: Any, everyone: list[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    """What rank a sends to b must be what b waits for from a."""
    for a, (sends, _) in enumerate(everyone):
        for b, (_, receives) in enumerate(everyone):
            if sends.get(b) != receives.get(a):
                raise CheckError(
                    f"exchange along {comm.name}: rank {a} sends {_array(sends.get(b))} to rank {b}, "
                    f"which waits for {_array(receives.get(a))}"
                )


def _array(description: Any) -> str:
    return "nothing" if description is None else f"{description[0]} {description[1]}"


def _shown(name: str, facts: Any) -> str:
    if name == OPERATION:
        return f"applies {facts}"
    return f"calls {name}" if name == "exchange" else f"calls {name} of {facts}"
