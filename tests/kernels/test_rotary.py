"""Rotation of pairs of features by an angle each: complex multiplication, whatever the memory order."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "rotary"
pytestmark = pytest.mark.serial


def orders(x):
    """x (N, H, S, E) with tokens before heads in memory, heads before tokens, as a part of a larger array, reversed."""
    yield np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    yield x
    room = np.full((*x.shape[:3], 2, x.shape[3] + 3), 77, x.dtype)
    room[..., 1, 1:-2] = x
    yield room[..., 1, 1:-2]
    yield np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-15), (np.float32, 5e-7), (np.float16, 2e-3)])
def test_pairs_turn_as_complex_numbers_do(implementation, rng, interleaved, per_sample, dtype, tolerance):
    n, h, s, e, pairs = 2, 3, 5, 9, 4
    x = rng.standard_normal((n, h, s, e)).astype(dtype)
    angle = rng.uniform(-4, 4, (n, s, pairs) if per_sample else (s, pairs))
    wide = x.astype(np.float64)
    a, b = (wide[..., 0:8:2], wide[..., 1:8:2]) if interleaved else (wide[..., :4], wide[..., 4:8])
    turned = (a + 1j * b) * np.exp(1j * (angle[:, None] if per_sample else angle))
    want = wide.copy()
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    want[..., first], want[..., second] = turned.real, turned.imag
    tables = [f(angle).astype(np.float32 if dtype == np.float16 else dtype) for f in (np.cos, np.sin)]
    for given in orders(x):
        got = kernels.rotate_pairs(given, *tables, interleaved)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_empty_blocks(implementation, shape):
    pairs = np.ones((shape[2], shape[3] // 2))
    assert kernels.rotate_pairs(np.ones(shape), pairs, pairs).shape == shape
