"""Sums under way while the program goes on.

The same calls with the same pieces serve who waits at once and who waits late, so both get the same bits. MPI moves
bytes only inside its calls: `Reduction.test` gives it a chance now and then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hpcpar.transport import comm as comm_module
from hpcpar.transport import counter
from hpcpar.transport.comm import PIECE_BYTES, Comm
from hpcpar.transport.device import is_device, like, to_host


class Reduction:
    """The sum of equal buffers over all ranks of a communicator, started by making this.

    Parameters
    ----------
    comm : Comm
        All its ranks start the same reductions in the same order.
    buffer : array
        1-D, contiguous, of a dtype that MPI knows (float32 in place of half precision). In host memory it is reduced in
        place, and must not be touched before `wait` returns; from a GPU it is staged through pinned memory.
    """

    def __init__(self, comm: Comm, buffer: Any) -> None:
        assert buffer.ndim == 1 and buffer.flags.c_contiguous, "a reduction takes a packed buffer"
        self._buffer = buffer
        self._host: np.ndarray = to_host(buffer)
        self._requests: list[MPI.Request] = []
        if comm.size > 1:
            if comm_module.inspector is not None:
                comm_module.inspector(comm, "sum under way", f"{self._host.shape} {self._host.dtype}")
            counter.record("all_reduce", comm.name, 1, 2 * (comm.size - 1) / comm.size * self._host.nbytes)
            step = max(1, PIECE_BYTES // self._host.itemsize)
            self._requests = [] if comm.handle is None else [
                comm.handle.Iallreduce(MPI.IN_PLACE, self._host[start : start + step], MPI.SUM)
                for start in range(0, self._host.size, step)
            ]

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether the sum is there."""
        return not self._requests or bool(MPI.Request.Testall(self._requests))

    def wait(self) -> Any:
        """Return the sum, where the buffer was: in the same memory on the host."""
        if self._requests:
            MPI.Request.Waitall(self._requests)
            self._requests = []
        return like(self._host, self._buffer) if is_device(self._buffer) else self._buffer
