"""Point-to-point exchanges between fixed peers: persistent over fixed buffers, and in place over changing arrays.

Short messages are packed by their owner into buffers that live as long as the exchange; persistent requests then save
half of the start-up cost. Long runs of memory are sent from, and received into, the arrays themselves: the arrays
change from call to call, so these requests are not persistent, and there the difference is lost in the transfer.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcpar.transport import counter
from hpcpar.transport.comm import Comm
from hpcpar.transport.device import is_device

_live: weakref.WeakSet[Any] = weakref.WeakSet()


class Exchange:
    """A persistent exchange: the same peers, the same buffers, any number of times.

    Parameters
    ----------
    comm : Comm
        The communicator; all ranks that appear as peers of each other start the exchange in the same order.
    sends, receives : sequence of (int, array)
        Peer and C-contiguous buffer; no buffer is empty. A buffer on a GPU is staged through pinned host memory, and
        its stream is synchronised before anything is sent.
    tag : int
        Keeps exchanges of different kinds apart on one communicator.
    operation : str
        The name under which the byte counter enters the messages.

    Notes
    -----
    The buffers belong to the exchange between `start` and the end of `wait`. `free` gives the requests back; what is
    forgotten is freed before MPI ends.
    """

    def __init__(
        self,
        comm: Comm,
        sends: Sequence[tuple[int, Any]] = (),
        receives: Sequence[tuple[int, Any]] = (),
        tag: int = 0,
        operation: str = "exchange",
    ) -> None:
        for peer, buffer in (*sends, *receives):
            assert buffer.size and buffer.flags.c_contiguous, f"a buffer for rank {peer} is empty or has gaps"
        self.comm = comm
        self.operation = operation
        self.bytes_sent = sum(buffer.nbytes for _, buffer in sends)
        self._staged_sends = [(_pinned(b), b) for _, b in sends if is_device(b)]
        self._staged_receives = [(_pinned(b), b) for _, b in receives if is_device(b)]
        pinned = {id(b): host for host, b in (*self._staged_sends, *self._staged_receives)}
        handle = comm.handle
        self._requests: list[MPI.Request] = [
            handle.Recv_init([_raw(pinned.get(id(b), b)), MPI.BYTE], peer, tag) for peer, b in receives
        ]
        self._requests += [handle.Send_init([_raw(pinned.get(id(b), b)), MPI.BYTE], peer, tag) for peer, b in sends]
        self._messages = len(sends)
        self.active = False
        _live.add(self)

    def start(self) -> None:
        """Send what the buffers hold now; the buffers must not be touched before `wait` returns."""
        assert not self.active, "the exchange is already under way"
        self.active = True
        _to_pinned(self._staged_sends)
        MPI.Prequest.Startall(self._requests)
        counter.record(self.operation, self.comm.name, self._messages, self.bytes_sent)

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether everything has been sent and has arrived."""
        return not self.active or bool(MPI.Request.Testall(self._requests))

    def wait(self) -> None:
        """Return when everything has been sent and has arrived."""
        if self.active:
            MPI.Request.Waitall(self._requests)
            _from_pinned(self._staged_receives)
            self.active = False

    def free(self) -> None:
        """Free the requests; the exchange is unusable afterwards. Local, and harmless if repeated."""
        assert not self.active, "an exchange under way cannot be freed"
        for request in self._requests:
            request.Free()
        self._requests = []


