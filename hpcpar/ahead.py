"""Weights that are gathered ahead of use: while one layer computes, the weight of the next one is on its way.

The order in which weights are used is that of the pass before, forward and backward. A program that comes to use them
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
    """The order of the gathered weights of one plan; each fetch starts the next one.

    One more weight than without is in memory. Passes with and without a tape have an order each.
    """

    def __init__(self) -> None:
        self._orders: dict[bool, list[Use]] = {True: [], False: []}
        self._at = 0
        self._taped = True
        self._flight: Flight | None = None
        _all.append(weakref.ref(self))

    def fetch(self, tensor: Tensor, array: Any, source: Signature, target: Signature) -> Any:
        """Return `array`, the shard of `tensor` under `source`, moved to `target`; and start the next move."""
        use = Use(tensor, target)
        order = self._follow(use)
        flight, self._flight = self._flight, None
        if flight is not None and flight.use == use and flight.array is array:
            move = flight.move
        else:
            if flight is not None:
                flight.move.abandon()
            move = Move(array, source, target)
        moved = move.wait()
        if self._at < len(order):
            coming = order[self._at]
            data = coming.tensor._data
            self._flight = Flight(coming, data, Move(data, coming.tensor.sig, coming.target))
        return moved

    def _follow(self, use: Use) -> list[Use]:
        """Enter a use in the order of the current kind of pass, and step behind it."""
        if self._taped != autograd.taped() and not autograd.walking():
            self._taped, self._at = autograd.taped(), 0
        order = self._orders[self._taped]
        if self._at >= len(order) or order[self._at] != use:
            if order and order[0] == use and not autograd.walking():  # a forward pass begins
                self._at = 0
            else:
                del order[self._at :]
                order.append(use)
        self._at += 1
        return order

    def forget(self, tensor: Tensor) -> None:
        """Drop what flies of a weight that has changed."""
        if self._flight is not None and self._flight.use.tensor is tensor:
            self._flight.move.abandon()
            self._flight = None

    def rewind(self) -> None:
        """A backward has ended: what comes next is a pass from the start."""
        if self._flight is not None:
            self._flight.move.abandon()
            self._flight = None
        self._at = 0


_all: list[weakref.ref[Ahead]] = []


def _rewind_all() -> None:
    _all[:] = [held for held in _all if held() is not None]
    for held in _all:
        ahead = held()
        if ahead is not None:
            ahead.rewind()


autograd.at_end.append(_rewind_all)
