"""Messages of one direction of a halo exchange, packed or in place, and what is under way of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from hpcpar.primitives.boxes import Copies
from hpcpar.transport import Comm, counter
from hpcpar.transport.exchange import Exchange, InPlaceExchange, Rows, all_done, wait_all


class Message(NamedTuple):
    """One message to or from `peer`: its shape, the copies between it and the array, the array's runs if in place."""

    peer: int
    shape: tuple[int, ...]
    copies: Copies
    rows: Rows | None


class Staging(NamedTuple):
    """Packed messages of one exchange in flight."""

    exchange: Exchange
    sends: tuple[tuple[Message, Any], ...]
    receives: tuple[tuple[Message, Any], ...]


class Channel:
    """The messages of one direction: staged ones over a free list of buffer sets, long ones in place."""

    def __init__(
        self, comm: Comm, sends: Sequence[Message], receives: Sequence[Message], tag: int, make: Callable[..., Any]
    ) -> None:
        self.comm, self.tag, self._make = comm, tag, make
        self._free: list[Staging] = []
        self.sets = 0
        self._staged = [m for m in sends if m.rows is None], [m for m in receives if m.rows is None]
        self.in_place_sends = [m for m in sends if m.rows is not None]
        in_place_receives = [m for m in receives if m.rows is not None]
        self.in_place = (
            InPlaceExchange(
                comm,
                [(m.peer, m.rows) for m in self.in_place_sends],
                [(m.peer, m.rows) for m in in_place_receives],
                tag,
                "halo",
            )
            if self.in_place_sends or in_place_receives
            else None
        )

    def start(self, source: Any, target: Any, pack: Callable[[Message, Any, Any], None]) -> tuple[list, Any]:
        """Start all messages from `source`; in-place ones arrive in `target`. Returns (requests, staging)."""
        requests = self.in_place.receive(target) if self.in_place else []
        staging = self._acquire() if self._staged[0] or self._staged[1] else None
        if staging:
            for message, buffer in staging.sends:
                pack(message, buffer, source)
            staging.exchange.start()
        if self.in_place_sends:
            if source.flags.c_contiguous:
                requests += self.in_place.send(source)
            else:
                packed = [self._make(m.shape) for m in self.in_place_sends]
                for message, buffer in zip(self.in_place_sends, packed, strict=True):
                    pack(message, buffer, source)
                requests += self.in_place.send_packed(packed)
        return requests, staging

    def _acquire(self) -> Staging:
        if self._free:
            return self._free.pop()
        self.sets += 1
        sends, receives = (tuple((m, self._make(m.shape)) for m in messages) for messages in self._staged)
        exchange = Exchange(
            self.comm, [(m.peer, b) for m, b in sends], [(m.peer, b) for m, b in receives], self.tag, "halo"
        )
        return Staging(exchange, sends, receives)

    def release(self, staging: Staging) -> None:
        """Take a set back for the next start."""
        self._free.append(staging)

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        return len(self._free) < self.sets

    def free(self) -> None:
        """Free requests and vector types."""
        assert not self.busy, "a halo exchange under way cannot be freed"
        for staging in self._free:
            staging.exchange.free()
        self._free, self.sets = [], 0
        if self.in_place:
            self.in_place.free()


class CountedChannel:
    """A channel without ranks behind it: its messages are entered in the byte counter and take their buffers."""

    busy = False

    def __init__(
        self, comm: Any, sends: Sequence[Message], receives: Sequence[Message], tag: int, make: Callable[..., Any]
    ) -> None:
        self.comm, self._make, self.sets = comm, make, 0
        self._sends = [prod(m.shape) for m in sends]
        self._staged = [m.shape for m in (*sends, *receives) if m.rows is None]
        self._buffers: list[Any] = []

    def start(self, source: Any, target: Any, pack: Callable[[Message, Any, Any], None]) -> tuple[list, Any]:
        """Count the messages."""
        if self._staged and not self._buffers:
            self._buffers, self.sets = [self._make(shape) for shape in self._staged], 1
        if self._sends:
            counter.record("halo", self.comm.name, len(self._sends), sum(self._sends) * source.itemsize)
        return [], None

    def free(self) -> None:
        """Give the buffers back."""
        self._buffers, self.sets = [], 0


class Pending:
    """A halo exchange under way.

    Attributes
    ----------
    buffer : array
        The array that `wait` returns. What comes from the own block is there from the start (`DimPlan.at_home`); in
        the adjoint, the sum is complete after `wait`.
    """

    __slots__ = ("_channel", "_finish", "_requests", "_staging", "buffer")

    def __init__(
        self,
        buffer: Any,
        channel: Channel | None = None,
        requests: list | None = None,
        staging: Staging | None = None,
        finish: Callable[[Message, Any], None] | None = None,
    ) -> None:
        self.buffer = buffer
        self._channel, self._requests, self._staging, self._finish = channel, requests, staging, finish

    def test(self) -> bool:
        """Give MPI a chance to move bytes; whether all messages have left and arrived."""
        # both are asked: each call moves only its own requests for sure
        staged = self._staging is None or self._staging.exchange.test()
        return (not self._requests or all_done(self._requests)) and staged

    def wait(self) -> Any:
        """Return the buffer when all has arrived; repeated calls return it again."""
        if self._requests:
            wait_all(self._requests)
            self._requests = None
        if self._staging is not None:
            staging, self._staging = self._staging, None
            staging.exchange.wait()
            for message, received in staging.receives:
                self._finish(message, received)
            self._channel.release(staging)
        return self.buffer
