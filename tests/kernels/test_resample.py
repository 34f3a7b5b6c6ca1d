"""Local resampling against matrices and loops."""

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels import is_channels_last

FAMILY = "pool"
pytestmark = pytest.mark.serial


def volume(shape=(2, 3, 5, 4), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dim", [2, 3])
def test_sums_of_taps_are_a_matrix_product(implementation, dim):
    x = volume()
    n = x.shape[dim]
    index = np.array([[0, 1], [n - 1, n - 1], [2, 0]])
    weight = np.array([[0.25, 0.75], [1.0, -2.0], [0.5, 0.0]])
    matrix = np.zeros((3, n))
    np.add.at(matrix, (np.arange(3)[:, None], index), weight)
    y = kernels.tap_sums(x, dim, index, weight)
    assert np.allclose(y, np.moveaxis(np.tensordot(matrix, x, (1, dim)), 0, dim), 1e-14)
    assert is_channels_last(y)
    assert kernels.tap_sums(x, dim, index[:0], None).shape[dim] == 0
    assert np.array_equal(kernels.tap_sums(x, dim, index[:, :1], None), np.take(x, index[:, 0], dim))
    three = kernels.tap_sums(x, dim, np.array([[0, 1, 2]]), np.array([[1.0, 2.0, 3.0]]))
    assert np.allclose(three, np.expand_dims(np.moveaxis(x, dim, -1)[..., :3] @ [1.0, 2.0, 3.0], dim), 1e-14)


def test_means_over_overlapping_windows_and_their_adjoint(implementation):
    x, start, stop = volume(), [0, 1, 4], [3, 4, 5]
    y = kernels.window_means(x, 2, start, stop)
    for o, (a, b) in enumerate(zip(start, stop, strict=True)):
        assert np.allclose(y[:, :, o], x[:, :, a:b].mean(2), 1e-14)
    g = volume(y.shape, 1)
    dx = kernels.window_means_backward(g, 2, start, stop, 5)
    assert np.isclose((y * g).sum(), (x * dx).sum(), rtol=1e-13)


def test_maxima_stand_first_in_row_major_order_and_the_last_nan_wins(implementation):
    x = np.zeros((1, 1, 3, 4))
    x[0, 0, 0, 3] = x[0, 0, 1, 0] = 2.0
    x[0, 0, 2, 1] = x[0, 0, 2, 2] = np.nan
    y, index = kernels.window_maxima(x, [[0, 2], [0]], [[2, 3], [4]])
    assert index.ravel().tolist() == [3, 10]
    assert y[0, 0, 0, 0] == 2.0 and np.isnan(y[0, 0, 1, 0])


def test_values_put_at_places_and_taken_from_them():
    values, places = volume((2, 3, 4)), np.array([[[0, 5, -1, 5]] * 3] * 2)
    y = kernels.put_at(values, places, (2, 3, 3, 2))
    flat = y.reshape(2, 3, 6)
    assert np.array_equal(flat[..., 0], values[..., 0]) and np.array_equal(flat[..., 5], values[..., 3])
    assert not flat[..., 1:5].any()
    taken = kernels.take_at(y, places)
    assert np.array_equal(taken[..., 1], values[..., 3]) and not taken[..., 2].any()


def test_empty_arrays_pass(implementation):
    empty = np.zeros((2, 0, 3))
    assert kernels.tap_sums(empty, 2, np.zeros((4, 1), int), None).shape == (2, 0, 4)
    assert kernels.put_at(empty, empty.astype(int), (2, 0, 7)).shape == (2, 0, 7)
    assert kernels.window_maxima(np.zeros((0, 2, 3)), [[0]], [[3]])[0].shape == (0, 2, 1)


@pytest.mark.parametrize("seed", range(3))
def test_maxima_of_drawn_windows_equal_loops(implementation, seed):
    rng = np.random.default_rng(seed)
    x = np.round(rng.standard_normal((2, 3, 4, 5, 3)))
    x[rng.random(x.shape) < 0.05] = np.nan
    start = [sorted(int(a) for a in rng.integers(0, n, 2)) for n in x.shape[2:]]
    stop = [[int(rng.integers(a + 1, n + 1)) for a in edges] for edges, n in zip(start, x.shape[2:], strict=True)]
    y, index = kernels.window_maxima(x, start, stop)
    for o in np.ndindex(*y.shape):
        cuts = tuple(slice(start[d][i], stop[d][i]) for d, i in enumerate(o[2:]))
        window = x[o[:2]][cuts]
        flat = window.ravel()
        nan = np.flatnonzero(np.isnan(flat))
        place = int(nan[-1]) if nan.size else int(flat.argmax())
        at = [c.start + i for c, i in zip(cuts, np.unravel_index(place, window.shape), strict=True)]
        assert index[o] == np.ravel_multi_index(at, x.shape[2:])
        assert np.array_equal(y[o], flat[place], equal_nan=True)
