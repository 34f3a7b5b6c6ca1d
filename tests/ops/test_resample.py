"""Interpolation, adaptive pooling, unpooling and pixel shuffles under splits."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import shared_mesh
from hpcpar.testing.cases import Array, Case
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
MESH = {"depth": RANKS}


@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize(
    "arguments",
    [
        {"scale_factor": 2.0, "mode": "nearest"},
        {"scale_factor": 2.0, "mode": "trilinear"},
        {"scale_factor": 2.0, "mode": "trilinear", "align_corners": True},
        {"scale_factor": (1.7, 0.6, 2.3), "mode": "trilinear"},
        {"size": (3, 9, 1), "mode": "nearest-exact"},
        {"size": (3, 9, 7), "mode": "area"},
    ],
)
def test_upsampling_a_split_volume_and_its_gradient(arguments, dim):
    pytest.importorskip("torch")
    layout = L(*[None] * dim, "depth")
    Case("interpolate", [Array((2, 3, 5, 4, 6), layout)], arguments, MESH).check()


def test_doubling_by_nearest_neighbours_sends_nothing_where_blocks_are_even():
    x = hp.tensor(np.zeros((1, 2, 4 * RANKS)), shared_mesh(**MESH), L(None, None, "depth"))
    with counting() as sent:
        y = F.interpolate(x, scale_factor=2)
    assert not sent and y.shape[2] == 8 * RANKS


def test_global_pooling_gathers_nothing_and_may_be_flattened():
    x = hp.tensor(np.arange(2.0 * 3 * 5 * 4).reshape(2, 3, 5, 4), shared_mesh(**MESH), L(None, None, "depth"))
    with counting() as sent:
        y = F.adaptive_avg_pool2d(x, 1)
    assert not sent
    assert y.layout == L(partial="depth" if RANKS > 1 else ())
    assert np.allclose(F.flatten(y, 1).numpy(), x.numpy().mean((2, 3)))


def test_global_max_pooling_chooses_the_first_of_equals_over_all_ranks():
    values = np.zeros((1, 1, 2, 6))
    values[0, 0, 1, 1] = values[0, 0, 0, 4] = 9.0
    for layout in (L(None, None, None, "depth"), L(None, None, "depth")):
        x = hp.tensor(values, shared_mesh(**MESH), layout, requires_grad=True)
        y, index = F.adaptive_max_pool2d(x, 1, return_indices=True)
        assert index.numpy().item() == 4
        y.sum().backward()
        assert x.grad.numpy().ravel().tolist() == [float(i == 4) for i in range(12)]


def test_unpooling_puts_values_back_where_the_maxima_stood():
    values = np.array([[[1.0, 5.0, 2.0, 2.0, 7.0, 3.0, 9.0]]])
    x = hp.tensor(values, shared_mesh(**MESH), L(None, None, "depth"))
    y, index = F.max_pool1d(x, 2, return_indices=True)
    assert F.max_unpool1d(y, index, 2, output_size=(7,)).numpy().tolist() == [[[0, 5, 2, 0, 7, 0, 0]]]


def test_indices_out_of_their_windows_are_refused_on_all_ranks_where_positions_are_split():
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.array([[[1.0, 2.0, 3.0]]]), mesh, L(None, None, "depth"))
    index = hp.tensor(np.array([[[4, 2, 0]]]), mesh, L(None, None, "depth"))
    if RANKS == 1:
        assert F.max_unpool1d(x, index, 2).numpy().tolist() == [[[3, 0, 2, 0, 1, 0]]]
    else:
        with pytest.raises(hp.LayoutError, match="repartition"):
            F.max_unpool1d(x, index, 2)
    with pytest.raises(ValueError, match="outside the result"):
        F.max_unpool1d(x, hp.tensor(np.array([[[0, 2, 6]]]), mesh, L()), 2)


@pytest.mark.ranks(exactly=2)
def test_a_pixel_shuffle_refuses_blocks_that_cut_its_groups():
    x = hp.tensor(np.zeros((1, 12, 2, 2)), shared_mesh(**MESH), L(None, "depth"))
    with pytest.raises(hp.LayoutError, match=r"repartition to Layout\(\)"):
        F.pixel_shuffle(x, 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"size": 3, "scale_factor": 2.0}, "either"),
        ({"size": 3, "mode": "bilinear"}, "mode"),
        ({"size": 3, "mode": "nearest", "align_corners": True}, "align_corners"),
        ({"scale_factor": 0.1}, "at least 1"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(arguments, match):
    x = hp.tensor(np.zeros((1, 1, 4)), shared_mesh(**MESH), L())
    with pytest.raises(ValueError, match=match):
        F.interpolate(x, **arguments)


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_lp_pooling_scales_a_cut_last_window_as_torch_does(norm):
    x = hp.tensor(np.ones((1, 1, 6)), shared_mesh(**MESH), L(None, None, "depth"))
    y = F.lp_pool1d(x, norm, 3, 2, ceil_mode=True)
    assert np.allclose(y.numpy(), 3 ** (1 / norm))
