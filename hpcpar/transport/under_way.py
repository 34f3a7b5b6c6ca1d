"""Collectives of arrays under way while the program goes on: what `Comm` does at once, to be waited for later.

Who waits at once makes the same calls as who waits late, so both get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcpar.transport import comm as comm_module
from hpcpar.transport import counter
from hpcpar.transport.comm import PIECE_BYTES, Comm, travel_dtype
from hpcpar.transport.device import like, to_host
from hpcpar.transport.exchange import all_done
from hpcpar.transport.nonblocking import Reduction


class Sum:
    """An all-reduce, started by making this: every rank gets the sum of equal-shaped arrays.

    Parameters
    ----------
    comm : Comm
        All its ranks start the same collectives in the same order, and wait in the same order.
    array : array
        Not changed.
    """

    def __init__(self, comm: Comm, array: Any) -> None:
        self._shape, self._dtype = array.shape, array.dtype
        packed = array.astype(travel_dtype(array.dtype), order="C")
        self._reduction = Reduction(comm, packed.reshape(packed.size))
        self.test = self._reduction.test

    def wait(self) -> Any:
        """Return the sum."""
        return self._reduction.wait().astype(self._dtype, copy=False).reshape(self._shape)


class Scatter:
    """A reduce-scatter, started by making this: rank r gets the sum of `pieces[r]` over the ranks.

    Parameters
    ----------
    comm : Comm
        All its ranks start the same collectives in the same order.
    pieces : sequence of arrays
        One array for each rank; piece r has the same shape on every rank.
    """

    def __init__(self, comm: Comm, pieces: Sequence[Any]) -> None:
        self._reference = pieces[0]
        self._requests: list[MPI.Request] = []
        self._packed: list[np.ndarray] | None = None  # must live until the messages have left
        if comm.size == 1 or comm.handle is None:
            self._done = pieces[0] if comm.size == 1 else comm.reduce_scatter(pieces)
            return
        if comm_module.inspector is not None:
            facts = f"{[tuple(p.shape) for p in pieces]} {pieces[0].dtype}"
            comm_module.inspector(comm, "reduce-scatter under way", facts)
        hosts = [to_host(p) for p in pieces]
        self._shape, self._dtype = hosts[comm.rank].shape, hosts[comm.rank].dtype
        wide = travel_dtype(self._dtype)
        given = sum(h.size for r, h in enumerate(hosts) if r != comm.rank)
        counter.record("reduce_scatter", comm.name, 1, given * wide.itemsize)
        self._done = np.empty(hosts[comm.rank].size, wide)
        flats = [h.reshape(h.size) for h in hosts]
        step = max(1, PIECE_BYTES // wide.itemsize // comm.size)
        self._packed = []
        for start in range(0, max((f.size for f in flats), default=0), step):
            parts = [f[start : start + step] for f in flats]
            packed = np.concatenate(parts).astype(wide, copy=False)
            mine, counts = self._done[start : start + step], [p.size for p in parts]
            self._packed.append(packed)
            self._requests.append(comm.handle.Ireduce_scatter(packed, mine, counts, MPI.SUM))

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether the sum is there."""
        return all_done(self._requests)

    def wait(self) -> Any:
        """Return this rank's piece of the sum."""
        if self._packed is not None:
            MPI.Request.Waitall(self._requests)
            self._requests, self._packed = [], None
            self._done = like(self._done.astype(self._dtype, copy=False).reshape(self._shape), self._reference)
        return self._done


class Gather:
    """An all-gather, started by making this: every rank gets every rank's array.

    Parameters
    ----------
    comm : Comm
        All its ranks start the same collectives in the same order.
    array : array
    shapes : sequence of tuple of int
        ``shapes[r]`` is the shape that rank r holds.
    """

    def __init__(self, comm: Comm, array: Any, shapes: Sequence[tuple[int, ...]]) -> None:
        counts = [prod(s) for s in shapes]
        self._requests: list[MPI.Request] = []
        self._reference, self._shapes = array, shapes
        if comm.size == 1 or comm.handle is None or sum(counts) * array.itemsize >= 2**31:
            self._blocks = comm.all_gather(array, shapes)
            return
        if comm_module.inspector is not None:
            fits = tuple(array.shape) == tuple(shapes[comm.rank])
            odd = "" if fits else f", of which this one is {tuple(array.shape)}"
            comm_module.inspector(comm, "all-gather under way", f"{[tuple(s) for s in shapes]}{odd} {array.dtype}")
        host = np.asarray(to_host(array), order="C")
        counter.record("all_gather", comm.name, 1, (sum(counts) - counts[comm.rank]) * host.itemsize)
        self._source = host.reshape(host.size).view(np.uint8)  # must live, and stay, until the messages have left
        self._out = np.empty(sum(counts), host.dtype)
        self._offsets = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        nbytes = [c * host.itemsize for c in counts]
        starts = [int(o) * host.itemsize for o in self._offsets[:-1]]
        receive = [self._out.view(np.uint8), nbytes, starts, MPI.BYTE]
        self._requests = [comm.handle.Iallgatherv([self._source, MPI.BYTE], receive)]

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether all blocks are there."""
        return all_done(self._requests)

    def wait(self) -> list[Any]:
        """Return the arrays of all ranks."""
        if self._requests:
            MPI.Request.Waitall(self._requests)
            self._requests = []
            edges = zip(self._offsets, self._offsets[1:], self._shapes, strict=False)
            self._blocks = [like(self._out[a:b].reshape(shape), self._reference) for a, b, shape in edges]
        return self._blocks
