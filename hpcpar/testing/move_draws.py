"""Random arguments of operations that move elements: pad, slices, flip, roll, joining."""

from __future__ import annotations

from typing import Any

from hpcpar.testing.cases import Array
from hpcpar.testing.drawing import Drawn, Family, Rng, lengths, spatial_shape


def any_shape(rng: Rng) -> tuple[int, ...]:
    """Return a shape of 1 to 5 dims."""
    ndim = int(rng.integers(1, 6))
    return lengths(rng, ndim, 1, {1: 20, 2: 12, 3: 9, 4: 7, 5: 6}[ndim])


def draw_pad(rng: Rng) -> Drawn:
    """Padding in all modes, negative widths too."""
    mode = str(rng.choice(["constant", "reflect", "replicate", "circular"]))
    if mode == "constant":
        shape = any_shape(rng)
        count = int(rng.integers(1, len(shape) + 1))
    else:
        count = int(rng.integers(1, 4))
        shape = spatial_shape(rng, count)
    widths: list[int] = []
    for n in reversed(shape[len(shape) - count :]):
        most = {"reflect": n - 1, "circular": n}.get(mode, n + 2)
        lo, hi = (int(rng.integers(-(n // 2), max(most, 0) + 1)) for _ in range(2))
        widths += [lo, hi]
    arguments: dict[str, Any] = {"pad": tuple(widths), "mode": mode}
    if mode == "constant" and rng.random() < 0.5:
        arguments["value"] = 1.5
    return "pad", [Array(shape)], arguments


def draw_flip(rng: Rng) -> Drawn:
    """Reversal of some dims."""
    shape = any_shape(rng)
    count = int(rng.integers(1, len(shape) + 1))
    return "flip", [Array(shape)], {"dims": tuple(int(d) for d in rng.permutation(len(shape))[:count])}


def draw_roll(rng: Rng) -> Drawn:
    """Rolls by more than a dim, backwards, and twice along a dim."""
    shape = any_shape(rng)
    count = int(rng.integers(1, 4))
    dims = tuple(int(d) for d in rng.integers(0, len(shape), count))
    return "roll", [Array(shape)], {"shifts": lengths(rng, count, -15, 16), "dims": dims}


def draw_index(rng: Rng) -> Drawn:
    """Numbers, slices with steps, ``...`` and None."""
    shape = any_shape(rng)
    items: list[Any] = []
    for n in shape:
        what = rng.random()
        if what < 0.2:
            items.append(int(rng.integers(-n, n)))
        elif what < 0.3:
            items.append(None)
            items.append(slice(None))
        elif what < 0.5:
            items.append(slice(None))
        else:
            start, stop = (None if rng.random() < 0.3 else int(rng.integers(-n - 1, n + 2)) for _ in range(2))
            items.append(slice(start, stop, int(rng.integers(1, 4))))
    if rng.random() < 0.2:
        items[-1:] = [Ellipsis]
    return "index", [Array(shape)], {"item": tuple(items)}


def draw_cat(rng: Rng) -> Drawn:
    """Concatenation of one to four parts along any dim."""
    shape = any_shape(rng)
    dim = int(rng.integers(0, len(shape)))
    joined = [int(rng.integers(1, 8)), *lengths(rng, int(rng.integers(0, 4)), 0, 8)]
    parts = [Array((*shape[:dim], n, *shape[dim + 1 :])) for n in joined]
    return "cat", parts, {"dim": dim - len(shape) if rng.random() < 0.3 else dim}


def draw_stack(rng: Rng) -> Drawn:
    """Stacking of one to three parts at any place."""
    shape = any_shape(rng)[:4]
    parts = [Array(shape) for _ in range(int(rng.integers(1, 4)))]
    return "stack", parts, {"dim": int(rng.integers(-len(shape) - 1, len(shape) + 1))}


MOVES: dict[str, Family] = {
    "pad": Family(draw_pad, 2),
    "flip": Family(draw_flip),
    "roll": Family(draw_roll),
    "index": Family(draw_index, 2),
    "cat": Family(draw_cat, 1, "same"),
    "stack": Family(draw_stack, 0.5, "same"),
}
