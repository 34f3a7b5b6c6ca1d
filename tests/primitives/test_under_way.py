"""Moves under way bring what moves bring, whatever the layouts, and are accounted for."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpar.layout.layout import Layout
from hpcpar.primitives import under_way
from hpcpar.primitives.repartition import move, plan
from hpcpar.signature import signature
from hpcpar.testing import collective_assert, draw_layout, draw_mesh, operand, run_cases, shared_mesh


def test_moves_under_way_equal_moves_between_any_layouts() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b", "c"))
        shape = [(5, 3), (1, 7), (0, 4), (2, 3, 4, 5)][int(rng.integers(4))]
        whole = rng.integers(-8, 9, shape).astype(float)  # exact, in whatever order it is summed
        tensors = [operand(whole, mesh, draw_layout(rng, shape, mesh, True), stream=i) for i in range(2)]
        targets = [signature(mesh, shape, draw_layout(rng, shape, mesh, True)) for _ in tensors]
        wanted = [move(t.shard, t.sig, target) for t, target in zip(tensors, targets, strict=True)]
        flights = [under_way.Move(t.shard, t.sig, target) for t, target in zip(tensors, targets, strict=True)]
        under_way.progress()
        got = [f.wait() for f in flights]
        same = all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
        collective_assert(mesh.world, same and not under_way.flying, f"{tensors} to {targets}")
        assert flights[0].wait() is got[0] and flights[0].test()

    assert run_cases(case, 60, seed=3).accepted == 60


@pytest.mark.ranks(min=2)
def test_what_was_given_up_is_not_read() -> None:
    mesh = shared_mesh(a=-1)
    source, target = (signature(mesh, (6, 4), layout) for layout in (Layout("a"), Layout()))
    assert plan(source, target).sends
    flights = [under_way.Move(np.ones(source.local_shape), source, target) for _ in range(2)]
    assert under_way.flying == flights
    under_way.abandon()
    assert not under_way.flying
    with pytest.raises(RuntimeError, match="given up after an error"):
        flights[1].wait()
    with under_way.overlap(False):
        landed = under_way.Move(np.ones(source.local_shape), source, target)
    assert not under_way.flying and np.array_equal(landed.result, np.ones((6, 4)))
    under_way.Move(np.ones(source.local_shape), source, target)
    under_way.finish()
    assert not under_way.flying
