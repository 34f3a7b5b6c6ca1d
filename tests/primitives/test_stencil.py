"""The public halo exchange on a mesh, as a stencil code uses it."""

import random
from functools import partial
from itertools import product
from math import prod

import numpy as np
import pytest

from hpcpar.creation import tensor
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.primitives.halo import clear_cache
from hpcpar.primitives.stencil import block_ranks, halo_exchange, halo_exchange_adjoint
from hpcpar.signature import signature
from hpcpar.testing import dot_test


def meshes(comm):
    """Every way to put the ranks on three axes; two of them are used out of mesh order."""
    size = comm.Get_size()
    for lengths in product(range(1, size + 1), repeat=3):
        if prod(lengths) == size:
            yield Mesh(comm=comm, **dict(zip(("a", "b", "c"), lengths, strict=True)))


LAYOUTS = [("a", "b", "c"), ("c", None, "a"), (("c", "a"), "b"), (None, ("b", "c", "a")), ("b",)]


def test_margins_equal_those_of_the_padded_global_array(comm):
    rng = random.Random(1)
    for mesh in meshes(comm):
        for layout in LAYOUTS:
            shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(len(layout), 4)))
            widths = [(rng.randint(0, 3), rng.randint(0, 3)) for _ in shape]
            wraps = [rng.random() < 0.5 for _ in shape]
            whole = np.random.default_rng(2).random(shape)
            lay = Layout(*layout)
            block = tuple(slice(lo, hi) for lo, hi in signature(mesh, shape, lay).box)
            got = halo_exchange(whole[block], widths, shape=shape, layout=lay, mesh=mesh, fill=9, periodic=wraps)
            wanted = whole
            for dim, (pair, wrap, s) in enumerate(zip(widths, wraps, block, strict=True)):
                along = [(0, 0)] * dim + [pair] + [(0, 0)] * (len(shape) - dim - 1)
                options = {"mode": "wrap"} if wrap else {"constant_values": 9}
                padded = np.pad(wanted, along, **options)
                stop = s.stop + sum(pair) if s.stop > s.start else s.start
                wanted = padded[(slice(None),) * dim + (slice(s.start, stop),)]
            np.testing.assert_array_equal(got, wanted)
            assert got.flags.c_contiguous
        clear_cache()
        mesh.free()


def test_adjoint_passes_the_dot_test(comm):
    for mesh in meshes(comm):
        split = {"shape": (7, 5, 3), "layout": ("a", ("c", "b")), "mesh": mesh, "periodic": (True, False, True)}
        widths = [(2, 1), 1, (0, 4)]
        rng = np.random.default_rng(mesh.rank)
        x = rng.standard_normal(signature(mesh, (7, 5, 3), Layout("a", ("c", "b"))).local_shape)
        y = rng.standard_normal(halo_exchange(x, widths, **split).shape)
        ahead = partial(halo_exchange, widths=widths, **split)
        back = partial(halo_exchange_adjoint, widths=widths, **split)
        assert dot_test(ahead, back, x, y, mesh.world) <= 1e-14
        clear_cache()
        mesh.free()


def test_heat_equation_on_blocks_equals_one_process(comm):
    mesh = Mesh(comm=comm, height=-1, width=2 if comm.Get_size() % 2 == 0 else 1)
    shape = (13, 11)
    whole = np.random.default_rng(3).random(shape)
    block = tuple(slice(lo, hi) for lo, hi in signature(mesh, shape, Layout("height", "width")).box)
    u = whole[block]
    for _ in range(20):
        v = halo_exchange(u, 1, shape=shape, layout=("height", "width"), mesh=mesh, periodic=True)
        u = u + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4 * u)
        around = sum(np.roll(whole, s, d) for s in (1, -1) for d in (0, 1))
        whole = whole + 0.1 * (around - 4 * whole)
    np.testing.assert_allclose(u, whole[block], rtol=1e-13)
    clear_cache()
    mesh.free()


def test_no_margin_returns_the_block_itself(comm):
    with Mesh(comm=comm, rows=-1) as mesh:
        x = np.ones((2, 3))
        y = halo_exchange(x, 0, shape=(2 * mesh.size, 3), layout=("rows",))
        assert np.shares_memory(x, y)
        clear_cache()
    mesh.free()


