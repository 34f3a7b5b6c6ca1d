"""What of an output block needs nothing borrowed, and how to cut the rest into boxes."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]


def interior(n: int, a: int, b: int, o0: int, o1: int, k: int, s: int, d: int, lo: int) -> Interval:
    """Return the outputs of ``[o0, o1)`` whose zero-padded windows touch no element outside the own ``[a, b)``.

    Parameters
    ----------
    n : int
        Length of the input, of which ``[a, b)`` is owned here.
    k, s, d, lo : int
        Kernel size, stride, dilation and padding before, as in `window_map`.

    Notes
    -----
    For maps that repeat elements (padding modes) use `DimPlan.at_home`, which looks at the map.
    """
    if b <= a or o1 <= o0:
        return o0, o0
    i0 = o0 if a == 0 else max(o0, -((-a - lo) // s))
    i1 = o1 if b == n else min(o1, (b - 1 + lo - d * (k - 1)) // s + 1)
    return (i0, i1) if i0 < i1 else (o0, o0)


def windows_inside(j0: int, j1: int, count: int, k: int, s: int, d: int) -> Interval:
    """Return which of the `count` windows of a buffer lie inside its positions ``[j0, j1)``; window o begins at o s."""
    first, last = max(0, -(-j0 // s)), min(count, (j1 - d * (k - 1) - 1) // s + 1)
    return (first, last) if first < last else (0, 0)


def rim(block: Sequence[Interval], inner: Sequence[Interval]) -> list[tuple[Interval, ...]]:
    """Return disjoint boxes that together with the box `inner` make up `block`; `inner` lies inside it.

    The rim is peeled like an onion: two slabs a dim, each already cut to the interior in the dims before, so at most
    two boxes a dim. Where the interior is empty the one box is the block.
    """
    if any(i0 >= i1 for i0, i1 in inner):
        boxes = [tuple(block)]
    else:
        boxes = []
        for dim, ((o0, o1), (i0, i1)) in enumerate(zip(block, inner, strict=True)):
            head, tail = tuple(inner[:dim]), tuple(block[dim + 1 :])
            boxes += [(*head, (o0, i0), *tail), (*head, (i1, o1), *tail)]
    return [box for box in boxes if all(a < b for a, b in box)]
