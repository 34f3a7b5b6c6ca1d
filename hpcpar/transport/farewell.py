"""Leaving a job that cannot go on: quietly and together where every rank found the same, at once where some did not."""

from __future__ import annotations

import time

from mpi4py import MPI

_TAG = 32_001  # below 32,767, the largest tag that every MPI must take
PATIENCE_SECONDS = 5.0


def agree_to_leave(message: str, patience: float = PATIENCE_SECONDS) -> tuple[bool, str]:
    """Tell the other ranks that this one cannot go on, and hear whether they cannot either.

    Only point-to-point messages are used: a rank that found nothing wrong may be inside any collective operation, and
    will then not answer.

    Parameters
    ----------
    message : str
        What this rank found.
    patience : float
        Seconds to wait for the others.

    Returns
    -------
    together : bool
        Every rank came here, so that all may end by themselves; else the caller has to abort the job.
    text : str
        What this rank is to print: on rank 0 all messages that differ from its own are added with their ranks; on other
        ranks it is empty, unless rank 0 did not come.
    """
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return True, message
    deadline = time.monotonic() + patience
    if rank > 0:
        comm.isend(message, dest=0, tag=_TAG)
        if _arrives(comm, 0, deadline + 1.0):
            return bool(comm.recv(source=0, tag=_TAG)), ""
        return False, f"rank {rank} of {size}: {message}"
    heard: dict[int, str] = {}
    for other in range(1, size):
        if _arrives(comm, other, deadline):
            heard[other] = comm.recv(source=other, tag=_TAG)
    together = len(heard) == size - 1
    for other in heard:
        comm.isend(together, dest=other, tag=_TAG)
    different: dict[str, int] = {}
    for other, text in heard.items():
        if text != message:
            different.setdefault(text, other)
    lines = [message, *(f"rank {other} of {size}: {text}" for text, other in different.items())]
    return together, "\n".join(lines)


def _arrives(comm: MPI.Comm, source: int, deadline: float) -> bool:
    """Wait for a message; one that has arrived already counts even after the deadline."""
    while not comm.iprobe(source=source, tag=_TAG):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
