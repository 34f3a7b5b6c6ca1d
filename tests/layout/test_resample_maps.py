"""Taps and matrices of resampling against torch, block by block."""

import random

import numpy as np
import pytest

from hpcpar.layout.blocks import owned
from hpcpar.layout.resample_maps import (
    adaptive_map,
    adaptive_windows,
    resampled_size,
    taps,
    taps_map,
    taps_matrix,
)

torch = pytest.importorskip("torch", reason="torch is the oracle")
interpolate = torch.nn.functional.interpolate


def whole_matrix(n, out, p, mode, align=False, scale=None):
    """Build the (out, n) matrix from the blocks of p ranks, each from its own buffer."""
    matrix = np.zeros((out, n))
    for r in range(p):
        o0, o1 = owned(out, p, r)
        read = taps_map(n, o0, o1, out, mode, align, scale)
        index, weight = taps(n, o0, o1, out, mode, align, scale)
        matrix[o0:o1, read.start : read.start + read.size] = taps_matrix(index, weight, read.start, read.size)
    return matrix


def drawn(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng, rng.randint(1, 40), rng.randint(1, 50), rng.randint(1, 6)


def oracle(n, mode, **kwargs):
    """Return torch's matrix: the interpolation of the unit vectors along one dim; the last of four for cubic."""
    unit = torch.eye(n, dtype=torch.float64)[:, None]
    if mode == "bicubic":
        size = kwargs.pop("size", None)
        scale = kwargs.pop("scale_factor", None)
        kwargs.update({"size": (1, size)} if size else {"scale_factor": (1.0, scale)})
        return interpolate(unit[:, :, None], mode=mode, **kwargs)[:, 0, 0].numpy().T
    return interpolate(unit, mode=mode, **kwargs)[:, 0].numpy().T


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["linear", "bicubic"])
def test_smooth_modes_equal_torch_for_a_given_size(mode, align):
    ours = mode.removeprefix("bi")
    for _, n, out, p in drawn(1, 400):
        wanted = oracle(n, mode, size=out, align_corners=align)
        np.testing.assert_allclose(whole_matrix(n, out, p, ours, align), wanted, atol=1e-12)


@pytest.mark.parametrize("mode", ["linear", "bicubic"])
def test_smooth_modes_equal_torch_for_a_scale_factor(mode):
    for rng, n, _, p in drawn(2, 400):
        scale = rng.uniform(0.3, 4)
        out = resampled_size(n, scale)
        if out > 0:
            wanted = oracle(n, mode, scale_factor=scale, align_corners=False)
            matrix = whole_matrix(n, out, p, mode.removeprefix("bi"), scale=scale)
            np.testing.assert_allclose(matrix, wanted, atol=1e-12)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_modes_equal_the_gradient_and_the_2d_forward_of_torch(mode):
    for rng, n, out, p in drawn(3, 600):
        scale = rng.choice([None, rng.uniform(0.3, 4)])
        out = out if scale is None else resampled_size(n, scale)
        if out < 1 or (scale is not None and out == n):
            continue
        chosen = {"size": (1, out)} if scale is None else {"scale_factor": (1.0, scale)}
        x = torch.arange(float(n), dtype=torch.float64).reshape(1, 1, 1, n).requires_grad_()
        y = interpolate(x, mode=mode, **chosen)
        weights = torch.arange(1.0, out + 1, dtype=torch.float64)
        (y.flatten() * weights).sum().backward()
        matrix = whole_matrix(n, out, p, mode, scale=scale)
        assert (matrix @ np.arange(n)).tolist() == y.detach().flatten().tolist(), (n, out, scale)
        assert (matrix.T @ weights.numpy()).tolist() == x.grad.flatten().tolist(), (n, out, scale)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_equal_lengths_are_the_identity_whatever_the_scale(mode):
    np.testing.assert_array_equal(whole_matrix(4, 4, 3, mode, scale=1.2), np.eye(4))


def test_adaptive_windows_equal_torch():
    for _, n, out, p in drawn(4, 400):
        x = torch.eye(n, dtype=torch.float64)[:, None]
        wanted = torch.nn.functional.adaptive_avg_pool1d(x, out)[:, 0].numpy().T
        matrix = np.zeros((out, n))
        for r in range(p):
            o0, o1 = owned(out, p, r)
            start, stop = adaptive_windows(n, o0, o1, out)
            read = adaptive_map(n, o0, o1, out)
            if o1 > o0:
                assert (read.start, read.start + read.size) == (start.min(), stop.max())
            for o in range(o0, o1):
                matrix[o, start[o - o0] : stop[o - o0]] = 1 / (stop[o - o0] - start[o - o0])
        np.testing.assert_allclose(matrix, wanted, atol=1e-14)


def test_interpolation_of_nothing_and_unknown_modes_are_errors():
    with pytest.raises(ValueError, match="at least 1"):
        taps(0, 0, 2, 2, "linear")
    with pytest.raises(ValueError, match="lanczos"):
        taps(4, 0, 2, 2, "lanczos")
