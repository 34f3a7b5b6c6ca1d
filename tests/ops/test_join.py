"""Concatenation and stacking along split and unsplit dims."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import shared_mesh

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()


def tensors(shapes, layouts, **kwargs):
    mesh = shared_mesh(depth=RANKS)
    arrays = [np.arange(np.prod(s), dtype=float).reshape(s) + 100 * i for i, s in enumerate(shapes)]
    return arrays, [hp.tensor(a, mesh, lay, **kwargs) for a, lay in zip(arrays, layouts, strict=True)]


def test_parts_along_a_split_dim_are_fetched_from_where_they_are():
    split = L(None, None, "depth")
    arrays, parts = tensors([(1, 2, 5), (1, 2, 0), (1, 2, 1), (1, 2, 9)], [split] * 4)
    y = F.cat(parts, 2)
    assert y.layout == parts[0].layout
    assert np.array_equal(y.numpy(), np.concatenate(arrays, 2))


def test_a_part_that_is_not_split_is_sliced_to_the_others():
    arrays, parts = tensors([(1, 2, 5), (1, 3, 5)], [L(None, None, "depth"), L()])
    y = F.cat(parts, 1)
    assert y.layout == parts[0].layout
    assert np.array_equal(y.numpy(), np.concatenate(arrays, 1))


def test_the_gradient_of_each_part_is_its_piece():
    _, parts = tensors([(4,), (3,)], [L("depth"), L("depth")], requires_grad=True)
    F.cat(parts, 0).backward(hp.tensor(np.arange(7.0), parts[0].mesh))
    assert [p.grad.numpy().tolist() for p in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert all(p.grad.layout == p.layout for p in parts)


def test_a_skip_connection_on_channels_sends_nothing():
    from hpcpar.transport.counter import counting

    _, parts = tensors([(1, 2, 7), (1, 3, 7)], [L(None, None, "depth")] * 2)
    with counting() as sent:
        F.cat(parts, 1)
    assert not sent


def test_stack_makes_a_new_dim_that_is_not_split():
    arrays, parts = tensors([(3, 4), (3, 4)], [L("depth")] * 2)
    for dim in (0, 1, -1):
        assert np.array_equal(F.stack(parts, dim).numpy(), np.stack(arrays, dim))


@pytest.mark.ranks(min=2)
def test_parts_split_along_different_dims_are_refused_before_any_message():
    _, parts = tensors([(3, 4), (3, 4)], [L("depth"), L(None, "depth")])
    with pytest.raises(hp.LayoutError, match="repartition"):
        F.cat(parts, 0)


def test_dtypes_are_promoted():
    mesh = shared_mesh(depth=RANKS)
    y = F.cat([hp.tensor(np.arange(3), mesh), hp.tensor(np.ones(2, np.float32), mesh)])
    assert y.dtype == np.float64 and y.numpy().tolist() == [0, 1, 2, 1, 1]
