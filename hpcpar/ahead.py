"""Weights that are gathered ahead of use: while one layer computes, the weight of the next one is on its way.

The order in which weights are used is that of the passes before, forward and backward. A program that comes to use them
in another order is served all the same, after what flies in vain has landed. All decisions follow the program, hence
are the same on all ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcpar import autograd
from hpcpar.primitives.under_way import Move
from hpcpar.signature import Signature

if TYPE_CHECKING:
    from hpcpar.tensors import Tensor


class Use(NamedTuple):
    """One use of a weight: the tensor, and the signature under which it is needed."""

    tensor: Tensor
    target: Signature


class Flight(NamedTuple):
    """A weight on its way: its use, the array that it was started from, and the move."""

    use: Use
    array: Any
    move: Move


class Ahead:
    """What follows what among the gathered weights of one plan; each fetch starts the next one.

    A weight is foretold by the two uses before it, which tells forward from backward, and by whether operations are
    recorded, which tells training from evaluation. One more weight than without is in memory.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[bool, Use | None, Use], Use] = {}
        self._first: Use | None = None
        self._last: Use | None = None
        self._seen: tuple[bool, Use | None, Use] | None = None
        self._flight: Flight | None = None
        _all.append(weakref.ref(self))

    def __deepcopy__(self, memo: dict) -> Ahead:
        return Ahead()  # of a copied model, whose weights follow each other in an order of their own

    def fetch(self, tensor: Tensor, array: Any, source: Signature, target: Signature) -> Any:
        """Return `array`, the shard of `tensor` under `source`, moved to `target`; and start the next move."""
        use = Use(tensor, target)
        coming = self._follow(use)
        flight, self._flight = self._flight, None
        if flight is not None and flight.use == use and flight.array is array:
            move = flight.move
        else:
            if flight is not None:
                flight.move.abandon()
            move = Move(array, source, target)
        moved = move.wait()
        if coming is not None:
            data = coming.tensor._data
            self._flight = Flight(coming, data, Move(data, coming.tensor.sig, coming.target))
        return moved

    def _follow(self, use: Use) -> Use | None:
        """Learn that `use` came next, and return what came after it the last time."""
        if use == self._first and not autograd.walking():  # a forward pass begins: what went before says nothing of it
            self._last = self._seen = None
        if self._seen is None:
            self._first = use
        else:
            self._next[self._seen] = use
        self._seen = (autograd.grad_enabled(), self._last, use)
        self._last = use
        return self._next.get(self._seen)

    def forget(self, tensor: Tensor) -> None:
        """Drop what flies of a weight that has changed."""
        if self._flight is not None and self._flight.use.tensor is tensor:
            self._flight.move.abandon()
            self._flight = None

    def rewind(self) -> None:
        """A backward has ended: the next pass comes after the weights have changed."""
        if self._flight is not None:
            self._flight.move.abandon()
            self._flight = None
        self._last = self._seen = None


_all: list[weakref.ref[Ahead]] = []


def _rewind_all() -> None:
    _all[:] = [held for held in _all if held() is not None]
    for held in _all:
        ahead = held()
        if ahead is not None:
            ahead.rewind()


autograd.at_end.append(_rewind_all)
