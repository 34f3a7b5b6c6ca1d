"""Softmax and the parts of cross entropy against torch."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "softmax"
pytestmark = pytest.mark.serial


@pytest.mark.parametrize("how", ["last", "first", "gaps"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 2e-6)])
def test_softmax_and_log_softmax_equal_torch_along_every_dim(implementation, arrange, rng, how, dtype, tolerance):
    torch = pytest.importorskip("torch")
    for shape in ((3, 4, 5, 6), (7, 33), (2, 3, 5), (1, 1, 4)):
        base = (rng.standard_normal(shape) * 30).astype(dtype)
        g = rng.standard_normal(shape).astype(dtype)
        for axis in range(-1, len(shape)):
            x = torch.tensor(base.astype(np.float64), requires_grad=True)
            for reference, ours, backward in ((torch.softmax, kernels.softmax, kernels.softmax_backward),
                                              (torch.log_softmax, kernels.log_softmax, kernels.log_softmax_backward)):
                x.grad = None
                want = reference(x, axis)
                want.backward(torch.tensor(g.astype(np.float64)))
                y = ours(arrange(base, how) if len(shape) > 2 else base, axis)
                dx = backward(g, y, axis)
                scale = 1 + want.abs().max().item()
                np.testing.assert_allclose(y, want.detach().numpy(), rtol=tolerance, atol=tolerance * scale)
                np.testing.assert_allclose(dx, x.grad.numpy(), rtol=20 * tolerance, atol=20 * tolerance * scale)
                assert y.dtype == dx.dtype == dtype


def test_rows_with_infinities_and_not_a_number(implementation):
    inf, nan = np.inf, np.nan
    x = np.array([[-inf, 0, 0], [-inf, -inf, -inf], [nan, 0, 1], [200, -200, 200]], np.float32)
    with np.errstate(invalid="ignore"):
        y = kernels.softmax(x, 1)
    np.testing.assert_allclose(y[0], [0, 0.5, 0.5])
    assert np.isnan(y[1]).all() and np.isnan(y[2]).all()
    np.testing.assert_allclose(y[3], [0.5, 0, 0.5])


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (0, 4)])
def test_empty_arrays_pass(implementation, shape):
    x = np.empty(shape, np.float32)
    assert kernels.softmax(x, 1).shape == kernels.log_softmax(x, 1).shape == shape
    target = np.zeros((shape[0], *shape[2:]), np.int64)
    lse, picked = kernels.cross_entropy_forward(x, target)
    assert lse.shape == picked.shape == target.shape
    assert kernels.cross_entropy_backward(x, target, lse, lse, lse).shape == shape


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_cross_entropy_equals_torch(implementation, arrange, rng, smoothing, weighted, dtype):
    torch = pytest.importorskip("torch")
    for shape in ((2, 4, 3, 5, 6), (7, 11), (2, 3, 9)):
        classes = shape[1]
        logits = (rng.standard_normal(shape) * 5).astype(dtype)
        target = rng.integers(0, classes, (shape[0], *shape[2:]))
        target[rng.random(target.shape) < 0.2] = -100
        v = rng.random(classes) + 0.5 if weighted else None
        x = torch.tensor(logits.astype(np.float64), requires_grad=True)
        loss = torch.nn.functional.cross_entropy(x, torch.tensor(target), None if v is None else torch.tensor(v),
                                                 reduction="none", label_smoothing=smoothing)
        g = rng.standard_normal(target.shape)
        loss.backward(torch.tensor(g))
        moved = arrange(logits, rng.choice(["last", "first", "gaps"])) if len(shape) > 2 else logits
        lse, picked = kernels.cross_entropy_forward(moved, target)
        weight = np.ones(classes) if v is None else v
        counted = target >= 0
        hard = g * counted * (1 - smoothing) * weight[np.where(counted, target, 0)]
        smooth = g * counted * smoothing / classes
        if not smoothing and not weighted:
            np.testing.assert_allclose(np.where(counted, lse - picked, 0), loss.detach().numpy(),
                                       rtol=1e-5 if dtype == np.float32 else 1e-13, atol=2e-6)
        dx = kernels.cross_entropy_backward(
            moved, target, lse, (hard + smooth * weight.sum()).astype(dtype), hard.astype(dtype),
            smooth.astype(dtype) if smoothing else None, None if v is None else v.astype(dtype))
        np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-5 if dtype == np.float32 else 1e-12,
                                   atol=1e-5 if dtype == np.float32 else 1e-13)
        assert dx.dtype == dtype and kernels.is_channels_last(dx)


def test_split_channels_merge_to_the_whole(implementation, rng):
    logits = rng.standard_normal((3, 10, 4)).astype(np.float64)
    logits[0, :, 0] = -np.inf
    logits[0, 7, 0] = 1.0
    target = rng.integers(0, 10, (3, 4))
    lse, picked = kernels.cross_entropy_forward(logits, target)
    parts = [kernels.cross_entropy_forward(logits[:, a:b], target - a) for a, b in ((0, 4), (4, 4), (4, 10))]
    np.testing.assert_allclose(np.logaddexp.reduce([part[0] for part in parts]), lse, rtol=1e-14)
    np.testing.assert_allclose(sum(part[1] for part in parts), picked, rtol=1e-14)
