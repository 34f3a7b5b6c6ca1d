"""Moments, normalisation and their gradients against float64 NumPy and torch."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "norm"
SHAPES = [(3, 16, 4, 5, 6), (2, 5, 7), (1, 33, 9, 3), (4, 3), (2, 24, 70, 40)]
pytestmark = pytest.mark.serial


def spatial(x):
    return tuple(range(2, x.ndim))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0, 1e4])
def test_moments_equal_two_passes_in_float64(implementation, arrange, rng, shape, mean):
    for dtype in (np.float32, np.float64):
        base = (rng.standard_normal(shape) + mean).astype(dtype)
        exact = base.astype(np.float64)
        for how in ("last", "first", "gaps"):
            x = arrange(base, how)
            for (got_mean, got_m2), axes in ((kernels.sample_moments(x), spatial(x)),
                                             (kernels.channel_moments(x), (0, *spatial(x)))):
                center = exact.mean(axis=axes, keepdims=True)
                np.testing.assert_allclose(got_mean, center.squeeze(axes), rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(got_m2, ((exact - center) ** 2).sum(axis=axes), rtol=1e-10, atol=1e-8)
                assert got_mean.dtype == got_m2.dtype == np.float64


def test_moments_of_groups_and_the_error_for_groups_that_do_not_divide(implementation, rng):
    x = rng.standard_normal((2, 6, 4, 5)).astype(np.float32)
    mean, m2 = kernels.group_moments(x, 3)
    wide = x.astype(np.float64).reshape(2, 3, 2 * 4 * 5)
    np.testing.assert_allclose(mean, wide.mean(axis=2), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(m2, wide.var(axis=2) * 40, rtol=1e-11)
    with pytest.raises(ValueError, match="do not divide"):
        kernels.group_moments(x, 4)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4), (0, 2, 0, 3)])
def test_empty_arrays_have_zero_moments_and_sums(implementation, shape):
    x = np.empty(shape, np.float32)
    c = shape[1]
    for got, want in ((kernels.channel_moments(x), (c,)), (kernels.sample_moments(x), shape[:2]),
                      (kernels.channel_grad_sums(x, x, np.zeros(c), np.ones(c)), (c,)),
                      ((kernels.channel_sums(x),), (c,))):
        assert all(part.shape == want and not part.any() for part in got)
    assert kernels.channel_normalize(x, np.zeros(c), np.ones(c)).shape == shape
    assert kernels.channel_grad_input(x, x, *(np.zeros(c),) * 2, None, *(np.zeros(c),) * 2).shape == shape


def test_merged_moments_equal_those_of_the_whole_and_skip_empty_blocks(rng):
    x = rng.standard_normal((50, 4)) + 1e6
    cuts = (0, 7, 7, 30, 50)
    blocks = [x[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    means = [b.mean(axis=0) if len(b) else np.full(4, np.nan) for b in blocks]
    m2s = [((b - m) ** 2).sum(axis=0) for b, m in zip(blocks, means, strict=True)]
    count, mean, m2 = kernels.merge_moments([len(b) for b in blocks], means, m2s)
    assert count == 50
    np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-15)
    np.testing.assert_allclose(m2, x.var(axis=0) * 50, rtol=1e-9)


def test_normalised_values_are_exact_for_a_mean_much_larger_than_the_spread(implementation, rng):
    exact = rng.standard_normal((1, 8, 300))
    x = (exact + 1e4).astype(np.float32)
    mean, m2 = kernels.channel_moments(x)
    inv = 1 / np.sqrt(m2 / 300)
    want = (x.astype(np.float64) - mean.reshape(1, 8, 1)) * inv.reshape(1, 8, 1)
    assert np.abs(kernels.channel_normalize(x, mean, inv) - want).max() < 2e-6


@pytest.mark.parametrize("slope", [None, 0.0, 0.1])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_norm_forward_and_gradients_equal_torch(implementation, arrange, rng, slope, per_sample, affine):
    torch = pytest.importorskip("torch")
    for shape in ((3, 16, 4, 5, 6), (2, 5, 7), (4, 3, 9, 3)):
        axes = tuple(range(2, len(shape))) if per_sample else (0, *range(2, len(shape)))
        x = torch.tensor(rng.standard_normal(shape), requires_grad=True)
        weight, bias = (torch.tensor(rng.standard_normal(shape[1]), requires_grad=True) for _ in range(2))
        variance, center = torch.var_mean(x, axes, correction=0, keepdim=True)
        normal = (x - center) / torch.sqrt(variance + 1e-5)
        column = (1, -1, *(1,) * (len(shape) - 2))
        y = normal * weight.reshape(column) + bias.reshape(column) if affine else normal
        y = y if slope is None else torch.nn.functional.leaky_relu(y, slope)
        g = torch.tensor(rng.standard_normal(shape))
        y.backward(g)
        count = np.prod([shape[a] for a in axes])
        for dtype, tolerance in ((np.float64, 1e-11), (np.float32, 2e-5)):
            xa, ga = (arrange(a.detach().numpy().astype(dtype), how) for a, how in ((x, "first"), (g, "last")))
            w = weight.detach().numpy().astype(dtype) if affine else None
            b = bias.detach().numpy().astype(dtype) if affine else None
            mean, m2 = kernels.sample_moments(xa) if per_sample else kernels.channel_moments(xa)
            inv = 1 / np.sqrt(m2 / count + 1e-5)
            got = kernels.channel_normalize(xa, mean, inv, w, b, slope)
            np.testing.assert_allclose(got, y.detach().numpy(), rtol=tolerance, atol=tolerance)
            assert kernels.is_channels_last(got) and got.dtype == dtype
            fused = {"bias": b, "slope": slope}
            s1, s2 = kernels.channel_grad_sums(ga, xa, mean, inv, w, **fused)
            if affine:
                for sums, grad in ((s1, bias.grad), (s2, weight.grad)):
                    np.testing.assert_allclose(sums.sum(axis=0) if per_sample else sums, grad.numpy(),
                                               rtol=20 * tolerance, atol=20 * tolerance)
                s1, s2 = s1 * w, s2 * w
            dx = kernels.channel_grad_input(ga, xa, mean, inv, w, s1 / count, s2 / count, **fused)
            np.testing.assert_allclose(dx, x.grad.numpy(), rtol=20 * tolerance, atol=5 * tolerance)
            assert kernels.is_channels_last(dx) and dx.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gate_of_a_fused_relu_is_that_of_the_result(implementation, rng, dtype):
    """Backward finds the sign again from x: it must be the sign of what forward gave, also next to zero."""
    x = kernels.to_channels_last((rng.integers(-50, 50, (2, 24, 13, 9, 7)) / 8 + 1e3).astype(dtype))
    weight, bias = (rng.integers(-8, 8, 24).astype(dtype) / 4 for _ in range(2))
    mean, inv = 1e3 + rng.integers(-50, 50, 24) / 8, np.full(24, 0.25)
    y = kernels.channel_normalize(x, mean, inv, weight, bias, 0.0)
    assert np.count_nonzero(kernels.channel_normalize(x, mean, inv, weight, bias) == 0) > 0  # some lie on the border
    ones, none = np.ones_like(x), np.zeros(24)
    dx = kernels.channel_grad_input(ones, x, mean, inv, weight, none, none, bias, 0.0)
    scale = (inv * weight).astype(dtype).reshape(24, 1, 1, 1)
    np.testing.assert_array_equal(dx, np.where(y > 0, scale, 0))
    s1, _ = kernels.channel_grad_sums(ones, x, mean, inv, weight, bias, 0.0)
    np.testing.assert_array_equal(s1, (y > 0).sum(axis=(0, 2, 3, 4)))


def test_normalize_writes_out_and_may_work_in_place(implementation, rng):
    x = kernels.to_channels_last(rng.standard_normal((2, 4, 5, 6)).astype(np.float32))
    mean, inv = rng.standard_normal(4), rng.random(4) + 1
    want = kernels.channel_normalize(x, mean, inv)
    strided = np.empty((*x.shape, 2), np.float32)[..., 0]
    assert kernels.channel_normalize(x, mean, inv, out=strided) is strided
    np.testing.assert_array_equal(strided, want)
    assert kernels.channel_normalize(x, mean, inv, out=x) is x
    np.testing.assert_array_equal(x, want)


def test_channel_sums_accumulate_in_float64(implementation):
    x = np.full((1, 2, 1 << 16), 0.1, np.float32)
    np.testing.assert_allclose(kernels.channel_sums(x), np.float32(0.1).astype(np.float64) * (1 << 16), rtol=1e-7)
