"""Sums under way while the program goes on.

The same calls with the same pieces serve who waits at once and who waits late, so both get the same bits. MPI moves
bytes only inside its calls: `Reduction.test` gives it a chance now and then.

Between few ranks a large sum is made here, of sends and receives: each rank adds up its part of a piece and sends the
sum to the others. A few pieces are under way at a time, in memory that is kept. That moves as few bytes as any
algorithm; on one node it takes about as long as the library's blocking all-reduce in pieces (0.9 of it with MPICH, 1.1
with Open MPI), where Open MPI's non-blocking one takes twice as long. Small sums, and those of many ranks, are left to
the library.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcpar.transport import comm as comm_module
from hpcpar.transport import counter
from hpcpar.transport.comm import PIECE_BYTES, Comm
from hpcpar.transport.device import is_device, like, to_host
from hpcpar.transport.exchange import all_done, wait_all

DIRECT_RANKS = 8
"""Between how many ranks, at most, a sum is made of sends and receives."""
DIRECT_BYTES = 128 << 10
"""From how many bytes on that is done."""
DIRECT_PIECE_BYTES = 2 << 20
"""Pieces of such sums."""
UNDER_WAY = 2
"""How many pieces are under way at a time between nodes: one hides the other's latency."""
UNDER_WAY_ON_A_NODE = 1
"""The same where all ranks share a node: there is little latency, and two pieces share caches and memory."""

_TAG_PARTS, _TAG_SUMS = 21, 22
_ROOM = DIRECT_PIECE_BYTES + 32 * DIRECT_RANKS  # bytes; parts differ in length by one element


class Reduction:
    """The sum of equal buffers over all ranks of a communicator, started by making this.

    Parameters
    ----------
    comm : Comm
        All its ranks start the same reductions in the same order, and wait in the same order.
    buffer : array
        1-D, contiguous, of a dtype that MPI knows (float32 in place of half precision). In host memory it is reduced in
        place, and must not be touched before `wait` returns; from a GPU it is staged through pinned memory.
    """

    def __init__(self, comm: Comm, buffer: Any) -> None:
        assert buffer.ndim == 1 and buffer.flags.c_contiguous, "a reduction takes a packed buffer"
        self._buffer = buffer
        self._host: np.ndarray = to_host(buffer)
        self._requests: list[MPI.Request] = []
        self._pieces: list[_Piece] = []
        if comm.size == 1:
            return
        host = self._host
        if comm_module.inspector is not None:
            comm_module.inspector(comm, "sum under way", f"{host.shape} {host.dtype}")
        counter.record("all_reduce", comm.name, 1, 2 * (comm.size - 1) / comm.size * host.nbytes)
        if comm.handle is None:
            return
        if comm.size <= DIRECT_RANKS and host.nbytes >= DIRECT_BYTES:
            if comm.sums is None:
                comm.sums = _Line(comm)
            self._line: _Line = comm.sums
            self._pieces = [_Piece(piece, comm.size) for piece in _cut(host, DIRECT_PIECE_BYTES)]
            self._line.enter(self._pieces)
        else:
            self._requests = [comm.handle.Iallreduce(MPI.IN_PLACE, piece, MPI.SUM) for piece in _cut(host, PIECE_BYTES)]

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether the sum is there."""
        if self._pieces:
            last = self._pieces[-1]
            if not last.done:
                self._line.advance()
            return last.done
        return all_done(self._requests)

    def wait(self) -> Any:
        """Return the sum, where the buffer was: in the same memory on the host."""
        if self._pieces:
            self._line.finish(self._pieces[-1])
            self._pieces = []
        wait_all(self._requests)
        self._requests = []
        return like(self._host, self._buffer) if is_device(self._buffer) else self._buffer


def _cut(flat: np.ndarray, nbytes: int) -> list[np.ndarray]:
    step = max(1, nbytes // flat.itemsize)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def _on_a_node(handle: MPI.Comm) -> bool:
    """Whether all ranks share memory. Collective."""
    shared = handle.Split_type(MPI.COMM_TYPE_SHARED)
    found = shared.Get_size() == handle.Get_size()
    shared.Free()
    return found


class _Piece:
    """A piece of a sum: one part for each rank, which that rank adds up."""

    __slots__ = ("done", "memory", "parts", "received", "requests", "shared")

    def __init__(self, array: np.ndarray, ranks: int) -> None:
        edges = [r * array.size // ranks for r in range(ranks + 1)]
        self.parts = [array[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        self.requests: list[MPI.Request] = []
        self.memory: np.ndarray | None = None
        self.received: list[np.ndarray] = []
        self.shared = self.done = False


class _Line:
    """The pieces of all sums of one communicator, in the order in which they were started.

    Messages between two ranks are told apart by their order alone. So parts are sent in the order of the pieces, and
    sums too, whatever arrives first.
    """

    def __init__(self, comm: Comm) -> None:
        self.handle, self.rank, self.size = comm.handle, comm.rank, comm.size
        self.peers = [r for r in range(comm.size) if r != comm.rank]
        self._most = UNDER_WAY_ON_A_NODE if _on_a_node(comm.handle) else UNDER_WAY
        self._waiting: deque[_Piece] = deque()
        self._under_way: deque[_Piece] = deque()
        self._memory: list[np.ndarray] = []  # for what arrives; as many as pieces were ever under way

    def enter(self, pieces: list[_Piece]) -> None:
        """Take the pieces of one more sum."""
        self._waiting.extend(pieces)
        self._start()

    def advance(self) -> None:
        """Do what can be done without waiting."""
        for piece in self._under_way:
            if not MPI.Request.Testall(piece.requests):
                if not piece.shared:
                    break  # the sums of later pieces are sent after those of this one
            elif piece.shared:
                piece.done = True
            else:
                self._share(piece)
        self._start()

    def finish(self, last: _Piece) -> None:
        """Wait until a piece is done, and with it all before it."""
        while not last.done:
            first = self._under_way[0]
            MPI.Request.Waitall(first.requests)
            if first.shared:
                first.done = True
            self.advance()

    def _start(self) -> None:
        """Drop what is done, and send the parts of the next pieces."""
        while self._under_way and self._under_way[0].done:
            self._memory.append(self._under_way.popleft().memory)
        while self._waiting and len(self._under_way) < self._most:
            piece = self._waiting.popleft()
            size, dtype = piece.parts[self.rank].size, piece.parts[self.rank].dtype
            piece.memory = self._memory.pop() if self._memory else np.empty(_ROOM, np.uint8)
            room = piece.memory[: len(self.peers) * size * dtype.itemsize].view(dtype)
            piece.received = [room[i * size : (i + 1) * size] for i in range(len(self.peers))]
            pairs = zip(self.peers, piece.received, strict=True)
            piece.requests = [self.handle.Irecv(into, peer, _TAG_PARTS) for peer, into in pairs]
            piece.requests += [self.handle.Isend(piece.parts[peer], peer, _TAG_PARTS) for peer in self.peers]
            self._under_way.append(piece)

    def _share(self, piece: _Piece) -> None:
        """Add up the own part, in the order of the ranks, and send the sum."""
        mine = piece.parts[self.rank]
        terms = [*piece.received[: self.rank], mine, *piece.received[self.rank :]]
        total = terms[0]
        for term in terms[1:]:
            total += term
        if total is not mine:
            mine[...] = total
        piece.requests = [self.handle.Irecv(piece.parts[peer], peer, _TAG_SUMS) for peer in self.peers]
        piece.requests += [self.handle.Isend(mine, peer, _TAG_SUMS) for peer in self.peers]
        piece.shared = True
