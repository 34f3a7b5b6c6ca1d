"""Flips and exchanges of dims as index arithmetic: which hyperslab to read, and how to turn what was read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Box", "Orientation"]

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Orientation:
    """A signed permutation of the spatial dims: element ``o`` of the turned volume is element ``s`` of the stored one,
    where ``s[dims[d]] = o[d]``, or ``n - 1 - o[d]`` where ``flips[d]``.

    A rank's block of the turned volume is then one hyperslab of the stored one, so turning moves no message. The
    spatial dims are the last ones of an array; leading dims (channels) stay.
    """

    dims: tuple[int, ...]
    flips: tuple[bool, ...]

    @classmethod
    def identity(cls, spatial: int) -> Orientation:
        """The orientation that changes nothing, for a number of spatial dims."""
        return cls(tuple(range(spatial)), (False,) * spatial)

    def then(self, other: Orientation) -> Orientation:
        """First this, then `other` on the result."""
        return Orientation(
            tuple(self.dims[d] for d in other.dims),
            tuple(self.flips[d] != flip for d, flip in zip(other.dims, other.flips, strict=True)),
        )

    def source_box(self, shape: tuple[int, ...], box: Box) -> Box:
        """Hyperslab of the stored sample that holds block `box` of the turned one.

        Parameters
        ----------
        shape : tuple of int
            Shape of the turned sample, leading dims included.
        box : tuple of (start, stop)
            Block of the turned sample.
        """
        lead = len(shape) - len(self.dims)
        source = list(box)
        for d, (dim, flip) in enumerate(zip(self.dims, self.flips, strict=True)):
            start, stop = box[lead + d]
            n = shape[lead + d]
            source[lead + dim] = (n - stop, n - start) if flip else (start, stop)
        return tuple(source)

    def apply(self, stored: np.ndarray) -> np.ndarray:
        """Turn a stored array, or the hyperslab of `source_box`: a view."""
        lead = stored.ndim - len(self.dims)
        order = (*range(lead), *(lead + dim for dim in self.dims))
        flip = tuple(slice(None, None, -1 if f else 1) for f in self.flips)
        return stored.transpose(order)[(..., *flip)]
