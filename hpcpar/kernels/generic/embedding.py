"""Rows of a table: looked up by index, and the gradient, which adds rows at their indices in a fixed order."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, array_module


def take_rows(table: Array, index: Array) -> Array:
    """Rows of `table` at `index`; zeros where an index is outside, as the rest of a split table is.

    Parameters
    ----------
    table : array (rows, width)
    index : integer array, any shape

    Returns
    -------
    array (*index.shape, width), C order.
    """
    rows, width = table.shape
    xp = array_module(table)
    if rows == 0 or index.size == 0:
        return xp.zeros((*index.shape, width), table.dtype)
    inside = (index >= 0) & (index < rows)
    if bool(inside.all()):
        return np.take(table, index, axis=0)
    taken = np.take(table, xp.where(inside, index, 0), axis=0)
    taken[~inside] = 0
    return taken


def add_rows(g: Array, index: Array, rows: int) -> Array:
    """Sums of the rows of `g` that have the same index: the gradient of `take_rows` in its table.

    The order of the terms depends on the indices alone, so that the bits are the same each time (where kernels are
    compiled it is that of positions). Half precision is added in float32.

    Parameters
    ----------
    g : array (*index.shape, width)
    index : integer array
        Those outside [0, rows) are passed over.

    Returns
    -------
    array (rows, width) in the dtype of g.
    """
    xp, width = array_module(g), g.shape[index.ndim]
    total = xp.zeros((rows, width), g.dtype)
    flat = index.reshape(index.size)
    places = np.flatnonzero((flat >= 0) & (flat < rows))
    if places.size == 0 or width == 0:
        return total
    places = places[np.argsort(flat[places], kind="stable")]
    found = flat[places]
    starts = np.flatnonzero(np.concatenate([xp.ones(1, bool), found[1:] != found[:-1]]))
    terms = g.reshape(index.size, width)[places]
    if g.dtype == np.float16:
        terms = terms.astype(np.float32)
    total[found[starts]] = np.add.reduceat(terms, starts, axis=0)
    return total
