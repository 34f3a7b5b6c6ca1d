"""The public halo exchange, for stencil codes: the own block with some cells of the neighbours around it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.layout.maps import Map, window_map
from hpcpar.layout.plan import DimPlan, block_plan
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.primitives.halo import HaloExchange, cached_halo
from hpcpar.transport.device import is_device

Widths = int | Sequence[int | tuple[int, int]]


def halo_exchange(
    x: Any,
    widths: Widths,
    *,
    shape: Sequence[int],
    layout: Layout | Sequence[str | tuple[str, ...] | None],
    mesh: Mesh | None = None,
    fill: Any = 0,
    periodic: bool | Sequence[bool] = False,
) -> Any:
    """Return this rank's block of a split array with a margin of the elements around it. Collective.

    Parameters
    ----------
    x : array
        This rank's block, of any number of dims and any memory order.
    widths : int or sequence
        Width of the margin: one number for all dims, or for each dim a number or a pair (before, after). A margin may
        reach over several ranks.
    shape : sequence of int
        Shape of the whole array. Rank r of the p that split a dim of length n owns ``[r * n // p, (r + 1) * n // p)``.
    layout : Layout or sequence
        For each dim the axis or axes that split it, or None.
    mesh : Mesh, optional
        The current mesh by default.
    fill : scalar
        Value outside the array.
    periodic : bool or sequence of bool
        Whether (which of) the dims wrap around; there nothing is outside.

    Returns
    -------
    array
        C-contiguous, of shape ``x.shape`` plus the widths, corners included; of length 0 along a dim in which this
        rank's block is empty. `x` itself if all widths are 0.

    Raises
    ------
    ValueError
        When the shape of `x` is not that of this rank's block, widths and periodic do not fit the dims, or the dtype of
        `x` cannot hold `fill`.
    TypeError
        When `x` is no array of numbers, or a tensor (its block is ``x.shard``).
    LayoutError
        When the layout does not fit the shape or the mesh.

    Notes
    -----
    The adjoint is `halo_exchange_adjoint`. Messages and their buffers are made once for equal arguments and kept.

    Examples
    --------
    One step of the heat equation on a periodic plane of 512 x 512 cells, split into blocks:

    >>> mesh = hp.Mesh(height=2, width=2)
    >>> split = {"shape": (512, 512), "layout": ("height", "width"), "mesh": mesh}
    >>> u = np.random.default_rng(mesh.rank).random((256, 256))
    >>> v = hp.primitives.halo_exchange(u, 1, **split, periodic=True)
    >>> u = u + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4 * u)
    """
    halo = _stencil(x, widths, shape, layout, mesh, periodic)
    _check_shape(x, halo.block_shape[2:], "block")
    return halo(x[None, None], _held(fill, halo.dtype))[0, 0]


def halo_exchange_adjoint(
    g: Any,
    widths: Widths,
    *,
    shape: Sequence[int],
    layout: Layout | Sequence[str | tuple[str, ...] | None],
    mesh: Mesh | None = None,
    periodic: bool | Sequence[bool] = False,
) -> Any:
    """Return the adjoint of `halo_exchange` at `g`: margins are added where they came from. Collective.

    Parameters
    ----------
    g : array
        Of the shape that `halo_exchange` returns; the other arguments are those of the exchange.

    Returns
    -------
    array
        Of the shape of this rank's block.
    """
    halo = _stencil(g, widths, shape, layout, mesh, periodic)
    _check_shape(g, halo.shape[2:], "block with margins")
    return halo.adjoint(g[None, None])[0, 0]


def block_ranks(mesh: Mesh, dims: Sequence[tuple[str, ...]]) -> np.ndarray:
    """Return which rank of ``mesh.comm(*axes)`` holds the block at coordinates ``[c0, c1, ...]`` of split dims.

    Parameters
    ----------
    dims : sequence of tuple of str
        For each dim the axes that split it, row-major; axes that split nothing here do not count.

    Notes
    -----
    The communicator of a union of axes is row-major in mesh order, which need not be the order of the dims.
    """
    axes = tuple(axis for entry in dims for axis in entry)
    order = mesh.sort(axes)
    ranks = np.arange(mesh.length(*order)).reshape([mesh.shape[axis] for axis in order])
    parts = [prod(mesh.shape[axis] for axis in entry) for entry in dims]
    return ranks.transpose([order.index(axis) for axis in axes]).reshape(parts)


def split_halo(
    mesh: Mesh,
    dims: Sequence[tuple[str, ...]],
    dim_plans: Sequence[DimPlan],
    lead: tuple[int, int],
    dtype: Any,
    **options: Any,
) -> HaloExchange:
    """Return the cached `HaloExchange` of dims that are split by axes of `mesh`; `options` as in `cached_halo`."""
    comm = mesh.comm(*(axis for entry in dims for axis in entry))
    return cached_halo(comm, dim_plans, lead, dtype, ranks=block_ranks(mesh, dims), **options)


def _stencil(x: Any, widths: Widths, shape: Any, layout: Any, mesh: Mesh | None, periodic: Any) -> HaloExchange:
    _check_array(x)
    mesh = current_mesh() if mesh is None else mesh
    shape = tuple(int(n) for n in shape)
    if isinstance(layout, str):  # else its letters would be axes
        raise TypeError(f"layout has an entry for each dim, like Layout({layout!r}) or ({layout!r},), got {layout!r}")
    layout = layout if isinstance(layout, Layout) else Layout(*layout)
    layout = layout.on(shape, mesh.shape)
    if layout.partial:
        raise ValueError(f"a halo exchange takes complete values, {layout} is partial")
    pairs = _pairs(widths, len(shape))
    wraps = list(periodic) if isinstance(periodic, Sequence | np.ndarray) else [periodic] * len(shape)
    if len(wraps) != len(shape):
        raise ValueError(f"periodic has {len(wraps)} entries for {len(shape)} dims")
    dims = [layout.entry(dim) for dim in range(len(shape))]
    plans = []
    for n, entry, (before, after), wrap in zip(shape, dims, pairs, wraps, strict=True):
        parts, coord = mesh.length(*entry), 0
        for axis in entry:
            coord = coord * mesh.shape[axis] + mesh.index(axis)
        plans.append(block_plan(_margin_map, n, parts, coord, n, before, after, bool(wrap)))
    return split_halo(mesh, dims, plans, (1, 1), x.dtype, device=is_device(x))


def _margin_map(n: int, o0: int, o1: int, before: int, after: int, wrap: bool) -> Map:
    return window_map(n, o0, o1, before + after + 1, 1, 1, before, "circular" if wrap else "zeros")


def _pairs(widths: Widths, count: int) -> list[tuple[int, int]]:
    given = widths if isinstance(widths, Sequence | np.ndarray) else [widths] * count
    pairs = [tuple(w) if isinstance(w, Sequence | np.ndarray) else (w, w) for w in given]
    whole = all(isinstance(w, int | np.integer) and w >= 0 for pair in pairs for w in pair)
    if len(pairs) != count or not whole or any(len(pair) != 2 for pair in pairs):
        wanted = f"a whole number >= 0 or, for each of {count} dims, a number or a pair of these"
        raise ValueError(f"widths are {wanted}; got {widths!r}")
    return [(int(before), int(after)) for before, after in pairs]


def _check_array(x: Any) -> None:
    if hasattr(x, "shard"):
        raise TypeError("a halo exchange takes this rank's block as an array, got a tensor: give it x.shard")
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype.hasobject:
        raise TypeError(f"a halo exchange takes an array of numbers, got {type(x).__name__} of {dtype or 'no dtype'}")


def _held(fill: Any, dtype: np.dtype) -> Any:
    """Return `fill` as a number of `dtype`; checked on all ranks, as only those at the ends of a dim write it."""
    with np.errstate(all="ignore"):
        try:
            held = np.asarray(fill).astype(dtype)[()]
        except (TypeError, ValueError, OverflowError):
            held = None
    exact = held is not None and (dtype.kind not in "iub" or bool(held == fill))
    if not exact:
        raise ValueError(f"fill is {fill!r}, which {dtype} cannot hold")
    return held


def _check_shape(array: Any, wanted: tuple[int, ...], what: str) -> None:
    if tuple(array.shape) != tuple(wanted):
        raise ValueError(f"this rank's {what} has shape {tuple(wanted)}, got an array of shape {tuple(array.shape)}")
