"""Pooling under splits: against torch, and the corners where torch gives no answer."""

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.ops.pool import make_windows, pooled, window_divisors, window_halo
from hpcpar.testing import shared_mesh
from hpcpar.testing.cases import Array, Case

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
MESH = {"depth": RANKS}


@pytest.mark.parametrize("dim", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("max_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("max_pool3d", {"kernel_size": 2, "stride": 3, "ceil_mode": True, "return_indices": True}),
        ("max_pool3d", {"kernel_size": (2, 3, 1), "stride": 1, "dilation": (2, 1, 1), "return_indices": True}),
        ("avg_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("avg_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True}),
        ("avg_pool3d", {"kernel_size": (2, 3, 4), "stride": (1, 5, 2), "divisor_override": 5}),
    ],
)
def test_windows_that_are_neither_their_stride_nor_whole_blocks(op, arguments, dim):
    pytest.importorskip("torch")
    layout = L(*["depth" if d == dim else None for d in range(5)])
    Case(op, [Array((3, 5, 7, 6, 9), layout, values="ties")], arguments, MESH).check()


def test_a_window_without_any_input_is_the_lowest_value_at_minus_one():
    x = hp.tensor(np.full((1, 1, 1), 5.0), shared_mesh(**MESH), L(None, None, "depth"), requires_grad=True)
    y, index = F.max_pool1d(x, 2, 1, 1, 2, return_indices=True)
    assert y.shape == (1, 1, 1) and y.numpy()[0, 0, 0] == -np.inf and index.numpy()[0, 0, 0] == -1
    y.backward(hp.tensor(np.ones((1, 1, 1)), x.mesh))
    assert not x.grad.numpy().any()


def test_the_last_nan_and_the_first_of_equals_are_chosen_across_borders():
    values = np.array([[[np.nan, 3.0, np.nan, 1.0, 7.0, 7.0, 7.0, 0.0]]])
    x = hp.tensor(values, shared_mesh(**MESH), L(None, None, "depth"))
    y, index = F.max_pool1d(x, 4, 4, return_indices=True)
    assert index.numpy().tolist() == [[[2, 4]]]
    assert np.isnan(y.numpy()[0, 0, 0]) and y.numpy()[0, 0, 1] == 7.0


def test_integers_are_pooled_with_their_own_lowest_value():
    values = np.arange(-9, 0, dtype=np.int8).reshape(1, 1, 9)
    y = F.max_pool1d(hp.tensor(values, shared_mesh(**MESH), L(None, None, "depth")), 3, 2, 1)
    assert y.dtype == np.int8 and y.numpy().tolist() == [[[-8, -6, -4, -2, -1]]]


def test_divisors_count_global_positions():
    # the last of the three windows of a dim of 6, padded by 1, begins at 3 and ends behind the padding
    assert window_divisors(6, 0, 4, 3, 2, 1, True).tolist() == [3, 3, 3, 2]
    assert window_divisors(6, 0, 4, 3, 2, 1, False).tolist() == [2, 3, 3, 1]
    assert window_divisors(6, 2, 4, 3, 2, 1, False).tolist() == [3, 1]


@pytest.mark.parametrize("n", [8, 9])
@pytest.mark.parametrize("arguments", [(3, 2, 1), (2, 2, 0)])
def test_common_pools_of_an_unsplit_array_copy_nothing(arguments, n):
    x = hp.tensor(np.zeros((1, 2, n, n)), shared_mesh(**MESH), L())
    windows = make_windows("avg_pool2d", 2, *arguments, 1, False)
    halo = window_halo(x.sig, pooled(x.sig, windows.sizes((n, n))), windows, "kernel")
    assert np.shares_memory(halo(x.shard), x.shard)


def test_a_single_sample_needs_no_batch_dim():
    x = hp.tensor(np.arange(12.0).reshape(1, 12), shared_mesh(**MESH), L(None, "depth"))
    assert F.max_pool1d(x, 3).numpy().tolist() == [[2.0, 5.0, 8.0, 11.0]]
    assert F.avg_pool1d(x, 3).layout == x.layout


@pytest.mark.parametrize("arguments", [{"padding": 2}, {"stride": 0}, {"kernel_size": 20}, {"dilation": (1, 2)}])
def test_windows_that_do_not_fit_are_refused_with_their_name(arguments):
    x = hp.tensor(np.zeros((1, 1, 5)), shared_mesh(**MESH), L())
    with pytest.raises(ValueError, match="max_pool1d"):
        F.max_pool1d(x, **{"kernel_size": 3, **arguments})


@pytest.mark.parametrize("dim", [0, 1, 2, 4])
@pytest.mark.parametrize("slope", [0.0, 0.2, -0.3])
def test_pooling_that_takes_leaky_relu_along_equals_the_two_calls(dim, slope):
    rng = np.random.default_rng(3)
    values, ups = rng.standard_normal((2, 3, 9, 6, 7)), rng.standard_normal((2, 3, 5, 3, 4))
    layout = L(*["depth" if d == dim else None for d in range(5)])
    mesh = shared_mesh(**MESH)
    results = []
    for fused in (True, False):
        x = hp.tensor(values, mesh, layout, requires_grad=True)
        y = (F.avg_pool3d(x, 3, 2, 1, negative_slope=slope) if fused
             else F.avg_pool3d(F.leaky_relu(x, slope), 3, 2, 1))  # fmt: skip
        y.backward(hp.tensor(ups, mesh))
        results.append((y.numpy(), x.grad.numpy()))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_pooling_that_takes_leaky_relu_along_keeps_no_more_than_signs(slope):
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.ones((1, 8, 16, 4, 4)), mesh, L(None, None, "depth"), requires_grad=True)
    middle = x * 2.0
    y = F.avg_pool3d(middle, 3, 2, 1, negative_slope=slope)
    input_of_the_pool = weakref.ref(middle.shard)
    del middle
    gc.collect()
    assert input_of_the_pool() is None
    y.backward(hp.tensor(np.ones(y.shape), mesh))
    assert np.all(x.grad.numpy() > 0)
