"""Cutting a grid of tokens into windows, and putting windows together again: adjoints of each other.

Windows of w elements on a dim of length n are numbered, and split by the block rule like any dim: a rank gets whole
windows. Their borders need not be those of the blocks of elements, and with a shift they never are, so each dim has a
gather map from elements of windows to elements of the dim (`layout.index_maps.window_tokens_map`), and the halo
exchange of these maps brings what crosses and nothing else. Merging is its exact adjoint: every element lies in one
window, and what fills up the last ones is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from hpcpar.layout.index_maps import window_tokens_map
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.spatial import Halo, Lengths, per_dim
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor

Sizes = tuple[int, ...]


class Windows:
    """The windows of a grid of tokens (N, *size, C): the exchange, and the local order of elements.

    Parameters
    ----------
    tokens : Signature
        (N, *size, C), without partial axes.
    window, shift : tuple of int
        For each dim of the grid.
    """

    __slots__ = ("_lengths", "grid", "halo", "window")

    def __init__(self, tokens: Signature, window: Sizes, shift: Sizes) -> None:
        n, *size, c = tokens.shape
        stacks = tokens.dims
        volume = signature(tokens.mesh, (n, c, *size), Layout(stacks[0], stacks[-1], *stacks[1:-1]))
        self.window, self.grid = window, window_grid(size, window)
        arguments = list(zip(window, shift, strict=True))
        self.halo = Halo(volume, self.grid, [window_tokens_map] * len(size), arguments)
        self._lengths = [m for plan, w in zip(self.halo.plans, window, strict=True) for m in (plan.size // w, w)]

    def cut(self, x: Any) -> Any:
        """Return this rank's windows (N, *grid, T, C) of its tokens (N, *size, C)."""
        buffer = _first(self.halo(_second(x)))
        n, c, k = x.shape[0], x.shape[-1], len(self.window)
        apart = buffer.reshape(n, *self._lengths, c)
        order = (0, *range(1, 2 * k, 2), *range(2, 2 * k + 1, 2), 2 * k + 1)
        return apart.transpose(order).reshape(n, *self._lengths[::2], prod(self.window), c)

    def join(self, y: Any) -> Any:
        """Return this rank's tokens of its windows: the adjoint of `cut`."""
        n, c, k = y.shape[0], y.shape[-1], len(self.window)
        apart = y.reshape(n, *self._lengths[::2], *self.window, c)
        order = (0, *[d for i in range(1, k + 1) for d in (i, i + k)], 2 * k + 1)
        buffer = apart.transpose(order).reshape(n, *[plan.size for plan in self.halo.plans], c)
        return _first(self.halo.adjoint(_second(buffer)))


def _second(a: Any) -> Any:
    """View (N, *size, C) as (N, C, *size)."""
    return a.transpose(0, a.ndim - 1, *range(1, a.ndim - 1))


def _first(a: Any) -> Any:
    """View (N, C, *size) as (N, *size, C)."""
    return a.transpose(0, *range(2, a.ndim), 1)


def window_grid(size: Sequence[int], window: Sequence[int]) -> Sizes:
    """Return how many windows cover each dim; the last one may hang over the end."""
    return tuple(-(-n // w) for n, w in zip(size, window, strict=True))


class WindowPartition(Op):
    """(N, *size, C) to (N, *grid, T, C); a partial value stays partial."""

    name = "window_partition"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], window: Sizes, shift: Sizes) -> Rule:
        x = sigs[0]
        n, *size, c = x.shape
        shape = (n, *window_grid(size, window), prod(window), c)
        out = signature(x.mesh, shape, Layout(*x.dims[:-1], (), x.dims[-1], partial=x.partial))
        return Rule(out, [x], [x.resolved], sigs, Windows(x.resolved, window, shift))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return rule.plan.cut(arrays[0]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (rule.plan.join(g),)


class WindowMerge(Op):
    """(N, *grid, T, C) to (N, *size, C); a partial value stays partial."""

    name = "window_merge"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], window: Sizes, shift: Sizes, size: Sizes) -> Rule:
        y = sigs[0]
        if y.dims[-2]:
            raise LayoutError(
                f"window_merge of {y!r}: the tokens of a window are split; repartition to "
                f"{y.layout.replace(len(y.shape) - 2, None)!r} first"
            )
        shape = (y.shape[0], *size, y.shape[-1])
        out = signature(y.mesh, shape, Layout(*y.dims[:-2], y.dims[-1], partial=y.partial))
        return Rule(out, [y], [y.resolved], sigs, Windows(out.resolved, window, shift))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return rule.plan.join(arrays[0]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (rule.plan.cut(g),)


_partition, _merge = WindowPartition(), WindowMerge()


def window_partition(x: Tensor, window_size: Lengths, shift_size: Lengths = 0) -> Tensor:
    """Return the windows of a grid of tokens.

    Parameters
    ----------
    x : Tensor
        (N, *size, C) with 1 to 3 dims of tokens; any dims split, in uneven and empty blocks.
    window_size : int or tuple of int
        Elements of a window along each dim of tokens.
    shift_size : int or tuple of int
        The grid is rolled back by so many elements first, each smaller than the window, as every second block of a
        Swin transformer does (Liu et al. 2021, arXiv 2103.14030).

    Returns
    -------
    Tensor
        (N, *grid, T, C) with ``ceil(size / window)`` windows along each dim, split by the axes of that dim, and the T
        tokens of a window in row-major order. Where windows hang over the end of a dim, their rest is zero; the dim is
        filled up before it is rolled.

    Notes
    -----
    Only what crosses moves: nothing where blocks and windows have the same borders.
    """
    window, shift = _checked("window_partition", x.ndim - 2, window_size, shift_size)
    return _partition((x,), (window, shift))


def window_merge(windows: Tensor, window_size: Lengths, size: Sequence[int], shift_size: Lengths = 0) -> Tensor:
    """Return the grid of tokens (N, *size, C) that `window_partition` cut into `windows` (N, *grid, T, C).

    Parameters
    ----------
    windows : Tensor
        The dims of T may not be split; all others may.
    size : sequence of int
        Lengths of the dims of tokens.

    Raises
    ------
    ValueError
        Windows that do not cover `size`, or cover more.
    LayoutError
        The tokens of a window lie on several ranks.
    """
    window, shift = _checked("window_merge", windows.ndim - 3, window_size, shift_size)
    size = tuple(int(n) for n in size)
    if len(size) != len(window) or windows.shape[1:-1] != (*window_grid(size, window), prod(window)):
        raise ValueError(f"window_merge: {windows.shape} are not the windows of {window} of a grid of {size}")
    return _merge((windows,), (window, shift, size))


def _checked(name: str, dims: int, window_size: Lengths, shift_size: Lengths) -> tuple[Sizes, Sizes]:
    if not 1 <= dims <= 3:
        raise ValueError(f"{name} takes grids of 1 to 3 dims between samples and channels, got {dims}")
    window = per_dim(name, "window_size", window_size, dims)
    shift = per_dim(name, "shift_size", shift_size, dims)
    if any(w < 1 or not 0 <= s < w for w, s in zip(window, shift, strict=True)):
        raise ValueError(f"{name}: shifts are at least 0 and less than the window, got {shift} for {window}")
    return window, shift
