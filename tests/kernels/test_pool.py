"""Pooling against torch and against loops, with buffers that hold filler and windows that hold nothing."""

import itertools

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "pool"
pytestmark = pytest.mark.serial


def max_by_loops(x, kernel, stride, dilation, out, valid):
    y = np.full((*x.shape[:2], *out), kernels.lowest(x.dtype), x.dtype)
    index = np.full(y.shape, -1)
    for o in np.ndindex(*y.shape):
        for k in itertools.product(*(range(n) for n in kernel)):
            at = tuple(i * s + j * d for i, s, j, d in zip(o[2:], stride, k, dilation, strict=True))
            if all(lo <= i < hi for i, (lo, hi) in zip(at, valid, strict=True)):
                value = x[(*o[:2], *at)]
                if index[o] < 0 or value > y[o] or value != value:
                    y[o], index[o] = value, np.ravel_multi_index(at, x.shape[2:])
    return y, index


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("seed", range(3))
def test_maxima_and_positions_equal_loops(implementation, arrange, dtype, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        nd = int(rng.integers(1, 4))
        kernel, stride, dilation = (tuple(int(v) for v in rng.integers(1, 4, nd)) for _ in range(3))
        sizes = tuple(int(n) for n in rng.integers(0, 7, nd))
        x = rng.integers(-2, 3, (int(rng.integers(0, 3)), int(rng.integers(1, 5)), *sizes)).astype(dtype)
        if dtype != np.int32:
            x[rng.random(x.shape) < 0.1] = np.nan
            x[rng.random(x.shape) < 0.1] = -np.inf
        valid = tuple((a, max(a, b)) for a, b in ((int(rng.integers(0, 3)), n - int(rng.integers(0, 2)))
                                                  for n in sizes))
        outside = np.ones(sizes, bool)
        outside[tuple(slice(a, b) for a, b in valid)] = False
        x[:, :, outside] = kernels.lowest(dtype)
        out = tuple(max(0, (n - d * (k - 1) - 1) // s + 1)
                    for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True))
        moved = arrange(x, rng.choice(["last", "first", "gaps", "reversed"]))
        y, index = kernels.max_pool_forward(moved, kernel, stride, dilation, valid=valid)
        want, where = max_by_loops(x, kernel, stride, dilation, out, valid)
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(index, where)
        assert y.dtype == dtype and index.dtype == np.int32
        assert kernels.is_channels_last(y) and kernels.is_channels_last(index)


@pytest.mark.parametrize("nd", [1, 2, 3])
def test_max_pool_and_its_gradient_equal_torch(implementation, rng, nd):
    torch = pytest.importorskip("torch")
    call = {1: torch.nn.functional.max_pool1d, 2: torch.nn.functional.max_pool2d,
            3: torch.nn.functional.max_pool3d}[nd]
    for kernel, stride, padding, dilation in ((2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), (2, 3, 0, 1)):
        sizes = (9, 8, 7)[:nd]
        for dtype in (np.float32, np.float64):
            x = torch.tensor(rng.standard_normal((2, 5, *sizes)).astype(dtype), requires_grad=True)
            y, where = call(x, kernel, stride, padding, dilation, return_indices=True)
            g = torch.tensor(rng.standard_normal(y.shape).astype(dtype))
            y.backward(g)
            buffer = np.pad(x.detach().numpy(), ((0, 0), (0, 0), *((padding, padding),) * nd),
                            constant_values=-np.inf)
            got, index = kernels.max_pool_forward(buffer, (kernel,) * nd, (stride,) * nd, (dilation,) * nd, y.shape[2:],
                                                  tuple((padding, padding + n) for n in sizes))
            np.testing.assert_array_equal(got, y.detach().numpy())
            at = np.unravel_index(index, buffer.shape[2:])
            np.testing.assert_array_equal(np.ravel_multi_index(tuple(a - padding for a in at), sizes), where.numpy())
            dx = kernels.max_pool_backward(g.numpy(), index, buffer.shape)
            inside = dx[(slice(None), slice(None), *(slice(padding, padding + n) for n in sizes))]
            np.testing.assert_allclose(inside, x.grad.numpy(), rtol=1e-6, atol=1e-6)
            assert dx.dtype == dtype and kernels.is_channels_last(dx)


def test_a_window_without_input_has_no_position_and_passes_no_gradient(implementation):
    x = np.full((1, 1, 6), -np.inf, np.float32)
    x[0, 0, 2] = -np.inf  # a real input that is as low as the filler
    y, index = kernels.max_pool_forward(x, (2,), (2,), (1,), valid=((2, 4),))
    assert index.tolist() == [[[-1, 2, -1]]] and np.isneginf(y).all()
    dx = kernels.max_pool_backward(np.ones_like(y), index, x.shape)
    assert dx.tolist() == [[[0, 0, 1, 0, 0, 0]]]


def test_the_last_nan_and_the_first_of_equals_are_chosen(implementation):
    x = np.array([1, np.nan, 3, np.nan, 3, np.nan, 5, 7, 7], np.float32).reshape(1, 1, 9)
    _, index = kernels.max_pool_forward(x, (3,), (3,), (1,))
    assert index.tolist() == [[[1, 5, 7]]]


def test_more_windows_than_fit_are_refused(implementation):
    with pytest.raises(ValueError, match="windows fit"):
        kernels.max_pool_forward(np.zeros((1, 1, 4), np.float32), (2,), (2,), (1,), (3,))


@pytest.mark.parametrize("nd", [1, 2, 3])
def test_average_pool_and_its_gradient_equal_torch(implementation, arrange, rng, nd):
    torch = pytest.importorskip("torch")
    call = {1: torch.nn.functional.avg_pool1d, 2: torch.nn.functional.avg_pool2d,
            3: torch.nn.functional.avg_pool3d}[nd]
    for kernel, stride, padding, count_pad in ((3, 2, 1, True), (2, 2, 0, True), (3, 1, 1, False), (2, 3, 1, True)):
        for sizes in ((8, 6, 10)[:nd], (9, 5, 7)[:nd]):
            for dtype, tolerance in ((np.float32, 2e-6), (np.float64, 1e-13)):
                x = torch.tensor(rng.standard_normal((2, 4, *sizes)).astype(dtype), requires_grad=True)
                y = call(x, kernel, stride, padding, False, count_pad)
                g = torch.tensor(rng.standard_normal(y.shape).astype(dtype))
                y.backward(g)
                starts = [np.arange(o) * stride - padding for o in y.shape[2:]]
                divisors = [np.full(len(s), kernel) if count_pad else np.minimum(s + kernel, n) - np.maximum(s, 0)
                            for s, n in zip(starts, sizes, strict=True)]
                args = ((kernel,) * nd, (stride,) * nd, (padding,) * nd, divisors)
                for how in ("last", "first", "gaps"):
                    got = kernels.avg_pool_forward(arrange(x.detach().numpy(), how), *args)
                    np.testing.assert_allclose(got, y.detach().numpy(), rtol=tolerance, atol=tolerance)
                    dx = kernels.avg_pool_backward(arrange(g.numpy(), how), x.shape, *args)
                    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=tolerance, atol=tolerance)
                    assert kernels.is_channels_last(got) and kernels.is_channels_last(dx)
                    assert got.dtype == dx.dtype == dtype


