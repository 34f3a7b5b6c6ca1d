"""Copies between boxes of arrays: the product over the dims of the runs of a plan, and its adjoint.

Arrays are in memory order here: (N, *split dims, C), of which the plans describe the dims in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from hpcpar.layout.maps import Run
from hpcpar.transport.exchange import Rows


class Copies:
    """Copies ``dst[...] = src[...]`` for the product of the runs of each dim.

    Parameters
    ----------
    runs : sequence of sequence of Run
        For each dim between N and C.
    lengths : sequence of int
        Length of the source along these dims.
    """

    __slots__ = ("_complete", "_disjoint", "pairs")

    def __init__(self, runs: Sequence[Sequence[Run]], lengths: Sequence[int]) -> None:
        self.pairs = tuple(_pair(choice) for choice in product(*runs))
        counts = [_times_shown(r, n) for r, n in zip(runs, lengths, strict=True)]
        self._disjoint = all(c.max(initial=0) <= 1 for c in counts)
        self._complete = bool(self.pairs) and all(c.min(initial=1) >= 1 for c in counts)

    def copy(self, dst: Any, src: Any) -> None:
        """Write what `src` shows into `dst`; what the runs do not cover stays as it is."""
        for to, of, _ in self.pairs:
            dst[to] = src[of]

    def add_adjoint(self, src_grad: Any, dst_grad: Any) -> None:
        """Add to each source element the gradients of all its copies, in the order of the runs."""
        for to, of, repeated in self.pairs:
            part = dst_grad[to]
            src_grad[of] += part.sum(repeated, keepdims=True, dtype=part.dtype) if repeated else part

    def adjoint(self, src_grad: Any, dst_grad: Any) -> None:
        """As `add_adjoint` on zeros, written in one go where each element has one copy."""
        if not self._complete or not self._disjoint:
            src_grad[...] = 0
        if not self._disjoint:
            self.add_adjoint(src_grad, dst_grad)
            return
        for to, of, repeated in self.pairs:
            part = dst_grad[to]
            src_grad[of] = part.sum(repeated, keepdims=True, dtype=part.dtype) if repeated else part


def _pair(choice: Sequence[Run]) -> tuple[tuple[slice, ...], tuple[slice, ...], tuple[int, ...]]:
    to = (slice(None), *(slice(run.dst, run.dst + run.length) for run in choice))
    of = (slice(None), *(_shown(run) for run in choice))
    return to, of, tuple(dim + 1 for dim, run in enumerate(choice) if run.step == 0)


def _shown(run: Run) -> slice:
    _, src, length, step = run
    if step == 0:
        return slice(src, src + 1)
    stop = src + step * length
    return slice(src, stop if stop >= 0 else None, step)


def _times_shown(runs: Sequence[Run], length: int) -> np.ndarray:
    """How often runs copy from each source element, all positions of a run of step 0 counted as one."""
    times = np.zeros(length, np.int64)
    for run in runs:
        times[_shown(run)] += 1
    return times


def fill_boxes(holes: Sequence[Sequence[tuple[int, int]]], sizes: Sequence[int]) -> tuple[tuple[slice, ...], ...]:
    """Return disjoint boxes that cover the buffer positions which are FILL in at least one dim.

    Parameters
    ----------
    holes : sequence of sequence of (int, int)
        For each dim the intervals that are FILL.
    sizes : sequence of int
        Lengths of the buffer along these dims.
    """
    boxes: list[tuple[slice, ...]] = []
    covered: list[list[slice]] = [[]]  # boxes of the dims before that show something
    for gaps, size in zip(holes, sizes, strict=True):
        boxes += [(slice(None), *head, slice(a, b)) for head in covered for a, b in gaps]
        edges = [0, *(edge for gap in gaps for edge in gap), size]
        shown = [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        covered = [[*head, piece] for head in covered for piece in shown]
    return tuple(boxes)


def single_box(runs: Sequence[Sequence[Run]], *, side: str) -> list[tuple[int, int]] | None:
    """Return (first, length) per dim if the runs are one plain box on the given side, ``"src"`` or ``"dst"``."""
    if any(len(r) != 1 or r[0].step != 1 for r in runs):
        return None
    return [(getattr(r[0], side), r[0].length) for r in runs]


def rows_of(shape: Sequence[int], box: Sequence[tuple[int, int]], itemsize: int) -> Rows | None:
    """Return the box (first, length per dim) of a C-contiguous array as equal runs of bytes, if it is that regular."""
    strides = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    # from the fastest dim to the slowest, without dims of length 1: they are regular whatever their stride
    lengths = [length for _, length in reversed(box)]
    left = [(length, stride) for length, stride in zip(lengths, reversed(strides), strict=True) if length > 1]
    run = itemsize
    while left and left[0][1] == run:
        run *= left.pop(0)[0]
    if not left:
        return Rows(offset, 1, run, run)
    count, stride = left.pop(0)
    for length, distance in left:
        if distance != count * stride:
            return None
        count *= length
    return Rows(offset, count, run, stride)
