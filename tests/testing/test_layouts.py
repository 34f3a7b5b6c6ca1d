"""Random meshes, layouts and cases: equal on all ranks, every kind occurs, and a failure says how to run it alone."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.testing import draw_layout, draw_mesh, draw_mesh_shape, run_cases, shared_mesh


@pytest.mark.serial
def test_mesh_shapes_share_out_all_ranks_in_every_way() -> None:
    rng = np.random.default_rng(0)
    seen = {tuple(draw_mesh_shape(rng, 12, ("a", "b")).values()) for _ in range(200)}
    assert seen == {(1, 12), (12, 1), (2, 6), (6, 2), (3, 4), (4, 3)}
    assert draw_mesh_shape(rng, 1, ("a",)) == {"a": 1}
    assert all(prod(draw_mesh_shape(rng, n, ("a", "b", "c")).values()) == n for n in range(1, 30))


@pytest.mark.serial
def test_layouts_of_every_kind_are_drawn_and_forbidden_dims_are_not_split() -> None:
    rng, lengths = np.random.default_rng(0), {"a": 2, "b": 2}
    seen = {draw_layout(rng, (4, 5), lengths, partial=True) for _ in range(500)}
    assert {Layout(), Layout("a", "b"), Layout(("a", "b")), Layout(("b", "a")), Layout(partial=("a", "b"))} <= seen
    assert len(seen) == 18, "each axis on one of two dims, partial or left out, and both orders of a stack"
    for _ in range(100):
        layout = draw_layout(rng, (4, 5), lengths, forbid=[-1])
        assert not layout.entry(1) and not layout.partial
    assert draw_layout(rng, (), lengths) == Layout()


def test_draws_are_equal_on_all_ranks_and_meshes_are_shared() -> None:
    rng = np.random.default_rng(3)
    mesh = draw_mesh(rng, ("a", "b"))
    drawn = [draw_layout(rng, (4, 5), mesh, partial=True) for _ in range(20)]
    assert len(set(mesh.world.gather_objects(repr(drawn)))) == 1
    assert mesh is shared_mesh(**mesh.shape) and mesh.size == hp.current_mesh().size


@pytest.mark.serial
def test_cases_are_counted_and_a_failure_says_how_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCPAR_CASE", raising=False)
    drawn = []

    def case(rng: np.random.Generator) -> None:
        drawn.append(int(rng.integers(1000)))
        if len(drawn) % 3 == 0:
            raise LayoutError("refused")

    count = run_cases(case, 7, seed=1)
    assert (count.accepted, count.refused) == (5, 2) and len(set(drawn)) > 4

    def failing(rng: np.random.Generator) -> None:
        assert rng.integers(1000) != drawn[4], "this one"

    with pytest.raises(AssertionError, match=r"case 4 fails; alone: HPCPAR_CASE=4 python -m pytest .*test_cases") as e:
        run_cases(failing, 7, seed=1)
    assert "this one" in str(e.value)
    monkeypatch.setenv("HPCPAR_CASE", "4")
    alone: list[int] = []
    run_cases(lambda rng: alone.append(int(rng.integers(1000))), 7, seed=1)
    assert alone == [drawn[4]]
