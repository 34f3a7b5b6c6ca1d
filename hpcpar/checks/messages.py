"""Before each collective: do all ranks call the same one, with shapes and dtypes that fit each other?"""

from __future__ import annotations

from typing import Any

from hpcpar.checks.values import CheckError


def compare(comm: Any, operation: str, facts: Any) -> None:
    """Gather what every rank of `comm` is about to do; raise CheckError on all of them where it does not fit.

    Called by `hpcpar.transport` before the message itself, which would hang or deliver garbage.
    """
    if comm.handle is None or comm.size == 1:
        return
    everyone = comm.handle.allgather((operation, facts))
    for rank, (name, other) in enumerate(everyone):
        if name != everyone[0][0] or (name != "exchange" and other != everyone[0][1]):
            raise CheckError(
                f"ranks along {comm.name} differ: rank 0 calls {_shown(*everyone[0])}, "
                f"rank {rank} calls {_shown(name, other)}"
            )
    if operation == "exchange":
        _compare_exchange(comm, [facts for _, facts in everyone])


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


def _shown(operation: str, facts: Any) -> str:
    return operation if operation == "exchange" else f"{operation} of {facts}"
