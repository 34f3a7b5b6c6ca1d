"""The steps of which a repartition is made: each takes this rank's array to the next one.

Messages carry arrays in memory order (channels last with four and five dims), so that packing them is a plain copy and
results lie as operations want them. The order is a function of the number of dims only: strides would differ between
ranks where a dim has length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcpar.transport import Comm
from hpcpar.transport.under_way import Gather, Scatter, Sum

Index = tuple[slice, ...]
Shape = tuple[int, ...]
Order = tuple[int, ...]


def memory_order(ndim: int) -> tuple[Order, Order]:
    """Return the dims from slowest to fastest in memory, and the inverse permutation."""
    if ndim not in (4, 5):
        return tuple(range(ndim)), tuple(range(ndim))
    return (0, *range(2, ndim), 1), (0, ndim - 1, *range(1, ndim - 1))


def _new(make: str, shape: Shape, like: Any) -> Any:
    from hpcpar.kernels import array_module

    order, back = memory_order(len(shape))
    return getattr(array_module(like), make)(tuple(shape[d] for d in order), like.dtype).transpose(back)


class Started(NamedTuple):
    """A collective under way, with `test` and `wait`, and how its result becomes that of the step."""

    message: Any
    finish: Callable[[Any], Any]


@dataclass(frozen=True)
class Slice:
    """Keep a part of what this rank holds: no message."""

    index: Index
    words: float = 0.0

    def __call__(self, array: Any) -> Any:
        return array[self.index]

    def __str__(self) -> str:
        return "slice"


@dataclass(frozen=True)
class AllReduce:
    """Partial over axes becomes replicated."""

    comm: Comm
    words: float

    def __call__(self, array: Any) -> Any:
        order, back = memory_order(array.ndim)
        return self.comm.all_reduce(array.transpose(order)).transpose(back)

    def start(self, array: Any) -> Started:
        """Begin the same, to be waited for later."""
        order, back = memory_order(array.ndim)
        return Started(Sum(self.comm, array.transpose(order)), lambda total: total.transpose(back))

    def __str__(self) -> str:
        return f"all_reduce({self.comm.name})"


@dataclass(frozen=True)
class ReduceScatter:
    """Partial over an axis becomes split by it; `pieces[r]` is what rank r keeps."""

    comm: Comm
    dim: int
    pieces: tuple[Index, ...]
    words: float

    def __call__(self, array: Any) -> Any:
        _, back = memory_order(array.ndim)
        return self.comm.reduce_scatter(self._parted(array)).transpose(back)

    def start(self, array: Any) -> Started:
        """Begin the same, to be waited for later."""
        _, back = memory_order(array.ndim)
        return Started(Scatter(self.comm, self._parted(array)), lambda mine: mine.transpose(back))

    def _parted(self, array: Any) -> list[Any]:
        order, _ = memory_order(array.ndim)
        return [array[p].transpose(order) for p in self.pieces]

    def __str__(self) -> str:
        return f"reduce_scatter(dim {self.dim}, {self.comm.name})"


@dataclass(frozen=True)
class AllGather:
    """Drop the last axes of the stack of one dim; `shapes[r]` is what rank r holds before."""

    comm: Comm
    dim: int
    shapes: tuple[Shape, ...]
    words: float

    def __call__(self, array: Any) -> Any:
        return self._joined(self.comm.all_gather(*self._ordered(array)))

    def start(self, array: Any) -> Started:
        """Begin the same, to be waited for later."""
        return Started(Gather(self.comm, *self._ordered(array)), self._joined)

    def _ordered(self, array: Any) -> tuple[Any, list[Shape]]:
        order, _ = memory_order(array.ndim)
        return array.transpose(order), [tuple(s[d] for d in order) for s in self.shapes]

    def _joined(self, blocks: Sequence[Any]) -> Any:
        _, back = memory_order(len(self.shapes[0]))
        return np.concatenate(blocks, axis=back[self.dim]).transpose(back)

    def __str__(self) -> str:
        return f"all_gather(dim {self.dim}, {self.comm.name})"


@dataclass(frozen=True)
class Mask:
    """Replicated becomes partial: index 0 of the axes keeps the value."""

    keep: bool
    words: float = 0.0

    def __call__(self, array: Any) -> Any:
        return array if self.keep else np.zeros_like(array)

    def __str__(self) -> str:
        return "keep on index 0"


@dataclass(frozen=True)
class Embed:
    """Split becomes partial: the block among zeros, no message."""

    shape: Shape
    index: Index
    words: float = 0.0

    def __call__(self, array: Any) -> Any:
        out = _new("zeros", self.shape, array)
        out[self.index] = array
        return out

    def __str__(self) -> str:
        return "embed in zeros"


@dataclass(frozen=True)
class Exchange:
    """The general move of blocks: every rank receives what it needs and does not hold, from one owner each.

    Attributes
    ----------
    shape : tuple of int
        What this rank holds afterwards.
    own : pair of index or None
        Where in the result, and from where in the source, what stays on this rank goes.
    sends, receives : tuple
        Peer and index in the source; peer, index in the result and its shape.
    """

    comm: Comm
    shape: Shape
    own: tuple[Index, Index] | None
    sends: tuple[tuple[int, Index], ...]
    receives: tuple[tuple[int, Index, Shape], ...]
    words: float

    def __call__(self, array: Any) -> Any:
        order, back = memory_order(array.ndim)
        received = self.comm.exchange(
            {peer: array[index].transpose(order) for peer, index in self.sends},
            {peer: (tuple(shape[d] for d in order), array.dtype) for peer, _, shape in self.receives},
            like_array=array,
        )
        out = _new("empty", self.shape, array)
        if self.own is not None:
            out[self.own[0]] = array[self.own[1]]
        for peer, index, _ in self.receives:
            out[index] = received[peer].transpose(back)
        return out

    def __str__(self) -> str:
        return f"all_to_all({self.comm.name})"


@dataclass(frozen=True)
class Plan:
    """The steps from one signature to another; `words` is how many elements a rank sends or receives for it."""

    steps: tuple[Any, ...]
    words: float

    @property
    def sends(self) -> bool:
        """Whether messages belong to it, on any rank."""
        return any(isinstance(step, (AllReduce, ReduceScatter, AllGather, Exchange)) for step in self.steps)

    def __call__(self, array: Any) -> Any:
        for step in self.steps:
            array = step(array)
        return array

    def __str__(self) -> str:
        return " -> ".join(str(s) for s in self.steps) or "nothing"
