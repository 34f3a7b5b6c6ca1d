"""Blocks visit everyone who needs them, and what is added to their gradients comes home, whoever needs what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcpar.layout.sequence import Routes, routes
from hpcpar.primitives.ring import DIRECTIONS, Homecoming, Ring, places
from hpcpar.testing import collective_assert, shared_mesh
from hpcpar.transport import counter


def travel(
    ring: Ring, sizes: list[int], needed: Any, weights: np.ndarray, overlap: bool
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """What this rank saw of each block it needs; of its own block j the sum of ``weights[i, j] * block`` of all i."""
    own = np.full(sizes[ring.part], ring.part + 1.0)
    seen: dict[int, np.ndarray] = {}
    coming = Homecoming(ring, sizes, np.zeros_like(own))
    for t, here, moving in ring.visits(own, sizes, overlap):
        sums: dict[int, np.ndarray] = {}
        for d, j, block in here:
            if needed[ring.part][j]:
                seen[j] = block.copy()
                sums[d] = weights[ring.part, j] * block
                if t == 0:
                    coming.total += sums[d]
        if moving is not None:
            moving.test()
        coming.hand_over(t, sums)
    return seen, coming.finish()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_needed_arrives_and_sums_come_home(seed: int, comm: Any) -> None:
    """Random needs, sizes (also 0), both directions; bytes are those of the routes."""
    rng = np.random.default_rng(seed)
    p, mesh = comm.size, shared_mesh(s=comm.size)
    needed = (rng.random((p, p)) < (0.3, 0.6, 1.0)[seed % 3]).tolist()
    sizes = rng.integers(0, 4, p).tolist()
    ways = routes(needed, sizes)
    if seed % 4 == 3:  # along the line also where the ring is shorter
        who = [[i for i in range(p) if needed[i][j]] for j in range(p)]
        up = tuple(max([i - j for i in w], default=0) if w and max(w) > j else 0 for j, w in enumerate(who))
        down = tuple(max([j - i for i in w], default=0) if w and min(w) < j else 0 for j, w in enumerate(who))
        ways = Routes(up, down)
    ring = Ring(mesh.world, places(mesh, ("s",)), mesh.rank, ways, needed)
    weights = rng.standard_normal((p, p))
    with counter.counting() as sent:
        seen, total = travel(ring, sizes, needed, weights, overlap=seed % 2 == 0)
    wanted = {j for j in range(p) if needed[mesh.rank][j]}
    right = set(seen) == wanted and all((a == j + 1).all() and a.size == sizes[j] for j, a in seen.items())
    collective_assert(mesh.world, right, f"saw {seen}, needs {wanted}")
    expected = sum(weights[i, mesh.rank] for i in range(p) if needed[i][mesh.rank]) * (mesh.rank + 1)
    collective_assert(mesh.world, np.allclose(total, expected, rtol=1e-13), f"{total}, not {expected}")
    blocks = sum((f + b) * size for f, b, size in zip(*ways, sizes, strict=True)) * 8
    first = sum(  # gradients start at the first rank that adds to them
        (hops[j] - next(t for t in range(1, hops[j] + 1) if needed[(j + d * t) % p][j]) + 1) * sizes[j] * 8
        for d, hops in zip(DIRECTIONS, ways, strict=True)
        for j in range(p)
        if hops[j]
    )
    counted = sum(mesh.world.gather_objects(sum(t.bytes for t in sent.values())))
    assert counted == blocks + first


@pytest.mark.ranks(exactly=4)
def test_blocks_of_a_stack_in_any_order_have_their_owners() -> None:
    mesh = shared_mesh(a=2, b=2)
    assert places(mesh, ("a", "b")) == [0, 1, 2, 3]
    assert places(mesh, ("b", "a")) == [0, 2, 1, 3]
    assert places(mesh, ("b",)) == [0, 1]
