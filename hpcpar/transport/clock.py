"""How far the clocks of the ranks are apart, measured by messages.

A rank asks rank 0 for its time and takes the answer to be that of the middle between question and answer. Of several
rounds the quickest is the best: the error is at most half its round trip.
"""

from __future__ import annotations

from time import perf_counter_ns as now
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcpar.transport.comm import Comm

ROUNDS = 20
_TAG = 9


class Offset(NamedTuple):
    """What has to be added to this rank's clock to have rank 0's, and half the quickest round trip; nanoseconds."""

    nanoseconds: int
    error: int


def measure_offset(comm: Comm, rounds: int = ROUNDS) -> Offset:
    """Return this rank's offset from rank 0. Collective; the ranks take turns."""
    mine = Offset(0, 0)
    for peer in range(1, comm.size):
        if comm.rank == 0:
            _answer(comm.handle, peer, rounds)
        elif comm.rank == peer:
            mine = _ask(comm.handle, rounds)
    comm.barrier()
    return mine


def _ask(handle: MPI.Comm, rounds: int) -> Offset:
    answer, best = np.zeros(1, np.int64), None
    for _ in range(rounds):
        begin = now()
        handle.Sendrecv(np.zeros(1, np.int64), 0, _TAG, answer, 0, _TAG)
        end = now()
        seen = Offset(int(answer[0]) - (begin + end) // 2, (end - begin) // 2)
        best = seen if best is None or seen.error < best.error else best
    return best


def _answer(handle: MPI.Comm, peer: int, rounds: int) -> None:
    question = np.zeros(1, np.int64)
    for _ in range(rounds):
        handle.Recv(question, peer, _TAG)
        handle.Send(np.array([now()], np.int64), peer, _TAG)
