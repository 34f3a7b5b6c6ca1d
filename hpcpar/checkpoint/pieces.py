"""Who writes what: every element of every array exactly once, about the same number of bytes on every rank.

A block that several ranks hold (replicas) is cut into parts, and the parts are dealt out among these ranks. All of it
is arithmetic on signatures: every rank finds the same plan without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

from hpcpar.layout.blocks import owned

Box = tuple[tuple[int, int], ...]

CUT_BYTES = 1 << 20
"""Replicas share the writing of a block in parts of at least this many bytes; smaller ones cost more than they save."""


class Piece(NamedTuple):
    """A box of a global array and the rank of the array's mesh that writes it."""

    name: str
    box: Box
    writer: int


def plan_pieces(arrays: Mapping[str, tuple[Any, int]], cut_bytes: int = CUT_BYTES) -> list[Piece]:
    """Return the pieces of arrays that share one mesh, ordered by array and place.

    Parameters
    ----------
    arrays : mapping of str to (Signature, int)
        Signature, without partial axes, and bytes of an element.
    cut_bytes : int
        See `CUT_BYTES`.

    Raises
    ------
    ValueError
        An array is partial.

    Notes
    -----
    Parts go, the largest first, to the replica with the least so far (greedy scheduling, Graham 1969): the load of
    ranks that hold the same arrays differs by at most one part.
    """
    parts: list[tuple[int, str, Box, tuple[int, ...]]] = []
    for name, (sig, itemsize) in arrays.items():
        if sig.partial:
            raise ValueError(f"{name} is partial over {', '.join(sig.partial)}; resolve it before saving")
        for box, replicas in _blocks(sig):
            count = max(1, min(len(replicas), volume(box) * itemsize // cut_bytes))
            parts += [(volume(part) * itemsize, name, part, replicas) for part in _cut(box, count)]
    load: dict[int, int] = {}
    pieces = []
    for nbytes, name, box, replicas in sorted(parts, key=lambda part: (-part[0], part[1], part[2])):
        writer = min(replicas, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + nbytes
        pieces.append(Piece(name, box, writer))
    return sorted(pieces)


def volume(box: Box) -> int:
    """Return the number of elements in a box; 1 for that of a 0-dim array."""
    return prod(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share; None where it is empty."""
    shared = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Return a box as an index of the global array, or of the block `origin` of it."""
    if origin is None:
        return tuple(slice(start, stop) for start, stop in box)
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, origin, strict=True))


def _blocks(sig: Any) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The distinct blocks of an array that are not empty, each with the ranks that hold it."""
    mesh = sig.mesh
    split = [axis for axis in mesh.axes if axis in sig.split_axes]
    others = [axis for axis in mesh.axes if axis not in sig.split_axes]
    stride = {axis: prod(mesh.shape[a] for a in mesh.axes[i + 1 :]) for i, axis in enumerate(mesh.axes)}
    spread = sorted(
        sum(c * stride[a] for a, c in zip(others, place, strict=True))
        for place in product(*(range(mesh.shape[a]) for a in others))
    )
    for place in product(*(range(mesh.shape[a]) for a in split)):
        coords = {**dict.fromkeys(others, 0), **dict(zip(split, place, strict=True))}
        box = sig.box_at(coords)
        if volume(box):
            base = sum(coords[a] * stride[a] for a in split)
            yield box, tuple(base + offset for offset in spread)


def _cut(box: Box, count: int) -> list[Box]:
    """Cut a box into `count` parts along its first dim that is long enough, else along its longest."""
    if count == 1:
        return [box]
    lengths = [stop - start for start, stop in box]
    dim = next((d for d, n in enumerate(lengths) if n >= count), lengths.index(max(lengths)))
    parts = []
    for i in range(count):
        start, stop = owned(lengths[dim], count, i)
        if start < stop:
            low = box[dim][0]
            parts.append((*box[:dim], (low + start, low + stop), *box[dim + 1 :]))
    return parts
