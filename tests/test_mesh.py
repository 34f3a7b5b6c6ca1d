"""Meshes: lengths, positions, communicators along axes and their unions, sub-meshes, and freeing."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.layout.layout import Layout
from hpcpar.mesh import current_mesh, live_communicators
from hpcpar.testing import collective_assert

RANKS = MPI.COMM_WORLD.Get_size()


def test_minus_one_takes_what_is_left_and_the_last_axis_varies_fastest() -> None:
    mesh = hp.Mesh(batch=1, depth=-1, model=1)
    assert mesh.shape == {"batch": 1, "depth": RANKS, "model": 1}
    assert mesh.axes == ("batch", "depth", "model") and mesh.size == RANKS
    assert mesh.index("depth") == mesh.rank == MPI.COMM_WORLD.Get_rank()
    assert mesh.length("batch", "depth") == RANKS and mesh.length() == 1
    mesh.free()


@pytest.mark.ranks(exactly=4)
def test_coordinates_are_row_major() -> None:
    mesh = hp.Mesh(a=2, b=2)
    places = mesh.world.gather_objects((mesh.index("a"), mesh.index("b")))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert mesh.coords == dict(zip("ab", places[mesh.rank], strict=True))
    assert mesh.sort({"b", "a"}) == ("a", "b")
    mesh.free()


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"a": RANKS + 1}, f"needs {RANKS + 1} ranks"),
        ({"a": -1, "b": -1}, "only one axis may be -1"),
        ({"a": 0}, "length 0"),
        ({"a": True}, "length True"),
        ({"a": 1.0}, "length 1.0"),
        ({"a": RANKS + 1, "b": -1}, "cannot be divided"),
    ],
)
def test_lengths_that_do_not_fit_are_an_error_on_all_ranks(axes: dict[str, int], text: str) -> None:
    before = live_communicators()
    with pytest.raises(hp.MeshError, match=text):
        hp.Mesh(**axes)
    assert live_communicators() == before, "nothing was made before the error"


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "other", [{"a": 1, "b": RANKS}, {"b": 1, "a": RANKS}, {"a": RANKS}, {"a": RANKS + 1, "b": 1}, {"c": RANKS, "b": 1}]
)
def test_ranks_that_ask_for_different_meshes_hear_so_on_all_ranks(other: dict[str, int]) -> None:
    before = live_communicators()
    last = MPI.COMM_WORLD.Get_rank() == RANKS - 1
    with pytest.raises(hp.MeshError, match=f"rank 0 for a={RANKS} x b=1, rank {RANKS - 1} for"):
        hp.Mesh(**(other if last else {"a": RANKS, "b": 1}))
    assert live_communicators() == before


def test_an_axis_that_a_mesh_does_not_have_is_named() -> None:
    mesh = hp.Mesh(batch=-1)
    for call in (lambda: mesh.index("depth"), lambda: mesh.comm("depth"), lambda: mesh.sub(depth=0)):
        with pytest.raises(hp.MeshError, match="no axis 'depth'; its axes are batch"):
            call()
    with pytest.raises(hp.MeshError, match="coordinate 99 is outside"):
        mesh.sub(batch=99)
    mesh.free()


@pytest.mark.ranks(exactly=4)
def test_communicators_run_along_axes_and_unions_in_mesh_order() -> None:
    mesh = hp.Mesh(a=2, b=2, c=1)
    me = (mesh.index("a"), mesh.index("b"))
    along_a, along_b, both = mesh.comm("a"), mesh.comm("b"), mesh.comm("b", "a")
    assert (along_a.size, along_a.rank, along_a.name) == (2, me[0], "a")
    assert (along_b.size, along_b.rank) == (2, me[1])
    assert (both.size, both.rank, both.name) == (4, mesh.rank, "a+b") and both is mesh.world is mesh.comm("a", "b", "c")
    assert along_a.gather_objects(me) == [(0, me[1]), (1, me[1])]
    assert along_b.gather_objects(me) == [(me[0], 0), (me[0], 1)]
    alone = mesh.comm("c")
    assert alone.size == 1 and alone is mesh.comm()
    assert mesh.comm("a") is along_a and mesh.comm("a", "c") is along_a
    mesh.free()


@pytest.mark.ranks(exactly=4)
def test_a_sub_mesh_has_its_own_communicator_and_lives_on_its_ranks_only() -> None:
    mesh = hp.Mesh(pipe=2, batch=2)
    stages = [mesh.sub(pipe=i) for i in range(2)]
    mine = mesh.index("pipe")
    assert stages[1 - mine] is None and mesh.sub(pipe=mine) is stages[mine]
    stage = stages[mine]
    assert stage.shape == {"batch": 2} and stage.fixed == {"pipe": mine}
    assert stage.rank == mesh.index("batch")
    x = hp.tensor(np.arange(4.0) + mine, stage, Layout("batch"))
    assert np.array_equal(x.numpy(), np.arange(4.0) + mine), "each stage computes on its own"
    point = mesh.sub(pipe=mine, batch=mesh.index("batch"))
    assert point.size == 1 and point.fixed == mesh.coords
    mesh.free()


@pytest.mark.ranks(min=2)
def test_a_stage_may_make_communicators_while_the_other_does_not() -> None:
    """Creation is collective over the members alone: a split of the whole mesh would wait for ever."""
    mesh = hp.Mesh(pipe=2, batch=-1) if RANKS % 2 == 0 else hp.Mesh(pipe=-1, batch=1)
    if mesh.index("pipe") == 0:
        stage = mesh.sub(pipe=0)
        assert stage.comm("batch").size == mesh.shape["batch"]
        assert mesh.comm("batch").size == mesh.shape["batch"]
    mesh.world.barrier()
    mesh.free()


def test_many_meshes_leave_nothing_behind() -> None:
    before = live_communicators()
    for _ in range(60):
        mesh = hp.Mesh(a=RANKS) if RANKS != 4 else hp.Mesh(a=2, b=2)
        x = hp.tensor(np.ones((4, 4)), mesh, Layout("a", mesh.axes[-1] if len(mesh.axes) > 1 else None))
        (x + x).numpy()
        mesh.sub(a=mesh.index("a"))
        assert live_communicators() > before
        mesh.free()
        assert live_communicators() == before
        mesh.free()  # harmless


def test_rules_and_plans_end_with_their_mesh() -> None:
    mesh = hp.Mesh(a=RANKS)
    x = hp.tensor(np.ones((4, 4)), mesh, Layout("a"))
    (x * 2 + x).numpy()
    seen = weakref.ref(mesh)
    mesh.free()
    del mesh, x
    gc.collect()
    assert seen() is None


def test_the_users_communicator_is_duplicated_not_shared() -> None:
    part = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.Get_rank())  # reversed order
    mesh = hp.Mesh(part, a=-1)
    assert mesh.rank == RANKS - 1 - MPI.COMM_WORLD.Get_rank()
    assert mesh.world.handle != part
    mesh.free()
    assert part.allreduce(1) == RANKS, "the user's communicator still works"
    part.Free()


def test_the_innermost_mesh_in_use_is_the_default() -> None:
    outer, inner = hp.Mesh(a=-1), hp.Mesh(b=-1)
    default = current_mesh()
    with outer:
        assert hp.tensor([1.0]).mesh is outer
        with inner, outer:
            assert current_mesh() is outer
        assert current_mesh() is outer
        with inner:
            with outer:
                pass
            assert current_mesh() is inner, "leaving an inner use does not end the outer one"
    assert current_mesh() is default
    outer.free()
    inner.free()


def test_node_information_and_printing() -> None:
    mesh = hp.Mesh(a=-1)
    text = mesh.describe()
    node = mesh.node
    sizes = mesh.world.gather_objects((node.index, node.rank, node.size))
    collective_assert(mesh.world, len(set(sizes)) == RANKS and node.count == len(set(node.hosts)), str(sizes))
    assert repr(mesh) == f"Mesh(a={RANKS})"
    assert f"rank {RANKS - 1}: a={RANKS - 1}" in text and f"node {node.hosts[0]}" in text
    mesh.free()


@pytest.mark.ranks(min=2)
def test_a_tensor_of_a_freed_mesh_says_so_on_all_ranks() -> None:
    mesh = hp.Mesh(a=-1)
    x = hp.tensor(np.arange(5.0), mesh, Layout("a"))
    mesh.free()
    with pytest.raises(hp.MeshError, match="was freed"):
        x.numpy()
