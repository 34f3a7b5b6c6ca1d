"""The block rule: which rank owns which part of a split dim. Nothing else in the package decides that.

Rank r of p owns ``[r * n // p, (r + 1) * n // p)``. The rule is a function of (n, p, r) alone, so arrays of equal
length have equal blocks, and a row-major index over several axes refines the blocks of the first axes. Blocks differ by
at most one element and are empty on some ranks where n < p.
"""

from __future__ import annotations

from collections.abc import Sequence


def owned(n: int, p: int, r: int) -> tuple[int, int]:
    """Return the half-open interval of ``range(n)`` that rank `r` of `p` owns.

    Examples
    --------
    >>> [owned(7, 3, r) for r in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return r * n // p, (r + 1) * n // p


def owner(n: int, p: int, i: int) -> int:
    """Return the rank of `p` that owns index `i` of ``range(n)``: the exact inverse of `owned`.

    Raises
    ------
    IndexError
        When `i` is outside ``[0, n)``.

    Notes
    -----
    Rank r ends at ``floor((r + 1) n / p)``; the first r with ``i + 1 <= floor((r + 1) n / p)`` is
    ``ceil((i + 1) p / n) - 1``.
    """
    if not 0 <= i < n:
        raise IndexError(f"index {i} is outside a dim of length {n}")
    return ((i + 1) * p - 1) // n


def overlapping(n: int, p: int, lo: int, hi: int) -> Sequence[int]:
    """Return the ranks, ascending, whose non-empty blocks meet ``[lo, hi)``; the interval is clipped to ``[0, n)``."""
    lo, hi = max(lo, 0), min(hi, n)
    if lo >= hi:
        return range(0)
    if n >= p:
        return range(owner(n, p, lo), owner(n, p, hi - 1) + 1)
    # each index has an owner of its own, and the ranks between two owners own nothing
    return tuple(owner(n, p, i) for i in range(lo, hi))
