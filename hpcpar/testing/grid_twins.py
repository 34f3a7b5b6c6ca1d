"""Operations on grids of tokens, in torch and on one process, as they are usually written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

Sizes = Sequence[int]


def partition(x: Any, window_size: Sizes, shift_size: Sizes) -> Any:
    """Fill up, roll, cut."""
    import torch

    sizes, k = x.shape[1:-1], len(window_size)
    grid = [-(-n // w) for n, w in zip(sizes, window_size, strict=True)]
    fill = [m for n, g, w in zip(sizes[::-1], grid[::-1], window_size[::-1], strict=True) for m in (0, g * w - n)]
    x = torch.nn.functional.pad(x, (0, 0, *fill))
    x = torch.roll(x, [-s for s in shift_size], list(range(1, k + 1)))
    x = x.reshape(x.shape[0], *[m for pair in zip(grid, window_size, strict=True) for m in pair], x.shape[-1])
    x = x.permute(0, *range(1, 2 * k, 2), *range(2, 2 * k + 1, 2), 2 * k + 1)
    return x.reshape(x.shape[0], *grid, prod(window_size), x.shape[-1])


def merge(y: Any, window_size: Sizes, size: Sizes, shift_size: Sizes) -> Any:
    """The transpose of `partition`, written out: what fills up is dropped."""
    import torch

    k, grid = len(window_size), y.shape[1:-2]
    y = y.reshape(y.shape[0], *grid, *window_size, y.shape[-1])
    y = y.permute(0, *[d for i in range(1, k + 1) for d in (i, i + k)], 2 * k + 1)
    y = y.reshape(y.shape[0], *[g * w for g, w in zip(grid, window_size, strict=True)], y.shape[-1])
    y = torch.roll(y, list(shift_size), list(range(1, k + 1)))
    return y[(slice(None), *[slice(0, n) for n in size])]


def regions(size: Sizes, window: Sizes, shift: Sizes) -> Any:
    """The region (1, *grid, T) of every token: did the roll bring it from the start of a dim, is it filling."""
    import torch

    full = [-(-n // w) * w for n, w in zip(size, window, strict=True)]
    found = torch.zeros(1, *full, 1)
    for d, (n, m, s) in enumerate(zip(size, full, shift, strict=True)):
        place = torch.arange(m).reshape([m if i == d + 1 else 1 for i in range(len(size) + 2)])
        found = found * 3 + torch.where(place >= n, 2, place < s)
    return partition(found, window, shift)[..., 0]


def bias(table: Any, window: Sizes, largest: Sizes) -> Any:
    """The bias (H, T, T) of each pair of tokens, looked up by their distances."""
    import torch

    rows = table.reshape(*[2 * w - 1 for w in largest], table.shape[1])
    tokens = list(np.ndindex(*window))
    away = [[tuple(a - b + w - 1 for a, b, w in zip(i, j, largest, strict=True)) for j in tokens] for i in tokens]
    return torch.stack([torch.stack([rows[at] for at in row]) for row in away]).permute(2, 0, 1)


def window_attention(
    q: Any, k: Any, v: Any, table: Any = None, *, size: Sizes, window_size: Sizes, shift_size: Sizes,
    table_window: Sizes | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """All scores, with -inf between tokens that the roll or the filling brought together."""
    import torch

    region = regions(size, window_size, shift_size)
    apart = (region[..., :, None] != region[..., None, :])[..., None, :, :]
    scores = torch.einsum("...te,...se->...ts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if table is not None:
        scores = scores + bias(table, window_size, table_window or window_size)
    return torch.softmax(scores.masked_fill(apart, -torch.inf), -1) @ v


def grid_attention(q: Any, k: Any, v: Any, scale: float | None = None, context: str = "auto") -> Any:
    """Attention over the tokens in one row."""
    import torch

    n, h, *grid, _ = q.shape
    flat = [a.reshape(n, h, prod(grid), a.shape[-1]) for a in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*flat, scale=scale).reshape(n, h, *grid, v.shape[-1])


TORCH: dict[str, Callable[..., Any]] = {
    "window_partition": partition,
    "window_merge": merge,
    "window_attention": window_attention,
    "grid_attention": grid_attention,
}
