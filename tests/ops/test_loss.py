"""Losses over split voxels: true counts, ranks without a valid voxel, labels that are no classes."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import shared_mesh
from hpcpar.testing.cases import Array, Case

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
MESH = {"a": RANKS}
LOGITS = [L("a"), L(None, "a"), L(None, None, "a"), L(None, None, None, "a")]


def voxels(layout):
    return L(layout.entry(0), *[layout.entry(d) for d in range(2, 4)])


@pytest.mark.parametrize("layout", LOGITS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("more", [{}, {"weight": (0.2, 1.0, 3.0, 0.5), "label_smoothing": 0.1}])
def test_cross_entropy_with_masks_weights_and_smoothing(more, reduction, layout):
    pytest.importorskip("torch")
    shape = (3, 5, 4)
    arrays = [Array((3, 4, 5, 4), layout), Array(shape, voxels(layout), "classes 4"), Array(shape, L(), "mask")]
    Case("masked_cross_entropy", arrays, {"reduction": reduction, **more}, MESH).check()


def test_the_mean_divides_by_the_voxels_of_all_ranks():
    mesh = shared_mesh(**MESH)
    target = np.full((1, 4 * RANKS), -100)
    target[0, -1] = 1  # the last rank has the only valid voxel
    x = hp.tensor(np.zeros((1, 2, 4 * RANKS)), mesh, L(None, None, "a"), requires_grad=True)
    loss = F.cross_entropy(x, hp.tensor(target, mesh, L(None, "a")))
    loss.backward()
    assert np.isclose(float(loss), np.log(2))
    expected = np.zeros((1, 2, 4 * RANKS))
    expected[0, :, -1] = 0.5, -0.5
    assert np.allclose(x.grad.numpy(), expected)


def test_without_any_valid_voxel_the_mean_is_nan_and_the_sum_zero():
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.zeros((1, 2, 5)), mesh, L(None, None, "a"))
    target = hp.tensor(np.full((1, 5), -100), mesh)
    assert np.isnan(float(F.cross_entropy(x, target)))
    assert float(F.cross_entropy(x, target, reduction="sum")) == 0.0


@pytest.mark.parametrize("dtype", [np.float64, bool])
@pytest.mark.parametrize("loss", [F.cross_entropy, F.dice_loss])
def test_targets_that_are_no_integers_are_refused_before_any_message(loss, dtype):
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.zeros((1, 2, 5)), mesh, L(None, None, "a"))
    with pytest.raises(ValueError, match="classes as integers, got dtype"):
        loss(x, hp.tensor(np.zeros((1, 5), dtype), mesh, L(None, "a")))


def test_a_label_that_is_no_class_is_one_error_on_all_ranks():
    mesh = shared_mesh(**MESH)
    target = np.zeros((1, 5), int)
    target[0, 0] = 9
    x = hp.tensor(np.zeros((1, 2, 5)), mesh, L(None, None, "a"))
    with pytest.raises(ValueError, match="a target is 9"):
        F.cross_entropy(x, hp.tensor(target, mesh, L(None, "a")))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("layout", [L(None, None, "a"), L(None, "a")], ids=["voxels", "classes"])
def test_infinite_logits_of_ignored_voxels_neither_spread_nor_warn(layout):
    mesh = shared_mesh(**MESH)
    values = np.zeros((1, 2, 5))
    values[0, :, 0] = -np.inf
    target = np.array([[-100, 0, 1, 0, 1]])
    x = hp.tensor(values, mesh, layout, requires_grad=True)
    loss = F.cross_entropy(x, hp.tensor(target, mesh, L(None, "a")), label_smoothing=0.1)
    loss.backward()
    assert np.isclose(float(loss), np.log(2)) and np.isfinite(x.grad.numpy()).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_results_keep_the_dtype_of_the_logits(reduction, dtype):
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.zeros((2, 3, 4), dtype), mesh, L(None, None, "a"))
    target = hp.tensor(np.zeros((2, 4), int), mesh)
    loss = F.cross_entropy(x, target, np.array([1.0, 2.0, 3.0]), reduction=reduction, label_smoothing=0.2)
    assert loss.dtype == dtype


@pytest.mark.parametrize("layout", LOGITS)
@pytest.mark.parametrize("per_sample", [False, True])
def test_dice_loss_of_split_volumes(per_sample, layout):
    pytest.importorskip("torch")
    arrays = [Array((3, 4, 5, 4), layout, "positive"), Array((3, 5, 4), voxels(layout), "classes 4")]
    Case("dice_loss", arrays, {"per_sample": per_sample, "include_background": False}, MESH).check()


@pytest.mark.parametrize("op", ["masked_mse_loss", "masked_l1_loss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_differences_with_masks_divide_by_what_the_mask_keeps(op, reduction):
    pytest.importorskip("torch")
    arrays = [Array((3, 5), L("a")), Array((3, 5)), Array((3, 5), L(), "mask")]
    Case(op, arrays, {"reduction": reduction}, MESH).check()
    Case(op, [Array((2, 9), L(None, "a")), Array((2, 9), L(None, "a"))], {"reduction": reduction}, MESH).check()
