"""Operands that backward moves again instead of keeping: the memory-for-messages switch of sharded state and of grids.

An operation saves its operands as they were moved, so that backward sends them once only. A tensor with
``keep = "source"`` is saved as it lies instead, which for a parameter costs nothing, and is moved again when backward
needs it: a gathered weight then lives during one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcpar.primitives.repartition import move, plan
from hpcpar.signature import Signature

if TYPE_CHECKING:
    from hpcpar.tensors import Tensor


class Source(NamedTuple):
    """An array as it lies, the signature under which backward needs it, and a parameter that is gathered ahead."""

    array: Any
    sig: Signature
    target: Signature
    parameter: Tensor | None = None

    def fetch(self) -> Any:
        """Return the array under the target; collective."""
        if self.parameter is None:
            return move(self.array, self.sig, self.target)
        return self.parameter.ahead.fetch(self.parameter, self.array, self.sig, self.target)


class Saved(tuple):
    """What an operation saved, with sources in the place of some moved operands."""

    def fetch(self) -> tuple:
        """Return what the operation saved; the sources are moved, which is collective."""
        return tuple(item.fetch() if isinstance(item, Source) else item for item in self)


def by_source(
    saved: Any, tensors: Sequence[Tensor], moves: Sequence[Signature | None], arrays: Sequence[Any]
) -> Any:
    """Return `saved` with each moved operand replaced whose tensor wants to be kept by its source.

    Only operations that save operands in a tuple take part; moves without messages are not worth it.
    """
    sources = {
        id(array): Source(tensor._data, tensor.sig, target, None if tensor.ahead is None else tensor)
        for tensor, target, array in zip(tensors, moves, arrays, strict=True)
        if target is not None and tensor.keep == "source" and plan(tensor.sig, target).sends
    }
    if not sources or not isinstance(saved, tuple) or not any(id(item) in sources for item in saved):
        return saved
    return Saved(sources.get(id(item), item) for item in saved)
