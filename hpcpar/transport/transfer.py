"""Messages between peers that are under way while the program goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcpar.kernels import array_module
from hpcpar.transport import comm as comm_module
from hpcpar.transport import counter
from hpcpar.transport.comm import Comm
from hpcpar.transport.device import like, to_host
from hpcpar.transport.exchange import all_done, wait_all

PIECE_BYTES = 1 << 30
"""Longer messages are cut, as counts must stay below 2**31."""


class Out(NamedTuple):
    """A message to `peer`: a packed array. The tag tells messages between the same two ranks apart."""

    peer: int
    tag: int
    array: Any


class In(NamedTuple):
    """A message from `peer` of so many elements."""

    peer: int
    tag: int
    size: int


class Transfer:
    """Some sends and receives, started by making this. Collective over the communicator, though ranks may be idle.

    Parameters
    ----------
    comm : Comm
    sends : sequence of Out
        1-D, contiguous, and unchanged until `wait` returns. From a GPU they are staged through pinned memory.
    receives : sequence of In
        Both sides know what is sent; nothing of size zero is.
    reference : array
        What arrives has its dtype and lies where it does.
    operation : str
        The name under which the byte counter enters the messages.

    Attributes
    ----------
    messages : int
        How many messages this rank sends and receives.

    Notes
    -----
    MPI moves bytes only inside its calls: `test` gives it a chance now and then.
    """

    def __init__(
        self, comm: Comm, sends: Sequence[Out], receives: Sequence[In], reference: Any, operation: str
    ) -> None:
        sends = [m for m in sends if m.array.size]
        self._receives, self._reference = receives, reference
        if comm_module.inspector is not None:
            dtype = str(reference.dtype)
            comm_module.inspector(
                comm,
                "exchange",
                (
                    _facts([(m.peer, m.tag, m.array.size) for m in sends], dtype),
                    _facts([m for m in receives if m.size], dtype),
                ),
            )
        if sends:
            counter.record(operation, comm.name, len(sends), sum(m.array.nbytes for m in sends))
        self.messages = len(sends) + len(receives)
        self._requests: list[MPI.Request] = []
        if comm.handle is None:  # a mesh that only plans: nothing travels
            self._buffers = [array_module(reference).zeros((m.size,), reference.dtype) for m in receives]
            return
        self._buffers = [np.empty(m.size, reference.dtype) for m in receives]
        for message, buffer in zip(receives, self._buffers, strict=True):
            for part in _parts(buffer):
                self._requests.append(comm.handle.Irecv([part, MPI.BYTE], message.peer, message.tag))
        self._kept = [to_host(m.array) for m in sends]  # the memory must live until the messages have left
        for message, host in zip(sends, self._kept, strict=True):
            for part in _parts(host):
                self._requests.append(comm.handle.Isend([part, MPI.BYTE], message.peer, message.tag))

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether all messages have left and arrived."""
        return all_done(self._requests)

    def wait(self) -> list[Any]:
        """Return what arrived, in the order of the receives; all memory that was sent may be used again."""
        wait_all(self._requests)
        self._requests = []
        return [like(buffer, self._reference) for buffer in self._buffers]


def _facts(messages: Sequence[tuple[int, int, int]], dtype: str) -> dict[int, tuple[tuple[int, ...], str]]:
    """Sizes for each peer in the order of tags, as the checked mode compares them."""
    found: dict[int, list[int]] = {}
    for peer, _, size in sorted(messages, key=lambda m: m[:2]):
        found.setdefault(peer, []).append(int(size))
    return {peer: (tuple(sizes), dtype) for peer, sizes in found.items()}


def _parts(buffer: np.ndarray) -> list[np.ndarray]:
    """The bytes of a buffer, in pieces that a message can hold; none of an empty one."""
    raw = buffer.view(np.uint8)
    return [raw[i : i + PIECE_BYTES] for i in range(0, raw.size, PIECE_BYTES)]
