"""Gather maps of operations that only move elements: the buffer they fill is the result."""

from __future__ import annotations

from hpcpar.layout.blocks import owned
from hpcpar.layout.maps import Map, Run, interval_map, padded_runs


def pad_map(n: int, o0: int, o1: int, lo: int, hi: int, mode: str = "constant") -> Map:
    """Return what positions ``[o0, o1)`` of a dim padded by (lo, hi) show; negative paddings crop.

    Parameters
    ----------
    mode : {"constant", "reflect", "replicate", "circular"}
        As in torch; with constant the padding is FILL.

    Notes
    -----
    Circular padding repeats the dim as cropped; reflect and replicate mirror and repeat the dim's own ends.
    """
    if o1 <= o0:
        return Map(0)
    if mode != "circular":
        return Map(o1 - o0, padded_runs(n, o0 - lo, o1 - lo, "zeros" if mode == "constant" else mode))
    cut = max(-lo, 0)
    left = n - cut - max(-hi, 0)
    runs = padded_runs(left, o0 - max(lo, 0), o1 - max(lo, 0), mode)
    return Map(o1 - o0, tuple(run._replace(src=run.src + cut) for run in runs))


def slice_map(n: int, o0: int, o1: int, start: int, step: int) -> Map:
    """Return what elements ``[o0, o1)`` of ``x[start::step]`` show; `start` is an index, `step` may be negative."""
    if o1 <= o0:
        return Map(0)
    first, last = start + o0 * step, start + (o1 - 1) * step
    assert min(first, last) >= 0 and max(first, last) < n, f"{start}::{step} leaves a dim of length {n} before {o1}"
    return Map(o1 - o0, (Run(0, first, o1 - o0, step if o1 - o0 > 1 else 1),))


def flip_map(n: int, o0: int, o1: int) -> Map:
    """Return what elements ``[o0, o1)`` of the reversed dim show."""
    return slice_map(n, o0, o1, n - 1, -1)


def roll_map(n: int, o0: int, o1: int, shift: int) -> Map:
    """Return what elements ``[o0, o1)`` of the dim rolled by `shift` show: element o was at o - shift."""
    if o1 <= o0:
        return Map(0)
    first = (o0 - shift) % n
    return Map(o1 - o0, padded_runs(n, first, first + o1 - o0, "circular"))


def concat_map(n: int, o0: int, o1: int, offset: int) -> Map:
    """Return what elements ``[o0, o1)`` of a concatenation show of the part that begins at `offset`; else FILL.

    All parts have maps of one size, so that they fill one buffer between them.
    """
    return Map(o1 - o0, padded_runs(n, o0 - offset, o1 - offset, "zeros")) if o1 > o0 else Map(0)


def block_map(n: int, m: int, r: int) -> Map:
    """Return the map of rank r when the dim is gathered to the first m ranks: its block of m, or nothing for r >= m.

    Going back to all ranks is the adjoint of the exchange.
    """
    return interval_map(n, *owned(n, m, r)) if r < m else Map(0)


def shuffle_map(n: int, o0: int, o1: int, r: int) -> Map:
    """Return what outputs ``[o0, o1)`` of a pixel shuffle by r read of a dim of length n.

    The locally shuffled buffer begins at output ``r (o0 // r)`` and is cropped to the block.
    """
    return interval_map(n, o0 // r, -(-o1 // r)) if o1 > o0 else Map(0)


def unshuffle_map(n: int, o0: int, o1: int, r: int) -> Map:
    """Return what outputs ``[o0, o1)`` of a pixel unshuffle by r read of a dim of length n, a multiple of r."""
    return interval_map(n, o0 * r, o1 * r)


def piece_map(n: int, o0: int, o1: int, offset: int) -> Map:
    """Return what of elements ``[o0, o1)`` of a concatenation is in the part that begins at `offset`, and nothing else.

    The pieces of all parts, one after the other, are the block.
    """
    return interval_map(n, min(max(o0 - offset, 0), n), max(min(o1 - offset, n), 0))


def window_tokens_map(n: int, o0: int, o1: int, w: int, shift: int) -> Map:
    """Return the elements of windows ``[o0, o1)`` of w elements each, of a dim rolled back by `shift`.

    The dim of length n is first filled up to ``m = ceil(n / w) w`` elements, which windows cover; then element j of the
    windows shows ``(j + shift) mod m``, or FILL where that is no element. Shifts are less than w.
    """
    if o1 <= o0:
        return Map(0)
    u0, u1, whole = o0 * w + shift, o1 * w + shift, -(-n // w) * w
    return Map(u1 - u0, padded_runs(n, u0, u1, "zeros") + padded_runs(n, u0 - whole, u1 - whole, "zeros"))
