"""Interior and rim: tiles are complete, and overlap moves the wait and nothing else."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.layout.maps import out_size, transposed_map, window_map
from hpcpar.ops.conv_arguments import Geometry
from hpcpar.ops.overlap import Schedule, Tiles, overlap, scatter_tiles, tiling, window_tiles
from hpcpar.ops.spatial import Halo
from hpcpar.testing import collective_assert, draw_layout, draw_mesh, run_cases, shared_mesh

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
GEOMETRIES = [
    {"stride": 1, "padding": 1},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1, 3), "padding": (2, 0, 1), "dilation": (1, 2, 1)},
    {"stride": 1, "padding": 1, "padding_mode": "circular"},
]


def layouts():
    if RANKS == 4:
        mesh = shared_mesh(a=2, b=2)
        dims = [("a", "b"), (None, "a", "b"), (("a", "b"),)]
        return [(mesh, L(None, None, *entries)) for entries in dims]
    mesh = shared_mesh(a=RANKS)
    return [(mesh, L(None, None, *[None] * d, "a")) for d in range(3)]


def run(function, arrays, mesh, layout, on):
    x = hp.tensor(arrays[0], mesh, layout, requires_grad=True)
    w, b = (hp.tensor(a, mesh, requires_grad=True) for a in arrays[1:])
    with tiling("split"), overlap(on):
        y = function(x, w, b)
        y.backward(hp.tensor(np.random.default_rng(3).standard_normal(y.shape).astype(y.dtype), mesh))
    return [y.shard, x.grad.shard, w.grad.shard, b.grad.shard]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_results_and_gradients_have_the_same_bits_with_overlap_and_without(geometry, dtype):
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s).astype(dtype) for s in ((2, 3, 13, 12, 11), (4, 3, 3, 3, 3), (4,))]
    for mesh, layout in layouts():
        for name in ("conv3d", "conv_transpose3d"):
            given = dict(geometry)
            if name == "conv_transpose3d":
                if given.pop("padding_mode", None):
                    continue
                arrays[1] = arrays[1].reshape(3, 4, 3, 3, 3)

            def function(x, w, b, name=name, given=given):
                return getattr(F, name)(x, w, b, **given)

            first, second = (run(function, arrays, mesh, layout, on) for on in (True, False))
            same = all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
            collective_assert(mesh.world, same, f"{name} under {layout} differs")
        arrays[1] = arrays[1].reshape(4, 3, 3, 3, 3)


def test_cut_convolutions_equal_whole_ones():
    def case(rng):
        ndim = int(rng.integers(1, 4))
        mesh = draw_mesh(rng, ("a", "b"))
        shape = (int(rng.integers(1, 3)), 2, *(int(n) for n in rng.integers(1, 14, ndim)))
        w = (3, 2, *(int(k) for k in rng.integers(1, 4, ndim)))
        arrays = [rng.standard_normal(s) for s in (shape, w, w[:1])]
        layout = draw_layout(rng, shape, mesh, forbid=(1,))
        s, p, d = int(rng.integers(1, 4)), int(rng.integers(2, 4)), int(rng.integers(1, 3))
        given = {"stride": s, "padding": p, "dilation": d}

        def function(x, w, b):
            return getattr(F, f"conv{ndim}d")(x, w, b, **given)

        cut = run(function, arrays, mesh, layout, True)
        with tiling("whole"):
            x = hp.tensor(arrays[0], mesh, layout, requires_grad=True)
            y = function(x, hp.tensor(arrays[1], mesh), hp.tensor(arrays[2], mesh))
            y.backward(hp.tensor(np.random.default_rng(3).standard_normal(y.shape), mesh))
        same = np.allclose(cut[0], y.shard, 1e-12, 1e-12) and np.allclose(cut[1], x.grad.shard, 1e-12, 1e-12)
        collective_assert(mesh.world, same, f"{shape} {w} {given} {layout}")

    assert run_cases(case, 40).accepted == 40


def test_pieces_and_rim_cover_the_block_once():
    tiles = Tiles((9, 7, 5), [(1, 9), (2, 6), (0, 5)], lambda d, a, b: ((a, b), (0, 0)))
    count = np.zeros((9, 7, 5), int)
    for tile in (*tiles.interior, *tiles.rim):
        count[tile.out] += 1
    assert (count == 1).all()
    assert len(tiles.interior) == 8 and tiles.part == 8 * 4 * 5 / (9 * 7 * 5)


@pytest.mark.ranks(min=2)
def test_the_interior_reads_nothing_that_is_borrowed():
    mesh = shared_mesh(a=RANKS)
    x = hp.tensor(np.zeros((1, 1, 8 * RANKS)), mesh, L(None, None, "a"))
    geometry = Geometry((2,), ((2, 2),), (1,), 1)
    out = (out_size("conv", 8 * RANKS, 5, 2, 1, 2, 2),)
    halo = Halo(x.sig, out, [window_map], [(*geometry.steps((5,))[0], "zeros")], "kernel")
    tiles = window_tiles(halo, (4,), geometry.steps((5,)))
    borrowed = [run for q, piece in halo.plans[0].recv.items() if q != mesh.rank for run in piece.runs]
    before = halo.padding[0][0]
    assert borrowed and tiles.interior and tiles.rim
    for tile in tiles.interior:
        a, b = tile.source[0].start + before, tile.source[0].stop + before
        assert all(r.dst + r.length <= a or r.dst >= b for r in borrowed)


@pytest.mark.ranks(min=2)
def test_the_interior_of_a_gradient_reads_nothing_that_is_borrowed():
    mesh = shared_mesh(a=RANKS)
    y = hp.tensor(np.zeros((1, 1, 8 * RANKS)), mesh, L(None, None, "a"))
    step = (5, 2, 1, 2)
    halo = Halo(y.sig, (16 * RANKS,), [transposed_map], [step])
    block = (16 * mesh.rank, 16 * mesh.rank + 16)
    tiles = scatter_tiles(halo, [block], [step])
    borrowed = [run for q, piece in halo.plans[0].recv.items() if q != mesh.rank for run in piece.runs]
    assert borrowed and len(tiles.interior) >= 8 and tiles.rim
    for tile in tiles.interior:
        assert all(r.dst + r.length <= tile.source[0].start or r.dst >= tile.source[0].stop for r in borrowed)


def test_on_one_node_blocks_are_not_cut_by_default():
    mesh = shared_mesh(a=RANKS)
    x = hp.tensor(np.zeros((1, 1, 64)), mesh, L(None, None, "a"))
    from hpcpar.ops.conv_plan import ConvPlan, channel_layouts

    w = hp.tensor(np.zeros((1, 1, 3)), mesh)
    geometry = Geometry((1,), ((1, 1),), (1,), 1)
    plan = ConvPlan(channel_layouts("conv", x.sig, w.sig, 1, None, False), x.sig, geometry)
    assert plan.ahead.schedule.chosen(8) is None
    if RANKS > 1:
        with tiling("split"):
            assert plan.ahead.schedule.chosen(8) is plan.ahead.schedule.tiles
    with pytest.raises(ValueError, match="tiling"), tiling("some"):
        pass


@pytest.mark.ranks(min=2)
def test_between_nodes_a_block_is_cut_where_the_exchange_is_dearer_than_the_rim():
    mesh = shared_mesh(a=RANKS)
    x = hp.tensor(np.zeros((1, 1, 64 * RANKS)), mesh, L(None, None, "a"))
    step = (3, 1, 1, 1)
    halo = Halo(x.sig, (64 * RANKS,), [window_map], [(*step, "zeros")])

    def schedule(flops, inner=62):
        made = Schedule(halo, lambda: Tiles((64,), [(1, 1 + inner)], lambda d, a, b: ((a, b), (0, 0))), flops, 8)
        made._far = True  # as on a mesh over several nodes
        return made

    cheap, dear = schedule(1.0), schedule(1e12)
    assert cheap.chosen(4) is cheap.tiles and dear.chosen(4) is None
    assert schedule(1.0, inner=31).chosen(4) is None  # less than half is interior
    with tiling("whole"):
        assert cheap.chosen(4) is None
