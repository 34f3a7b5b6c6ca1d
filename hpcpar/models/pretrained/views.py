"""Where the elements of a parameter lie in a stored tensor: transposed, one of several fused, with dims merged or not.

A view is an offset and one stride for each dim of the parameter, so that any block of the parameter is a list of runs
of consecutive elements in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

Box = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class View:
    """A parameter of `shape` inside the stored tensor `name`.

    Attributes
    ----------
    name : str
    stored : tuple of int
        Shape of the stored tensor.
    shape : tuple of int
        Global shape of the parameter.
    strides : tuple of int
        In elements of the stored tensor.
    offset : int
        Element of the stored tensor that is the parameter's first.
    """

    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the parameter as they follow each other in the file, slowest first."""
        return tuple(sorted(range(len(self.shape)), key=lambda d: -self.strides[d]))

    def runs(self, box: Box) -> Runs:
        """Return where the block `box` of the parameter lies."""
        order = self.order
        lengths = [box[d][1] - box[d][0] for d in order]
        strides = [self.strides[d] for d in order]
        start = self.offset + sum(box[d][0] * self.strides[d] for d in order)
        if not prod(lengths):
            return Runs(start, 0, (), ())
        run, outer = 1, len(order)
        while outer and strides[outer - 1] == run:
            outer -= 1
            run *= lengths[outer]
        return Runs(start, run, tuple(lengths[:outer]), tuple(strides[:outer]))


@dataclass(frozen=True)
class Runs:
    """Runs of `length` consecutive elements: one for each index of a grid, rows of a block in the file's order."""

    start: int
    length: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    def __iter__(self) -> Iterator[int]:
        """Yield the first element of each run."""
        if self.length:
            for index in np.ndindex(*self.counts):
                yield self.start + sum(i * s for i, s in zip(index, self.strides, strict=True))


def whole(name: str, shape: Sequence[int], stored: Sequence[int] | None = None) -> View:
    """A view of all elements in order; `stored` where its dims are merged otherwise than the parameter's."""
    shape = tuple(shape)
    return View(name, tuple(stored or shape), shape, _contiguous(shape))


def transposed(name: str, shape: Sequence[int], first: int, parts: tuple[int, int] = (0, 1)) -> View:
    """A view of a matrix stored the other way round: rows are inputs, as in GPT-2's files.

    Parameters
    ----------
    shape : sequence of int
        Of the parameter: `first` dims of outputs, then dims of inputs.
    parts : (int, int)
        Which of how many equal parts the parameter is of the stored rows.
    """
    outputs, inputs = tuple(shape[:first]), tuple(shape[first:])
    part, count = parts
    row = prod(outputs) * count
    strides = (*_contiguous(outputs), *(s * row for s in _contiguous(inputs)))
    return View(name, (prod(inputs), row), tuple(shape), strides, part * prod(outputs))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
