"""Plain MPI, as a program without this package would call it: what `hpcpar bench` compares with. Over all ranks.

Ranks that have nothing to do while another program is measured wait here without using their core.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mpi4py import MPI

_NAP = 5e-4  # seconds between two looks


def turn(value: Any = None) -> Any:
    """Return rank 0's (small, picklable) value on every rank; the others sleep until it comes."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(_NAP)
    return MPI.COMM_WORLD.bcast(value)


def barrier() -> None:
    """Wait for all ranks."""
    MPI.COMM_WORLD.Barrier()


def send_receive(outgoing: np.ndarray, incoming: np.ndarray) -> None:
    """Exchange contiguous arrays of equal size with the rank beside this one: 0 with 1, 2 with 3, a last with none."""
    comm = MPI.COMM_WORLD
    peer = comm.rank ^ 1
    if peer < comm.size:
        comm.Sendrecv(outgoing, peer, 0, incoming, peer, 0)


def all_reduce(array: np.ndarray, piece_bytes: int, at_once: bool = False) -> None:
    """Sum a contiguous 1-D array over all ranks in place, in pieces; `at_once` starts all of them before waiting."""
    comm, step = MPI.COMM_WORLD, max(1, piece_bytes // array.itemsize)
    pieces = [array[start : start + step] for start in range(0, array.size, step)]
    if at_once:
        MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, piece, MPI.SUM) for piece in pieces])
        return
    for piece in pieces:
        comm.Allreduce(MPI.IN_PLACE, piece, MPI.SUM)
