"""Collectives along mesh axes on local arrays, each with its adjoint.

A primitive is a linear operator ``A`` between what the ranks of a communicator hold; ``f.adjoint`` is ``A*`` with
``<A x, y> = <x, A* y>``, where both inner products are summed over the ranks.

=================  ==========================================  =================
primitive          what it does                                adjoint
=================  ==========================================  =================
`all_reduce`       every rank gets the sum                     itself
`all_gather`       every rank gets all blocks of a dim         `reduce_scatter`
`reduce_scatter`   rank r gets block r of the sum              `all_gather`
`all_to_all`       block r of a dim goes to rank r,            itself, with the
                   the pieces are joined along another dim     dims exchanged
`broadcast`        every rank gets the root's array            `reduce`
`reduce`           the root gets the sum, others zeros         `broadcast`
`shift`            rank + offset gets this rank's array        itself, -offset
=================  ==========================================  =================

`hpcpar.primitives.halo_exchange` has its adjoint in the engine that serves it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from hpcpar.layout.blocks import owned
from hpcpar.transport import Comm


def all_reduce(comm: Comm, array: Any) -> Any:
    """Sum equal-shaped arrays over the ranks; everyone gets the sum. Adjoint: itself."""
    return comm.all_reduce(array)


def all_gather(comm: Comm, array: Any, dim: int, n: int) -> Any:
    """Join the blocks of a dim of global length `n`; every rank gets the whole. Adjoint: `reduce_scatter`.

    Parameters
    ----------
    array : array
        This rank's block: ``owned(n, comm.size, comm.rank)`` along `dim`, the same other dims on every rank.
    """
    if comm.size == 1:
        return array
    blocks = [owned(n, comm.size, r) for r in range(comm.size)]
    shapes = [(*array.shape[:dim], b - a, *array.shape[dim + 1 :]) for a, b in blocks]
    return np.concatenate(comm.all_gather(array, shapes), axis=dim)


def reduce_scatter(comm: Comm, array: Any, dim: int, n: int) -> Any:
    """Sum arrays over the ranks and leave rank r with its block of a dim. Adjoint: `all_gather`.

    Parameters
    ----------
    array : array
        A share of the whole sum, of the same shape on every rank.
    dim, n : int
        The dim, and its length.
    """
    if comm.size == 1:
        return array
    assert array.shape[dim] == n, f"dim {dim} of an array of shape {array.shape} is not {n} long"
    index: list[Any] = [slice(None)] * array.ndim
    pieces = []
    for r in range(comm.size):
        index[dim] = slice(*owned(n, comm.size, r))
        pieces.append(array[tuple(index)])
    return comm.reduce_scatter(pieces)


def all_to_all(comm: Comm, array: Any, split_dim: int, join_dim: int, n: int) -> Any:
    """Turn a split of one dim into a split of another.

    Adjoint: itself with the two dims exchanged and `n` the length of `split_dim`.

    Parameters
    ----------
    array : array
        This rank's block: ``owned(n, comm.size, comm.rank)`` along `join_dim`, the same other dims on every rank.
    split_dim, join_dim : int
        The dim that is split afterwards, and the one that is whole then.
    n : int
        Global length of `join_dim`.
    """
    if comm.size == 1:
        return array
    m = array.shape[split_dim]
    lo, hi = owned(m, comm.size, comm.rank)
    index: list[Any] = [slice(None)] * array.ndim
    sends, receives, parts = {}, {}, []
    for r in range(comm.size):
        index[split_dim] = slice(*owned(m, comm.size, r))
        sends[r] = array[tuple(index)]
        shape = list(array.shape)
        a, b = owned(n, comm.size, r)
        shape[split_dim], shape[join_dim] = hi - lo, b - a
        receives[r] = (tuple(shape), array.dtype)
    own = sends.pop(comm.rank)
    del receives[comm.rank]
    received = comm.exchange(
        {r: piece for r, piece in sends.items() if piece.size},
        {r: (shape, dtype) for r, (shape, dtype) in receives.items() if prod(shape)},
        like_array=array,
    )
    for r in range(comm.size):
        if r == comm.rank:
            parts.append(own)
        else:
            parts.append(received[r] if r in received else array[:0].reshape(receives[r][0]))
    return np.concatenate(parts, axis=join_dim)


def broadcast(comm: Comm, array: Any, root: int = 0) -> Any:
    """Give every rank the root's array; all pass an array of its shape and dtype. Adjoint: `reduce`."""
    return comm.broadcast(array, root)


def reduce(comm: Comm, array: Any, root: int = 0) -> Any:
    """Give the root the sum and the others zeros. Adjoint: `broadcast`."""
    total = comm.all_reduce(array)
    return total if comm.rank == root else np.zeros_like(total)


def shift(comm: Comm, array: Any, offset: int = 1, shape: tuple[int, ...] | None = None) -> Any:
    """Pass the arrays round a ring by `offset` ranks. Adjoint: itself with ``-offset``.

    Parameters
    ----------
    array : array
        In the dtype of every rank's.
    offset : int
        Rank r's array arrives at ``(r + offset) % comm.size``.
    shape : tuple of int, optional
        Of what arrives here; that of `array` by default.
    """
    return comm.shift(array, offset, shape)


all_reduce.adjoint = all_reduce
all_gather.adjoint = reduce_scatter
reduce_scatter.adjoint = all_gather
all_to_all.adjoint = all_to_all
broadcast.adjoint = reduce
reduce.adjoint = broadcast
shift.adjoint = shift