def test_arguments_that_do_not_fit_are_named(comm):
    mesh = Mesh(comm=comm, rows=-1)
    x = np.ones((2, 3))
    split = {"shape": (2 * mesh.size, 3), "layout": ("rows",), "mesh": mesh}
    with pytest.raises(ValueError, match=r"block has shape \(2, 3\).*\(3, 3\)"):
        halo_exchange(np.ones((3, 3)), 1, **split)
    with pytest.raises(ValueError, match="each of 2 dims"):
        halo_exchange(x, [1], **split)
    with pytest.raises(ValueError, match="-1"):
        halo_exchange(x, -1, **split)
    with pytest.raises(ValueError, match="3 entries for 2 dims"):
        halo_exchange(x, 1, **split, periodic=[True] * 3)
    if mesh.size > 1:  # an axis of one rank is never partial
        with pytest.raises(ValueError, match="complete values"):
            halo_exchange(x, 1, shape=(2, 3), mesh=mesh, layout=Layout(partial="rows"))
    clear_cache()
    mesh.free()


def test_block_ranks_follow_the_mesh_order(comm):
    for mesh in meshes(comm):
        for dims in [(("c",), ("a",)), (("b", "a"), (), ("c",))]:
            ranks = block_ranks(mesh, dims)
            coords = []
            for entry in dims:
                at = 0
                for axis in entry:
                    at = at * mesh.shape[axis] + mesh.index(axis)
                coords.append(at)
            assert ranks[tuple(coords)] == mesh.comm(*(a for entry in dims for a in entry)).rank
        mesh.free()


def _block(comm, dtype=float):
    mesh = Mesh(comm=comm, height=-1)
    (first, last), _ = signature(mesh, (5, 3), Layout("height")).box
    return np.ones((last - first, 3), dtype), {"shape": (5, 3), "layout": ("height",), "mesh": mesh}


@pytest.mark.parametrize("widths", [1.0, [(1.0, 0), 0], (1, 1, 1), -1, [1, (0, 1, 2)], "11", None])
def test_widths_that_are_no_whole_numbers_are_named(comm, widths):
    block, split = _block(comm)
    with pytest.raises(ValueError, match="widths are a whole number"):
        halo_exchange(block, widths, **split)
    split["mesh"].free()


@pytest.mark.parametrize("kind", ["list", "tensor", "objects"])
def test_what_is_no_array_of_numbers_is_named(comm, kind):
    block, split = _block(comm)
    whole = tensor(np.ones((5, 3)), mesh=split["mesh"], layout=Layout("height"))
    given = {"list": block.tolist(), "tensor": whole, "objects": block.astype(object)}[kind]
    for exchange in (halo_exchange, halo_exchange_adjoint):
        with pytest.raises(TypeError, match="x.shard" if kind == "tensor" else "an array of numbers"):
            exchange(given, 1, **split)
    split["mesh"].free()


@pytest.mark.parametrize(
    ("dtype", "fill", "held"),
    [("i4", float("nan"), False), ("i4", 0.5, False), ("u1", -1, False), ("u1", 300, False), ("i4", -3.0, True),
     ("f4", 0.1, True), ("f8", float("nan"), True), ("bool", 1, True), ("bool", 2, False), ("f8", "none", False)],
)  # fmt: skip
def test_a_fill_that_the_dtype_cannot_hold_is_refused_on_all_ranks(comm, dtype, fill, held):
    block, split = _block(comm, dtype)
    if held:
        margin = halo_exchange(block, (0, 1), fill=fill, **split)[:, 0]
        np.testing.assert_array_equal(margin, np.full(len(block), fill, dtype))
    else:  # also those in the middle, which have no margin to fill
        with pytest.raises(ValueError, match="cannot hold"):
            halo_exchange(block, 1, fill=fill, **split)
    clear_cache()
    split["mesh"].free()


def test_the_name_of_an_axis_is_no_layout_and_any_truth_value_says_whether_dims_wrap(comm):
    block, split = _block(comm)
    with pytest.raises(TypeError, match="an entry for each dim"):
        halo_exchange(block, 1, **{**split, "layout": "height"})
    for wrap in (1, np.True_, [np.True_, 1], np.array([True, True])):
        np.testing.assert_array_equal(halo_exchange(block, 1, **split, periodic=wrap), 1)
    clear_cache()
    split["mesh"].free()
