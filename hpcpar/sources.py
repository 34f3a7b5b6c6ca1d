"""What backward moves or makes again instead of keeping it: memory for messages, memory for work.

An operation saves its operands as they were moved, so that backward sends them once only. A tensor with
``keep = "source"`` is saved as it lies instead, which for a parameter costs nothing, and is moved again when backward
needs it: a gathered weight then lives during one operation. This is the switch of sharded state and of the grids. The
results of chosen operations are made again: see `hpcpar.remaking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcpar.primitives.repartition import move, plan
from hpcpar.signature import Signature

if TYPE_CHECKING:
    from hpcpar.tensors import Tensor


class Later:
    """Something that a gradient rule needs and that is made when it is asked for."""

    __slots__ = ()

    def fetch(self) -> Any:
        """Return it; may be collective."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Source(Later):
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
    """What an operation saved, with something to be fetched in the place of some operands."""

    def fetch(self) -> tuple:
        """Return what the operation saved; collective where something is moved."""
        return tuple(item.fetch() if isinstance(item, Later) else item for item in self)


def whole(saved: Any) -> Any:
    """Return what an operation saved, with all that was to be fetched."""
    if saved.__class__ is tuple or not isinstance(saved, (Saved, Later)):
        return saved
    return saved.fetch()


def by_source(saved: Any, tensors: Sequence[Tensor], moves: Sequence[Signature | None], arrays: Sequence[Any]) -> Any:
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
