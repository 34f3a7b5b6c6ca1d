"""Random grids of tokens, windows of them, and attention inside windows and over whole grids."""

from __future__ import annotations

from math import prod
from typing import Any

from hpcpar.layout.layout import Layout
from hpcpar.testing.cases import Array
from hpcpar.testing.contraction_draws import Mesh
from hpcpar.testing.drawing import Drawn, Family, Rng, lengths, some
from hpcpar.testing.layouts import draw_layout


def draw_grid(rng: Rng) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Lengths of a grid of 1 to 3 dims, windows that may hang over its ends, and a shift.

    Along the first dim at least one window has two tokens of one region: gradients of scores are zero otherwise.
    """
    dims = int(rng.integers(1, 4))
    size = (int(rng.integers(3, 8)), *lengths(rng, dims - 1, 1, 7))
    window = (int(rng.integers(2, 4)), *lengths(rng, dims - 1, 1, 4))
    return size, {"window_size": window, "shift_size": tuple(int(rng.integers(w)) for w in window)}


def grid_of(size: tuple[int, ...], window: tuple[int, ...]) -> list[int]:
    """How many windows there are along each dim."""
    return [-(-n // w) for n, w in zip(size, window, strict=True)]


def draw_windows(rng: Rng) -> Drawn:
    """Windows cut, and put together again."""
    size, arguments = draw_grid(rng)
    n, c = 0 if rng.random() < 0.02 else int(rng.integers(1, 4)), int(rng.integers(1, 5))
    if rng.random() < 0.5:
        return "window_partition", [Array((n, *size, c))], arguments
    window = arguments["window_size"]
    return "window_merge", [Array((n, *grid_of(size, window), prod(window), c))], {**arguments, "size": size}


def place_windows(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Split anything but the tokens of a window."""
    shape = arrays[0].shape
    forbid = [len(shape) - 2] if "size" in arguments else []
    arrays[0] = Array(shape, draw_layout(rng, shape, mesh, rng.random() < 0.2, forbid), arrays[0].values)


def draw_window_attention(rng: Rng) -> Drawn:
    """Attention inside windows, with and without biases of relative positions."""
    size, arguments = draw_grid(rng)
    window = arguments["window_size"]
    heads, wide, out = lengths(rng, 3, 1, 4)
    lead = (int(rng.integers(1, 4)), *grid_of(size, window), heads, prod(window))
    arrays = [Array((*lead, e)) for e in (wide, wide, out)]
    arguments |= {"size": size, **some(rng, {"scale": 0.7}, 0.4)}
    if rng.random() < 0.6:
        largest = tuple(w + int(rng.integers(3)) for w in window)
        arguments["table_window"] = largest
        arrays.append(Array((prod(2 * w - 1 for w in largest), heads)))
    return "window_attention", arrays, arguments


def draw_grid_attention(rng: Rng) -> Drawn:
    """Attention over all tokens of a grid."""
    grid = (int(rng.integers(2, 5)), *lengths(rng, int(rng.integers(3)), 1, 5))
    wide, out = lengths(rng, 2, 1, 5)
    lead = (int(rng.integers(1, 4)), int(rng.integers(1, 6)), *grid)
    return "grid_attention", [Array((*lead, e)) for e in (wide, wide, out)], some(rng, {"scale": 0.7}, 0.4)


def place_attention(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Split samples, heads and grid alike in query, key and value; each way to serve a split grid."""
    whole = [-1] if "size" not in arguments else [-1, -2]  # features, and the tokens of a window
    layout = draw_layout(rng, arrays[0].shape, mesh, rng.random() < 0.1, whole)
    for i, array in enumerate(arrays[:3]):
        arrays[i] = Array(array.shape, layout if i == 0 or rng.random() < 0.8 else Layout(), array.values)
    if len(arrays) > 3:
        arrays[3] = Array(arrays[3].shape, draw_layout(rng, arrays[3].shape, mesh), arrays[3].values)
    if "size" not in arguments:
        arguments["context"] = str(rng.choice(["auto", "ring", "all_to_all", "gather"]))


GRIDS: dict[str, Family] = {
    "windows": Family(draw_windows, 1, place_windows),
    "window_attention": Family(draw_window_attention, 1, place_attention),
    "grid_attention": Family(draw_grid_attention, 1, place_attention),
}