@pytest.mark.parametrize("seed", range(4))
def test_average_pool_of_any_geometry_has_its_adjoint_and_equals_loops(implementation, seed):
    rng = np.random.default_rng(seed)
    for _ in range(15):
        nd = int(rng.integers(1, 4))
        kernel, stride = (tuple(int(v) for v in rng.integers(1, 4, nd)) for _ in range(2))
        sizes, out = (tuple(int(n) for n in rng.integers(0, 7, nd)) for _ in range(2))
        padding = tuple(int(v) for v in rng.integers(-2, 4, nd))
        divisors = [rng.integers(1, 4, n) for n in out]
        n, c = int(rng.integers(0, 3)), int(rng.choice([1, 3, 16]))
        x, g = rng.standard_normal((n, c, *sizes)), rng.standard_normal((n, c, *out))
        want = np.zeros(g.shape)
        for o in np.ndindex(*out):
            window = [slice(max(0, i * s - p), max(0, i * s - p + k))
                      for i, s, p, k in zip(o, stride, padding, kernel, strict=True)]
            total = x[(slice(None), slice(None), *window)].sum(axis=tuple(range(2, nd + 2)))
            want[(slice(None), slice(None), *o)] = total / np.prod([d[i] for d, i in zip(divisors, o, strict=True)])
        for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 2e-6)):
            y = kernels.avg_pool_forward(x.astype(dtype), kernel, stride, padding, divisors)
            np.testing.assert_allclose(y, want, rtol=tolerance, atol=10 * tolerance)
            dx = kernels.avg_pool_backward(g.astype(dtype), x.shape, kernel, stride, padding, divisors)
            assert dx.shape == x.shape
            assert abs((dx * x).sum() - (g * want).sum()) <= 30 * tolerance * (1 + np.abs(g * want).sum())


