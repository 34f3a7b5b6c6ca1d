"""Moving elements along split dims: pad, crop, slices, flip, roll."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import shared_mesh
from hpcpar.testing.cases import Array, Case
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
MESH = {"width": RANKS}


def line(n=10, dtype=float):
    return hp.tensor(np.arange(n, dtype=dtype), shared_mesh(**MESH), L("width"))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("widths", [(3, 2), (0, 4), (-2, 4), (4, -3), (-1, -1)])
def test_padding_is_at_the_ends_of_the_whole_array(mode, widths):
    pytest.importorskip("torch")
    Case("pad", [Array((2, 3, 7), L(None, None, "width"))], {"pad": widths, "mode": mode}, MESH).check()


def test_constant_padding_of_samples_and_channels_that_are_split():
    x = hp.tensor(np.arange(6.0).reshape(3, 2), shared_mesh(**MESH), L("width"))
    y = F.pad(x, (0, 1, 2, -1), value=9.0)
    assert y.layout == x.layout
    assert y.numpy().tolist() == [[9, 9, 9], [9, 9, 9], [0, 1, 9], [2, 3, 9]]


def test_zero_padding_keeps_a_partial_value_partial_and_other_padding_resolves_it():
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.ones(3), mesh, L(partial="width"))
    assert F.pad(x, (1, 1)).layout == x.layout
    y = F.pad(x, (1, 1), value=2.0)
    assert not y.layout.partial and y.numpy().tolist() == [2, 1, 1, 1, 2]


def test_a_number_in_a_split_dim_takes_no_message_and_gives_a_partial_value():
    x = line().requires_grad_()
    y = x[3] * 2.0
    assert y.layout == L(partial="width" if RANKS > 1 else ())
    assert y.resolve().item() == 6.0
    y.resolve().backward()
    assert x.grad.numpy().tolist() == [2.0 if i == 3 else 0.0 for i in range(10)]


def test_slices_of_a_split_dim_follow_the_block_rule():
    y = line()[1:9:3]
    assert y.layout == line().layout and y.numpy().tolist() == [1, 4, 7]
    assert line()[7:2].shape == (0,)
    assert F.narrow(line(), 0, 4, 5).numpy().tolist() == [4, 5, 6, 7, 8]


def test_crop_takes_the_middle_by_default():
    x = hp.tensor(np.arange(35.0).reshape(1, 1, 5, 7), shared_mesh(**MESH), L(None, None, None, "width"))
    assert F.crop(x, 3).numpy()[0, 0].tolist() == [[9, 10, 11], [16, 17, 18], [23, 24, 25]]
    assert F.crop(x, (1, 2), (4, 5)).numpy()[0, 0].tolist() == [[33, 34]]
    with pytest.raises(ValueError, match="crop"):
        F.crop(x, (2, 3), (4, 0))


def test_integers_and_bools_move_too():
    assert line(7, np.int64).flip(0).numpy().tolist() == [6, 5, 4, 3, 2, 1, 0]
    flags = hp.tensor(np.arange(7) % 3 == 0, shared_mesh(**MESH), L("width"))
    assert flags.roll(2, 0).numpy().tolist() == np.roll(np.arange(7) % 3 == 0, 2).tolist()
    if RANKS > 1:
        with pytest.raises(hp.LayoutError, match="bool"):
            flags[1]


@pytest.mark.ranks(min=2)
def test_a_roll_by_one_moves_one_element_a_rank():
    x = line(8 * RANKS)
    with counting() as sent:
        x.roll(1, 0)
    assert sum(tally.bytes for tally in sent.values()) == x.dtype.itemsize
