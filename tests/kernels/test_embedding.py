"""Rows of a table by index, and sums of rows at their indices."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "embedding"
pytestmark = pytest.mark.serial


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_rows_are_copied_and_indices_outside_give_zeros(implementation, rng, dtype):
    table = np.asfortranarray(rng.standard_normal((5, 3)).astype(dtype))
    index = np.array([[0, 4, 2], [-1, 5, 4]], np.int32)
    got = kernels.take_rows(table, index)
    want = np.stack([table[0], table[4], table[2], 0 * table[0], 0 * table[0], table[4]]).reshape(2, 3, 3)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(kernels.take_rows(table, index[:, ::2] % 5), table[index[:, ::2] % 5])


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 1e-5), (np.float16, 2e-3)])
def test_rows_of_one_index_are_summed_and_those_outside_passed_over(implementation, rng, dtype, tolerance):
    index = rng.integers(-2, 9, (40, 5))
    g = rng.standard_normal((5, 40, 6)).astype(dtype).transpose(1, 0, 2)
    want = np.zeros((7, 6))
    np.add.at(want, np.where((index >= 0) & (index < 7), index, 0), np.where(
        ((index >= 0) & (index < 7))[..., None], g.astype(np.float64), 0))
    got = kernels.add_rows(g, index, 7)
    assert got.dtype == dtype and got.shape == (7, 6)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=20 * tolerance)


def test_compiled_sums_go_by_position():
    """In float32 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    if not kernels.available("numba"):
        pytest.skip("numba is not available")
    g = np.array([[1e8], [7], [1], [-1e8], [1e8], [-1e8], [1]], np.float32)
    with kernels.use(embedding="numba"):
        got = kernels.add_rows(g, np.array([2, 1, 2, 2, 0, 0, 0]), 3)
    np.testing.assert_array_equal(got, [[1], [7], [0]])


@pytest.mark.parametrize(("rows", "count", "width"), [(0, 3, 2), (3, 0, 2), (3, 3, 0), (0, 0, 0)])
def test_empty_blocks(implementation, rows, count, width):
    index = np.arange(count)
    assert kernels.take_rows(np.ones((rows, width)), index).shape == (count, width)
    assert not kernels.take_rows(np.ones((0, width)), index).any()
    got = kernels.add_rows(np.ones((count, width)), index, rows)
    assert got.shape == (rows, width) and got.sum() == min(rows, count) * width