def test_sum_pool_is_average_pool_times_the_window(implementation, rng):
    x = rng.standard_normal((2, 3, 7, 8)).astype(np.float32)
    y = kernels.sum_pool_forward(x, (3, 2), (2, 3))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 2), axis=(2, 3))[:, :, ::2, ::3]
    np.testing.assert_allclose(y, windows.sum(axis=(4, 5)), rtol=1e-5, atol=1e-5)
    g = rng.standard_normal(y.shape).astype(np.float32)
    dx = kernels.sum_pool_backward(g, x.shape, (3, 2), (2, 3))
    assert dx.shape == x.shape
    np.testing.assert_allclose((dx * x).sum(), (g * y).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_activation_fused_into_average_pool_equals_the_two_apart(implementation, arrange, rng, slope):
    x = rng.standard_normal((2, 5, 7, 6, 4)).astype(np.float32)
    args = ((3, 2, 3), (2, 2, 1), (1, 0, 1), [np.array([2, 3, 3, 3]), np.full(3, 2), np.array([2, 3, 3, 2])])
    active = np.where(x > 0, x, np.float32(slope) * x)
    signs = kernels.empty_signs(x)
    y = kernels.avg_pool_forward(arrange(x, "first"), *args, slope=slope, signs=signs)
    np.testing.assert_allclose(y, kernels.avg_pool_forward(active, *args), rtol=1e-6, atol=1e-6)
    g = rng.standard_normal(y.shape).astype(np.float32)
    apart = kernels.avg_pool_backward(g, x.shape, *args) * np.where(x > 0, np.float32(1), np.float32(slope))
    fused = kernels.avg_pool_backward(g, x.shape, *args, signs=signs, slope=slope)
    np.testing.assert_allclose(fused, apart, rtol=1e-6, atol=1e-6)


SIGNED = [(2, 3, 5), (1, 16, 4, 6), (2, 5, 3, 4, 7), (1, 1, 1), (0, 3, 4, 5), (1, 3, 0, 2), (1, 0, 4)]


@pytest.mark.parametrize("shape", SIGNED)
def test_signs_take_a_bit_each_and_come_back(arrange, rng, shape):
    x = rng.integers(-2, 3, shape).astype(np.float32)
    signs = kernels.pack_signs(arrange(x, "first"), kernels.empty_signs(x))
    assert signs.dtype == np.uint8 and signs.shape[-1] == -(-shape[1] * shape[-1] // 8)
    np.testing.assert_array_equal(kernels.unpack_signs(signs, shape), x > 0)


@pytest.mark.parametrize("shape", [(2, 3, 15), (1, 8, 7, 6), (2, 5, 7, 6, 4)])
def test_average_pools_write_the_signs_that_backward_needs(implementation, rng, shape):
    """Where windows leave gaps nothing is wanted: there the gradient is zero."""
    x = rng.standard_normal(shape).astype(np.float32)
    nd = len(shape) - 2
    for kernel, stride in ((3, 2), (2, 2), (1, 3)):
        sizes = [(n - kernel) // stride + 1 for n in shape[2:]]
        args = ((kernel,) * nd, (stride,) * nd, (0,) * nd, [np.ones(n) for n in sizes])
        signs = kernels.empty_signs(x)
        y = kernels.avg_pool_forward(x, *args, slope=0.2, signs=signs)
        got = kernels.avg_pool_backward(np.ones_like(y), shape, *args, signs=signs, slope=0.2)
        whole = kernels.avg_pool_backward(np.ones_like(y), shape, *args)
        np.testing.assert_allclose(got, np.where(x > 0, whole, np.float32(0.2) * whole), rtol=1e-6)
