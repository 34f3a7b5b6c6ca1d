"""Virtual meshes: every rank sees what it sees on a real mesh."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpar.grid import MeshError
from hpcpar.kernels import outline
from hpcpar.mesh import Mesh
from hpcpar.plan import VirtualMesh
from hpcpar.transport import counter

AXES = (("batch",), ("depth",), ("model",), ("batch", "model"), ("model", "depth"), ())


@pytest.mark.parametrize("first", ["batch", "depth", "model"])
def test_positions_and_communicators_are_those_of_a_real_mesh(first: str, comm) -> None:
    shape = {"batch": 1, "depth": 1, "model": 1, first: comm.size}
    if comm.size == 4:
        shape = {**shape, "depth": 2, first: 2} if first != "depth" else {"batch": 2, "depth": 1, "model": 2}
    real = Mesh(**shape)
    virtual = VirtualMesh(shape, comm.rank)
    assert virtual.coords == real.coords and virtual.size == real.size
    for axes in AXES:
        mine, theirs = virtual.comm(*axes), real.comm(*axes)
        assert (mine.rank, mine.size, mine.name) == (theirs.rank, theirs.size, theirs.name)
    part, whole = virtual.sub(model=0), real.sub(model=0)
    assert (part is None) == (whole is None)
    if part is not None:
        assert part.shape == whole.shape and part.coords == whole.coords and part.fixed == whole.fixed
    real.free()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8])
def test_collectives_are_counted_as_the_real_ones_are(comm, dtype) -> None:
    real, virtual = Mesh(ring=comm.size), VirtualMesh({"ring": comm.size}, comm.rank)
    n, sizes = comm.size, [3 + r for r in range(comm.size)]

    def talk(c, make) -> list[tuple[int, ...]]:
        peer = (c.rank + 1) % n
        sends = {peer: make(c.rank + 1)} if n > 1 else {}
        receives = {(c.rank - 1) % n: (((c.rank - 1) % n + 1,), dtype)} if n > 1 else {}
        answers = [
            c.all_reduce(make(7)),
            c.all_reduce(make(5), "max"),
            c.reduce_scatter([make(s) for s in sizes]),
            *c.all_gather(make(sizes[c.rank]), [(s,) for s in sizes]),
            *c.exchange(sends, receives).values(),
            c.broadcast(make(9)),
            c.shift(make(4), 1),
        ]
        return [a.shape for a in answers]

    with counter.counting() as sent:
        shapes = talk(real.world, lambda k: np.ones(k, dtype))
    with counter.counting() as counted:
        shown = talk(virtual.world, lambda k: outline.empty(k, dtype))
    assert sent == counted and shapes == shown
    assert bool(sent) == (n > 1)
    real.free()


@pytest.mark.serial
def test_nodes_are_as_large_as_asked_for() -> None:
    mesh = VirtualMesh({"batch": 5, "depth": 2}, 9, ranks_per_node=4)
    assert (mesh.node.rank, mesh.node.size, mesh.node.index, mesh.node.count) == (1, 2, 2, 3)
    assert "node virtual#2" in mesh.describe()
    assert repr(mesh) == "VirtualMesh(batch=5, depth=2)"


@pytest.mark.serial
def test_a_place_outside_the_mesh_is_an_error() -> None:
    with pytest.raises(MeshError, match="rank 8 of a virtual mesh of 8"):
        VirtualMesh({"depth": 8}, 8)
    with pytest.raises(MeshError, match="'depth'.*length 0"):
        VirtualMesh({"depth": 0})
