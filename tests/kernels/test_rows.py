"""Layer norm and RMS norm made of the row kernels, against torch."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "rows"
SHAPES = [(7, 33), (5, 512), (1, 1), (64, 3)]
pytestmark = pytest.mark.serial


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_layer_norm_equals_torch(implementation, rng, shape, affine, dtype, tolerance):
    torch = pytest.importorskip("torch")
    if shape[1] == 1:
        tolerance *= 100  # every deviation is 0, and the gradient the difference of equal numbers
    x, g = (torch.tensor(rng.standard_normal(shape) + 0.5) for _ in range(2))
    x.requires_grad_()
    weight, bias = (torch.tensor(rng.standard_normal(shape[1]), requires_grad=True) for _ in range(2))
    y = torch.nn.functional.layer_norm(x, shape[1:], *((weight, bias) if affine else ()))
    y.backward(g)
    xs, gs, ws, bs = (a.detach().numpy().astype(dtype) for a in (x, g, weight, bias))
    xs = np.asfortranarray(xs)
    w, b = (ws, bs) if affine else (None, None)
    mean, m2 = kernels.row_moments(xs)
    inv = 1 / np.sqrt(m2 / shape[1] + 1e-5)
    got = kernels.row_normalize(xs, mean, inv, w, b)
    np.testing.assert_allclose(got, y.detach().numpy(), rtol=tolerance, atol=tolerance)
    s1, s2, dweight, dbias = kernels.row_grad_sums(gs, xs, mean, inv, w)
    dx = kernels.row_grad_input(gs, xs, mean, inv, w, s1 / shape[1], s2 / shape[1])
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=20 * tolerance, atol=5 * tolerance)
    assert got.dtype == dx.dtype == dtype and mean.dtype == s1.dtype == dweight.dtype == np.float64
    if affine:
        np.testing.assert_allclose(dweight, weight.grad.numpy(), rtol=20 * tolerance, atol=20 * tolerance)
        np.testing.assert_allclose(dbias, bias.grad.numpy(), rtol=20 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_rms_norm_is_the_same_about_zero(implementation, rng, dtype, tolerance):
    torch = pytest.importorskip("torch")
    x, g = torch.tensor(rng.standard_normal((9, 48)), requires_grad=True), torch.tensor(rng.standard_normal((9, 48)))
    weight = torch.tensor(rng.standard_normal(48), requires_grad=True)
    y = torch.nn.functional.rms_norm(x, (48,), weight, 1e-6)
    y.backward(g)
    xs, gs, ws = (a.detach().numpy().astype(dtype) for a in (x, g, weight))
    zero, inv = np.zeros(9), 1 / np.sqrt(kernels.row_squares(xs) / 48 + 1e-6)
    np.testing.assert_allclose(kernels.row_normalize(xs, zero, inv, ws), y.detach().numpy(), rtol=tolerance,
                               atol=tolerance)
    _, s2, dweight, _ = kernels.row_grad_sums(gs, xs, zero, inv, ws)
    np.testing.assert_allclose(dweight, weight.grad.numpy(), rtol=10 * tolerance, atol=10 * tolerance)
    np.testing.assert_allclose(kernels.row_grad_input(gs, xs, zero, inv, ws, zero, s2 / 48), x.grad.numpy(),
                               rtol=20 * tolerance, atol=5 * tolerance)


def test_rows_far_from_zero_keep_their_spread(implementation, rng):
    exact = rng.standard_normal((4, 300))
    x = (exact + 1e4).astype(np.float32)
    mean, m2 = kernels.row_moments(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(m2, ((wide - wide.mean(axis=1, keepdims=True)) ** 2).sum(axis=1), rtol=1e-10)
    want = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True)
    assert np.abs(kernels.row_normalize(x, mean, 1 / np.sqrt(m2 / 300)) - want).max() < 2e-6


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_rows_and_no_rows_pass(implementation, shape):
    x = np.empty(shape, np.float32)
    mean, m2 = kernels.row_moments(x)
    assert mean.shape == m2.shape == (shape[0],) and not mean.any() and not m2.any()
    assert kernels.row_normalize(x, mean, m2).shape == shape
    sums = kernels.row_grad_sums(x, x, mean, m2)
    assert [s.shape for s in sums] == [(shape[0],)] * 2 + [(shape[1],)] * 2 and not any(s.any() for s in sums)
    assert kernels.row_grad_input(x, x, mean, m2, None, mean, mean).shape == shape
