"""Who writes what: everything once, and about the same on every rank. Arithmetic alone, on meshes of any size."""

import numpy as np
import pytest

from hpcpar.checkpoint.pieces import overlap, plan_pieces, slices, volume
from hpcpar.grid import Grid
from hpcpar.layout.layout import Layout
from hpcpar.signature import Signature
from hpcpar.testing import draw_layout, run_cases
from hpcpar.testing.layouts import draw_mesh_shape

pytestmark = pytest.mark.serial


def signature(mesh, shape, layout):
    return Signature(mesh, shape, layout.on(shape, mesh.shape))


def test_random_arrays_are_written_once_by_ranks_that_hold_them():
    def case(rng):
        ranks = int(rng.choice([1, 2, 3, 4, 6, 12]))
        sizes = draw_mesh_shape(rng, ranks, ("a", "b", "c"))
        shape = tuple(int(n) for n in rng.integers(0, 7, rng.integers(0, 4)))
        layout = draw_layout(rng, shape, sizes)
        sig = signature(Grid(sizes, 0, {}), shape, layout)
        count = np.zeros(shape, int)
        for piece in plan_pieces({"x": (sig, 8)}, cut_bytes=int(rng.choice([8, 64, 1 << 20]))):
            count[slices(piece.box)] += 1
            held = signature(Grid(sizes, piece.writer, {}), shape, layout).box
            assert overlap(piece.box, held) == piece.box, f"rank {piece.writer} does not hold {piece.box}"
        assert (count == 1).all()

    assert run_cases(case, 300).accepted == 300


def test_replicas_share_the_writing():
    mesh = Grid({"batch": 4, "model": 2}, 0, {})
    arrays = {f"replicated{i}": (signature(mesh, (64, 3 + i, 3, 3), Layout()), 4) for i in range(30)}
    arrays |= {f"split{i}": (signature(mesh, (32, 40 + i), Layout(None, "model")), 8) for i in range(20)}
    arrays["large"] = (signature(mesh, (512, 8192), Layout()), 4)
    load = np.zeros(8)
    for piece in plan_pieces(arrays):
        load[piece.writer] += volume(piece.box) * arrays[piece.name][1]
    total = sum(sig.size * itemsize for sig, itemsize in arrays.values())
    assert load.sum() == total
    assert load.max() < 1.05 * total / 8


def test_a_partial_array_is_refused():
    mesh = Grid({"batch": 2}, 0, {})
    with pytest.raises(ValueError, match="g is partial over batch"):
        plan_pieces({"g": (signature(mesh, (4,), Layout(partial=("batch",))), 8)})


def test_0_dim_and_empty_arrays():
    mesh = Grid({"batch": 3}, 0, {})
    arrays = {"scalar": (signature(mesh, (), Layout()), 8), "empty": (signature(mesh, (0, 4), Layout("batch")), 8)}
    assert [(p.name, p.box) for p in plan_pieces(arrays)] == [("scalar", ())]
