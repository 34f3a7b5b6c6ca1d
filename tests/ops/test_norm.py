"""Normalisation with unequal and empty blocks, far from zero, over all scopes; RMS and local response norm."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import assert_close_everywhere, collective_assert, shared_mesh
from hpcpar.testing.cases import Array, Case
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
MESH = {"a": RANKS}
LAYOUTS = [L("a"), L(None, "a"), L(None, None, "a"), L(None, None, None, "a")]


def normalised(x, dims):
    """In extended precision: exact statistics, whatever the mean."""
    wide = x.astype(np.longdouble)
    return (wide - wide.mean(dims, keepdims=True)) / np.sqrt(wide.var(dims, keepdims=True) + np.longdouble(1e-5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 65, 3, 2), (1, 3, 2, 9), (2, 1, 1, 3)])
def test_batch_group_and_instance_norm_with_unequal_and_empty_blocks(shape, layout):
    pytest.importorskip("torch")
    weights = [Array(shape[1:2], values="positive", parameter=True), Array(shape[1:2], parameter=True)]
    arrays = [Array(shape, layout), *weights]
    for op, arguments in (
        ("batch_norm_and_statistics", {"momentum": 0.3}),
        ("group_norm", {"num_groups": 5 if shape[1] == 65 else 1}),
        ("instance_norm", {}),
    ):
        Case(op, arrays, arguments, MESH).check()


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("layout", [L("a"), L(None, None, "a")])
def test_statistics_are_exact_where_the_mean_is_far_larger_than_the_spread(layout, mean):
    x = (mean + np.random.default_rng(0).standard_normal((5, 3, 7, 6))).astype(np.float32)
    mesh = shared_mesh(**MESH)
    t = hp.tensor(x, mesh, layout)
    for y, dims in (
        (F.batch_norm(t, training=True), (0, 2, 3)),
        (F.group_norm(t, 1), (1, 2, 3)),
        (F.instance_norm(t), (2, 3)),
    ):
        # of the spread little more than 0.06 is left in float32 at 1e6: the input, not its statistics, is rounded
        assert_close_everywhere(mesh.world, y.numpy(), normalised(x, dims).astype(np.float32), 2e-6)


def test_running_statistics_have_the_same_bits_on_all_ranks_whatever_the_scope():
    mesh = shared_mesh(**MESH)
    x = np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float32) * 3 + 7
    for scope in ("all", "sample", "rank"):
        for layout in (L("a"), L(None, None, "a")):
            mean, var = (hp.tensor(f(3, np.float32), mesh) for f in (np.zeros, np.ones))
            F.batch_norm(hp.tensor(x, mesh, layout), mean, var, training=True, momentum=0.25, scope=scope)
            gathered = mesh.world.gather_objects(mean.shard.tobytes() + var.shard.tobytes())
            assert len(set(gathered)) == 1
            wide = x.astype(np.float64)
            assert np.allclose(mean.numpy(), 0.25 * wide.mean((0, 2)), 1e-6)
            assert np.allclose(var.numpy(), 0.75 + 0.25 * wide.var((0, 2), ddof=1), 1e-6)


def test_scopes_say_over_which_ranks_statistics_are_taken():
    mesh = shared_mesh(**MESH)
    x = np.random.default_rng(0).standard_normal((2 * RANKS, 3, 4 * RANKS))
    by_sample, by_position = hp.tensor(x, mesh, L("a")), hp.tensor(x, mesh, L(None, None, "a"))
    whole = normalised(x, (0, 2)).astype(float)
    assert np.allclose(F.batch_norm(by_sample, training=True, scope="all").numpy(), whole)
    assert np.allclose(F.batch_norm(by_position, training=True, scope="sample").numpy(), whole)
    for tensor, scope in ((by_sample, "sample"), (by_sample, "rank"), (by_position, "rank")):
        own = normalised(np.asarray(tensor.shard), (0, 2)).astype(float)
        y = F.batch_norm(tensor, training=True, scope=scope)
        collective_assert(mesh.world, np.allclose(y.shard, own), f"{scope}")


def test_evaluation_uses_running_statistics_and_sends_nothing():
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.arange(24.0).reshape(2, 3, 4), mesh, L(None, None, "a"))
    mean, var = hp.tensor(np.array([1.0, 2.0, 3.0]), mesh), hp.tensor(np.array([4.0, 9.0, 16.0]), mesh)
    with counting() as sent:
        y = F.batch_norm(x, mean, var, eps=0.0)
    assert not sent
    assert np.allclose(y.numpy(), (x.numpy() - mean.numpy()[:, None]) / np.sqrt(var.numpy())[:, None])


@pytest.mark.ranks(min=2)
def test_the_backward_pass_sends_one_message():
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.random.default_rng(0).standard_normal((2, 3, 7)), mesh, L(None, None, "a"), requires_grad=True)
    for norm in (lambda: F.batch_norm(x, training=True), lambda: F.group_norm(x, 3)):
        y = norm()
        gradient = hp.tensor(np.ones(y.shape), mesh, y.layout)
        with counting() as sent:
            y.backward(gradient)
        assert sum(tally.messages for tally in sent.values()) == 1


@pytest.mark.parametrize("layout", [L("a"), L(None, "a"), L(None, None, "a")])
def test_rms_norm_of_split_rows_and_local_response_norm_of_split_channels(layout):
    pytest.importorskip("torch")
    row = [Array((7,), values="positive", parameter=True)]
    Case("rms_norm", [Array((2, 3, 7), layout), *row], {"normalized_shape": (7,), "eps": 1e-6}, MESH).check()
    Case("local_response_norm", [Array((2, 5, 7), layout)], {"size": 4, "alpha": 0.5}, MESH).check()


def test_one_value_a_channel_is_refused_in_training():
    with pytest.raises(ValueError, match="more than one value"):
        F.batch_norm(hp.tensor(np.zeros((1, 3, 1)), shared_mesh(**MESH)), training=True)