@dataclass(frozen=True)
class Rows:
    """`count` runs of `length` bytes, `stride` bytes apart, from byte `offset` of a dense array: one MPI vector."""

    offset: int
    count: int
    length: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes in all runs."""
        return self.count * self.length


class InPlaceExchange:
    """An exchange between parts of arrays that are given anew with each start.

    Parameters
    ----------
    comm, tag, operation
        As in `Exchange`.
    sends, receives : sequence of (int, Rows)
        Peer and the part of the source (of the target) that goes there (that is written).
    """

    def __init__(
        self,
        comm: Comm,
        sends: Sequence[tuple[int, Rows]] = (),
        receives: Sequence[tuple[int, Rows]] = (),
        tag: int = 0,
        operation: str = "exchange",
    ) -> None:
        self.comm = comm
        self.operation = operation
        self.bytes_sent = sum(rows.nbytes for _, rows in sends)
        self._tag = tag
        self._types: dict[Rows, MPI.Datatype] = {}
        self._sends = [(peer, rows, self._type(rows)) for peer, rows in sends]
        self._receives = [(peer, rows, self._type(rows)) for peer, rows in receives]
        _live.add(self)

    def _type(self, rows: Rows) -> MPI.Datatype | None:
        if rows.count == 1:
            return None
        found = self._types.get(rows)
        if found is None:
            found = self._types[rows] = MPI.BYTE.Create_vector(rows.count, rows.length, rows.stride).Commit()
        return found

    def receive(self, target: np.ndarray) -> list[MPI.Request]:
        """Post the receives into the C-contiguous `target` and return their requests."""
        raw = _raw(target) if self._receives else target
        return [
            self.comm.handle.Irecv(_part(raw, rows, kind), peer, self._tag) for peer, rows, kind in self._receives
        ]

    def send(self, source: np.ndarray) -> list[MPI.Request]:
        """Send from the C-contiguous `source`, which must stay as it is until the requests are done."""
        if not self._sends:
            return []
        raw = _raw(source)
        counter.record(self.operation, self.comm.name, len(self._sends), self.bytes_sent)
        return [self.comm.handle.Isend(_part(raw, rows, kind), peer, self._tag) for peer, rows, kind in self._sends]

    def send_packed(self, messages: Sequence[np.ndarray]) -> list[MPI.Request]:
        """Send C-contiguous arrays, one for each peer of the sends, in place of parts of a source that has gaps."""
        counter.record(self.operation, self.comm.name, len(self._sends), self.bytes_sent)
        return [
            self.comm.handle.Isend([_raw(message), MPI.BYTE], peer, self._tag)
            for (peer, _, _), message in zip(self._sends, messages, strict=True)
        ]

    def free(self) -> None:
        """Free the vector types; the exchange is unusable afterwards. Local, and harmless if repeated."""
        for kind in self._types.values():
            kind.Free()
        self._types = {}


def all_done(requests: list[MPI.Request]) -> bool:
    """Give MPI a chance to move bytes; whether all requests are done."""
    return not requests or bool(MPI.Request.Testall(requests))


def wait_all(requests: list[MPI.Request]) -> None:
    """Return when all requests are done."""
    if requests:
        MPI.Request.Waitall(requests)


def _part(raw: np.ndarray, rows: Rows, kind: MPI.Datatype | None) -> list[Any]:
    if kind is None:
        return [raw[rows.offset : rows.offset + rows.length], MPI.BYTE]
    return [raw[rows.offset :], 1, kind]


def _raw(array: np.ndarray) -> np.ndarray:
    """The bytes of a C-contiguous array: also of a dtype that MPI and the buffer protocol do not know."""
    return array.reshape(array.size).view(np.uint8)


def address(array: np.ndarray) -> int:
    """Where a host array begins in memory. MPI tells it of dense ones in a sixth of NumPy's time."""
    if array.flags.c_contiguous and array.dtype.kind in "fciub":
        return MPI.Get_address(array)
    return array.__array_interface__["data"][0]


def _pinned(array: Any) -> np.ndarray:
    import cupyx

    return cupyx.empty_pinned(array.shape, array.dtype)


def _to_pinned(pairs: Sequence[tuple[np.ndarray, Any]]) -> None:
    """Copy device buffers to their pinned twins; a message must not read what a kernel has still to write."""
    if pairs:
        import cupy

        stream = cupy.cuda.get_current_stream()
        for host, array in pairs:
            array.get(stream=stream, out=host)
        stream.synchronize()


def _from_pinned(pairs: Sequence[tuple[np.ndarray, Any]]) -> None:
    """Copy pinned buffers to the device; they are free for the next message when this returns."""
    if pairs:
        import cupy

        stream = cupy.cuda.get_current_stream()
        for host, array in pairs:
            array.set(host, stream=stream)
        stream.synchronize()


@atexit.register
def _free_all() -> None:
    """Free what was forgotten: MPI libraries complain of requests that are still there when they end."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for exchange in list(_live):
            if not getattr(exchange, "active", False):
                exchange.free()
