"""Blocks with room around them: whose halo is in place, who gets a copy, and that nothing else can be told apart."""

import gc

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import functional as F
from hpcpar.kernels import empty_channels_last, outline
from hpcpar.layout.maps import window_map
from hpcpar.layout.plan import block_plan
from hpcpar.primitives import room
from hpcpar.primitives.halo import HaloExchange
from hpcpar.primitives.room import Room
from hpcpar.testing import shared_mesh
from hpcpar.transport import Comm

LENGTH = 13


def exchange(comm, kernel):
    """The halo of windows with stride 1 over the first of two dims."""
    split = block_plan(window_map, LENGTH, comm.size, comm.rank, LENGTH, kernel, 1, 1, kernel // 2, "zeros")
    whole = block_plan(window_map, 3, 1, 0, 3, 1, 1, 1, 0, "zeros")
    return HaloExchange(comm, [split, whole], (1, 4), np.float64)


def filled(halo, like=None):
    """A block of the numbers that it would have in a whole array, and that array."""
    whole = np.arange(4.0 * LENGTH * 3).reshape(1, 4, LENGTH, 3)
    plan = halo.plans[0]
    begin = plan.coord * LENGTH // plan.parts
    part = whole[:, :, begin : begin + plan.length]
    block = empty_channels_last(part.shape, np.float64) if like is None else like
    block[...] = part
    return block


def make(maker, halo):
    """A block as an operation makes it."""
    block = maker.empty(halo.block_shape, np.float64, None)
    return maker.made(filled(halo, block))


def test_the_first_halo_is_copied_and_the_next_ones_lie_in_place(comm):
    halo, maker = exchange(Comm(comm, "ranks"), 5), Room()
    first = make(maker, halo)
    expected = halo(first, fill=-1.0)
    assert not np.shares_memory(expected, first)
    for _ in range(3):
        block = make(maker, halo)
        got = halo(block, fill=-1.0)
        assert np.shares_memory(got, block), "the room that was wanted is there"
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(block, first)
    halo.free()


def test_a_second_halo_of_a_block_never_touches_the_first(comm):
    comm = Comm(comm, "ranks")
    halo, maker = exchange(comm, 5), Room()
    halo(make(maker, halo))
    block = make(maker, halo)
    zeros = halo(block, fill=0.0)
    kept = zeros.copy()
    ones = halo(block, fill=1.0)
    np.testing.assert_array_equal(zeros, kept)
    assert not np.shares_memory(ones, zeros)
    halo.free()


def test_a_smaller_halo_takes_a_part_of_the_room_and_a_larger_one_is_heard(comm):
    comm = Comm(comm, "ranks")
    small, large, maker = exchange(comm, 3), exchange(comm, 7), Room()
    wanted = large(make(maker, large))
    np.testing.assert_array_equal(small(make(maker, small)), small(filled(small)))
    block = make(maker, large)
    got = large(block)
    assert np.shares_memory(got, block), "a smaller wish does not take room away"
    np.testing.assert_array_equal(got, wanted)
    small.free()
    large.free()


def test_only_the_block_itself_has_room_and_its_memory_is_forgotten_with_it():
    maker = Room()
    maker.widths = ((2, 1), (0, 0))
    block = maker.made(maker.empty((1, 4, 6, 5), np.float32, None))
    assert room.take(block[:, :, 1:], ((1, 1), (0, 0))) is None
    assert room.take(block[:, :, :5], ((1, 1), (0, 0))) is None
    assert room.take(block, None) is None, "a halo that does not show the block whole"
    key = room.address(block)
    assert key in room._entries
    buffer = room.take(block, ((1, 1), (0, 0)))
    assert buffer.shape == (1, 4, 8, 5) and np.shares_memory(buffer[:, :, 1:7], block)
    assert room.take(block, ((1, 1), (0, 0))) is None, "taken"
    other = maker.empty((1, 4, 6, 5), np.float32, None)
    key = room.address(other)
    assert key in room._entries
    del other
    gc.collect()
    assert key not in room._entries


@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (1, 4, 0, 5), (0, 4, 6, 5)])
def test_blocks_that_would_not_be_one_run_of_memory_get_no_room(shape):
    maker = Room()
    maker.widths = ((2, 1), (0, 0))
    assert maker.empty(shape, np.float32, None) is None
    maker.widths = ((0, 0), (1, 1))
    assert maker.empty((1, 4, 6, 5), np.float32, None) is None


def test_norms_leave_room_for_the_halo_behind_them(comm, monkeypatch):
    mesh = shared_mesh(depth=comm.size)
    taken = []
    monkeypatch.setattr(room, "take", lambda *args, take=room.take: taken.append(take(*args)) or taken[-1])
    with mesh:
        x = hp.rand(1, 4, 9, 6, 5, layout=hp.Layout(None, None, "depth"))
        w = hp.rand(4, 4, 3, 3, 3)
        for norm in (lambda: F.batch_norm(x, training=True), lambda: F.group_norm(x, 2), lambda: F.instance_norm(x)):
            for _ in range(2):
                F.conv3d(norm(), w, padding=1)
    got = [buffer is not None for buffer in taken]
    assert got == ([] if comm.size == 1 else [False, True, False, True, False, True])


def test_outlines_take_room_as_arrays_do():
    maker = Room()
    maker.widths = ((1, 2), (0, 0))
    with outline.keeping() as ledger:
        block = maker.empty((1, 4, 6, 5), np.float32, outline.empty(0))
        assert ledger.live == 4 * 9 * 5 * 4
        buffer = room.take(block, ((1, 1), (0, 0)))
        assert buffer.shape == (1, 4, 8, 5) and buffer.shares(block)
        del block
        assert ledger.live == 4 * 9 * 5 * 4
        del buffer
        assert ledger.live == 0


@pytest.mark.parametrize("sizes", [(9, 6, 5), (2, 6, 5), (16, 4, 4)], ids=str)
def test_a_network_computes_the_same_in_every_step(comm, sizes):
    """The first step copies, later ones do not; results that two layers use, and what backward keeps, stay whole."""
    mesh = shared_mesh(depth=comm.size)
    rng = np.random.default_rng(5)
    values = rng.standard_normal((1, 3, *sizes))
    weights = [rng.standard_normal(shape) for shape in ((4, 3, 3, 3, 3), (4, 4, 3, 3, 3), (2, 4, 5, 5, 5))]

    def step(layout):
        x = hp.tensor(values, layout=layout, requires_grad=True)
        w1, w2, w3 = (hp.tensor(w, layout=hp.Layout(), requires_grad=True) for w in weights)
        y = F.conv3d(x, w1, padding=1)
        both = F.conv3d(y, w2, padding=1) + F.max_pool3d(y, 3, 1, 1)
        pooled = F.avg_pool3d(both, 3, 2, 1, negative_slope=0.1) + F.avg_pool3d(F.conv3d(y, w2, padding=1), 3, 2, 1)
        normal = F.group_norm(F.batch_norm(pooled, training=True, negative_slope=0.0), 2)
        z = F.conv3d(F.avg_pool3d(pooled, 3, 1, 1) + F.avg_pool3d(normal, 3, 1, 1), w3, padding=2)
        (z * z).sum().backward()
        return [t.numpy() for t in (z, x.grad, w1.grad, w2.grad, w3.grad)]

    with mesh:
        wanted = step(hp.Layout())
        for _ in range(4):
            for got, want in zip(step(hp.Layout(None, None, "depth")), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)
