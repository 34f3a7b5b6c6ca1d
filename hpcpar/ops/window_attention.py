"""Attention inside the windows of a grid of tokens, under any split of samples, windows and heads: without a message.

A rank has whole windows (`ops.windows`), so all that a query sees is there. Windows of a rolled grid hold tokens from
both ends of a dim, and those that hang over the end hold what is none: tokens of different regions do not see each
other. Regions follow from the sizes alone.

The bias of relative positions is looked up inside the operation, so that its gradient is that of the table, which a
parameter keeps partial until gradients are synchronised, and not that of all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule, split_conflict
from hpcpar.ops.grid_attention import check_compute_dtype, scale_of
from hpcpar.ops.spatial import Lengths, per_dim
from hpcpar.ops.windows import Sizes, window_grid
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor
from hpcpar.transport.device import like as _like


def window_regions(
    size: Sequence[int], window: Sequence[int], shift: Sequence[int], part: Sequence[tuple[int, int]] | None = None
) -> np.ndarray | None:
    """Return the region of each token of each window, int8 (windows, T); None where every window is one region.

    Parameters
    ----------
    size, window, shift : sequence of int
        As of `window_partition`.
    part : sequence of (int, int), optional
        Interval of windows along each dim; all by default.

    Notes
    -----
    Along a dim a token is from the inside of the rolled grid (0), from its beginning, which came to the end (1), or
    none (2). Regions of several dims are told apart in base 3.
    """
    grid = window_grid(size, window)
    if not any(shift) and all(g * w == n for g, w, n in zip(grid, window, size, strict=True)):
        return None
    part = [(0, g) for g in grid] if part is None else part
    k = len(grid)
    total = np.zeros([b - a for a, b in part] + list(window), np.int8)
    for d, (n, g, w, s, (a, b)) in enumerate(zip(size, grid, window, shift, part, strict=True)):
        place = np.arange(a * w, b * w) + s
        region = np.where(place % (g * w) >= n, 2, place >= g * w).astype(np.int8) * np.int8(3**d)
        shape = [1] * (2 * k)
        shape[d], shape[k + d] = b - a, w
        total += region.reshape(shape)
    return total.reshape(prod(b - a for a, b in part), prod(window))


def relative_rows(window: Sequence[int], largest: Sequence[int]) -> np.ndarray:
    """Return for each pair (query, key) of tokens of a window the row of the table of relative positions, (T, T).

    Parameters
    ----------
    window : sequence of int
        Not larger than `largest` along any dim.
    largest : sequence of int
        The window whose table it is: along each dim distances from ``1 - w`` to ``w - 1``, row-major.
    """
    places = np.indices(window).reshape(len(window), prod(window))
    row = np.zeros((prod(window),) * 2, np.int64)
    for place, w in zip(places, largest, strict=True):
        row = row * (2 * w - 1) + place[:, None] - place[None, :] + w - 1
    return row


class WindowAttention(Op):
    """Scaled dot-product attention inside windows; operands (N, *grid, H, T, E), and a table (rows, H) of biases."""

    name = "window_attention"

    def rule(
        self, sigs: tuple[Signature, ...], size: Sizes, window: Sizes, shift: Sizes, largest: Sizes, compute_dtype: str
    ) -> Rule:
        q = sigs[0].resolved
        if q.dims[-1] or q.dims[-2]:
            raise LayoutError(
                f"window_attention of {sigs[0]!r}: tokens of a window and features may not be split; split samples, "
                f"windows and heads, or repartition to {Layout(*q.dims[:-2])!r} first"
            )
        moves = [q]
        for s in sigs[1:3]:
            needed = signature(q.mesh, s.shape, Layout(*q.dims))
            if s.split_axes and s.resolved is not needed:
                raise split_conflict(self.name, sigs[:3], f"repartition all to {q.layout!r} first")
            moves.append(needed)
        grads = list(moves)
        rows = None
        if len(sigs) > 3:
            table = sigs[3].with_layout(Layout(None, q.dims[-3]))
            moves.append(table)
            grads.append(table.with_partial(q.mesh.sort([a for stack in q.dims[:-3] for a in stack])))
            rows = relative_rows(window, largest)
        out = signature(q.mesh, (*q.shape[:-1], sigs[2].shape[-1]), Layout(*q.dims))
        return Rule(out, moves, grads, sigs, (window_regions(size, window, shift, q.box[1:-3]), rows, compute_dtype))

    def rounding(self, rule: Rule) -> float:
        return kernels.ROUNDINGS[rule.plan[2]]

    def flops(self, rule: Rule) -> int:
        *_, h, t, e = rule.grads[0].shape
        return 2 * prod(rule.out.shape[:-3]) * h * t * t * (e + rule.out.shape[-1])

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        query, key, value = (_windows(a) for a in arrays[:3])
        regions, rows, compute_dtype = rule.plan
        table = arrays[3] if rows is not None else None
        bias = _bias(table, rows)
        out, lse = kernels.window_attention_forward(query, key, value, extra, bias, regions, compute_dtype)
        return out.reshape(rule.out.local_shape), (*arrays[:3], table, out, lse, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        query, key, value, table, out, lse, scale = saved
        regions, rows, compute_dtype = rule.plan
        operands = [_windows(a) for a in (query, key, value)]
        *grads, dbias = kernels.window_attention_backward(
            _windows(g), *operands, out, lse, scale, _bias(table, rows), regions, compute_dtype
        )
        shaped = [d.reshape(a.shape) for d, a in zip(grads, (query, key, value), strict=True)]
        if table is None:
            return tuple(shaped)
        return (*shaped, kernels.add_rows(dbias.transpose(1, 2, 0), _like(rows, dbias), table.shape[0]))


def _bias(table: Any, rows: np.ndarray | None) -> Any:
    """The bias (H, T, T) of every window."""
    return None if table is None else kernels.take_rows(table, _like(rows, table)).transpose(2, 0, 1)


def _windows(a: Any) -> Any:
    """Local (N, *grid, H, T, E) as (N windows, H, T, E)."""
    return a.reshape(prod(a.shape[:-3]), *a.shape[-3:])


_window_attention = WindowAttention()


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None = None,
    *,
    size: Sequence[int],
    window_size: Lengths,
    shift_size: Lengths = 0,
    table_window: Lengths | None = None,
    scale: float | None = None,
    compute_dtype: str = "float32",
) -> Tensor:
    """Return attention inside the windows of `window_partition` (Liu et al. 2021, arXiv 2103.14030).

    It takes no mask and drops no weights: what a token sees follows from the sizes alone.

    Parameters
    ----------
    query, key, value : Tensor
        (N, *grid, H, T, E); samples, windows and heads may be split, by the same axes.
    table : Tensor, optional
        (rows, H): biases of relative positions, one row for each distance between two tokens (`relative_rows`), so
        ``prod(2 w - 1)`` of them. Added to the scores of every window.
    size, window_size, shift_size
        Of the grid of tokens, as given to `window_partition`. Tokens that the roll has brought together from both ends
        of a dim do not see each other, and what fills up windows at the end is not seen.
    table_window : int or tuple of int, optional
        The window w of the table, where it is larger than the windows: a grid may be smaller than what was trained on.
    scale : float, optional
        Of the scores; ``1 / sqrt(E)`` by default.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which the float32 operands of all products, forward and backward, are multiplied; see `functional.einsum`.

    Returns
    -------
    Tensor
        (N, *grid, H, T, V), split like the query. No message is sent but for a table that lies otherwise.

    Raises
    ------
    ValueError
        Shapes that do not fit, an unknown dtype.
    TypeError
        A scale that is no number.
    LayoutError
        Operands that lie differently, or a split of tokens or features.
    """
    dims = query.ndim - 4
    if dims < 1 or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            f"window_attention takes query, key and value (N, *grid, H, T, E), got {query.shape}, {key.shape} and "
            f"{value.shape}"
        )
    name = "window_attention"
    window = per_dim(name, "window_size", window_size, dims)
    shift = per_dim(name, "shift_size", shift_size, dims)
    size = tuple(int(n) for n in size)
    h, t = query.shape[-3:-1]
    if len(size) != dims or query.shape[1:-3] != window_grid(size, window) or t != prod(window):
        raise ValueError(f"{name}: {query.shape} are not windows of {window} of a grid of {size}")
    largest = window if table_window is None else per_dim(name, "table_window", table_window, dims)
    if table is not None and (
        table.shape != (prod(2 * w - 1 for w in largest), h) or any(w > m for w, m in zip(window, largest, strict=True))
    ):
        raise ValueError(f"{name}: a table of shape {table.shape} is not that of {h} heads and windows up to {largest}")
    check_compute_dtype(name, compute_dtype)
    scale = scale_of(name, query, scale)
    operands = (query, key, value) if table is None else (query, key, value, table)
    return _window_attention(operands, (size, window, shift, largest, compute_dtype), scale)
