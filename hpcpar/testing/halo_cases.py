"""Drawn halo exchanges beside their definition by index arrays: the oracle for forward, adjoint and bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from hpcpar.layout.blocks import owned
from hpcpar.layout.index_maps import pad_map, roll_map
from hpcpar.layout.maps import FILL, Map, map_of_indices, out_size, transposed_map, window_map
from hpcpar.layout.plan import dim_plan
from hpcpar.primitives.halo import HaloExchange


@dataclass
class Case:
    """An exchange on `size` ranks: `maps[d][c]` is the map of coordinate c of dim d."""

    lengths: tuple[int, ...]
    parts: tuple[int, ...]
    maps: list[list[Map]]
    lead: tuple[int, int]

    def coords(self, rank):
        return tuple(int(c) for c in np.unravel_index(rank, self.parts))

    def halo(self, comm, dtype="float64", **options):
        plans = [
            dim_plan(n, p, c, maps.__getitem__)
            for n, p, c, maps in zip(self.lengths, self.parts, self.coords(comm.rank), self.maps, strict=True)
        ]
        return HaloExchange(comm, plans, self.lead, dtype, **options)

    def block(self, rank):
        """Index of a rank's block in the whole array (N, C, *lengths)."""
        bounds = [owned(n, p, c) for n, p, c in zip(self.lengths, self.parts, self.coords(rank), strict=True)]
        return (slice(None), slice(None), *(slice(a, b) for a, b in bounds))

    def index(self, rank):
        """Per dim the global indices that a rank's buffer shows."""
        return [maps[c].indices() for maps, c in zip(self.maps, self.coords(rank), strict=True)]

    @property
    def shows_something(self):
        """Whether any rank's buffer shows any element: else the exchange is the zero operator."""
        return any(all((i != FILL).any() for i in self.index(rank)) for rank in range(prod(self.parts)))

    def buffer(self, rank, whole, fill):
        """What a rank's buffer has to be."""
        result = whole
        for dim, index in enumerate(self.index(rank)):
            if whole.shape[dim + 2] == 0:
                result = np.full((*result.shape[: dim + 2], len(index), *result.shape[dim + 3 :]), fill)
                continue
            result = np.take(result, np.maximum(index, 0), dim + 2)
            result[(slice(None),) * (dim + 2) + (index == FILL,)] = fill
        return result

    def adjoint(self, gradients):
        """The whole dx from the gradients of all ranks' buffers."""
        dx = np.zeros((*self.lead, *self.lengths))
        for rank, g in enumerate(gradients):
            for dim, index in enumerate(self.index(rank)):
                matrix = np.zeros((self.lengths[dim], len(index)))
                matrix[index[index != FILL], np.flatnonzero(index != FILL)] = 1
                g = np.moveaxis(np.tensordot(matrix, g, (1, dim + 2)), 0, dim + 2)
            dx += g
        return dx

    def bytes_sent(self, rank, itemsize):
        """Closed form: each other rank gets each distinct element it needs of this block, once."""
        total = 0
        mine = self.coords(rank)
        for other in range(prod(self.parts)):
            if other != rank:
                needed = prod(
                    len({i for i in maps[c].indices().tolist() if a <= i < b})
                    for maps, c, (a, b) in zip(
                        self.maps,
                        self.coords(other),
                        (owned(n, p, q) for n, p, q in zip(self.lengths, self.parts, mine, strict=True)),
                        strict=True,
                    )
                )
                total += needed * prod(self.lead) * itemsize
        return total

    def gradient(self, rank, seed):
        """A rank's drawn gradient of its buffer."""
        shape = (*self.lead, *(len(index) for index in self.index(rank)))
        return np.random.default_rng([seed, rank]).integers(-4, 5, shape).astype(float)


def drawn_cases(size, seed, count):
    """Draw cases on `size` ranks, the same on all of them: 1 to 3 dims, arbitrary maps and those of operations."""
    rng = random.Random(seed)
    splits = [p for d in (1, 2, 3) for p in product(range(1, size + 1), repeat=d) if prod(p) == size]
    for _ in range(count):
        parts = rng.choice(splits)
        lengths = tuple(rng.randint(1, 9) for _ in parts)
        maps = [drawn_maps(rng, n, p) for n, p in zip(lengths, parts, strict=True)]
        yield Case(lengths, parts, maps, (rng.randint(1, 3), rng.randint(1, 3)))


def drawn_maps(rng, n, p):
    """Draw the maps of all coordinates of one dim."""
    kind = rng.randrange(7)
    k, s, d = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 2)
    lo, hi = rng.randint(0, 3), rng.randint(0, 3)
    if kind == 0:
        return [map_of_indices([rng.randint(-1, n - 1) for _ in range(rng.randint(0, 7))]) for _ in range(p)]
    if kind == 1:
        return [Map(n and b - a, window_map(n, a, b, 1, 1, 1, 0).runs) for a, b in (owned(n, p, r) for r in range(p))]
    if kind in (2, 3):
        mode = "zeros" if kind == 2 else rng.choice(["reflect", "replicate", "circular"])
        out = max(out_size("conv", n, k, s, d, lo, hi), 0)
        return [window_map(n, *owned(out, p, r), k, s, d, lo, mode) for r in range(p)]
    if kind == 4:
        out = max(out_size("transposed", n, k, s, d, lo, hi), 0)
        return [transposed_map(n, *owned(out, p, r), k, s, d, lo) for r in range(p)]
    if kind == 5:
        out = max(n + lo - hi, 0)
        return [pad_map(n, *owned(out, p, r), lo, -hi) for r in range(p)]
    return [roll_map(n, *owned(n, p, r), lo) for r in range(p)]
