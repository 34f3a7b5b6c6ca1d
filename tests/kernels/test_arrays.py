"""Memory orders and index boxes."""

import itertools
import math

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels import arrays

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6), (0, 3, 4), (2, 0, 4), (2, 3), (5,)])
def test_new_arrays_lie_channels_last(shape):
    a = kernels.empty_channels_last(shape, np.float32)
    assert a.shape == shape and a.dtype == np.float32
    assert len(shape) < 3 or a.transpose(0, *range(2, a.ndim), 1).flags.c_contiguous


def test_to_channels_last_copies_only_what_lies_otherwise(arrange, rng):
    a = rng.standard_normal((2, 3, 4, 5))
    for how in ("last", "first", "gaps", "reversed"):
        moved = arrange(a, how)
        b = kernels.to_channels_last(moved)
        np.testing.assert_array_equal(b, a)
        assert kernels.is_channels_last(b) and (b is moved) == (how == "last")


def test_memory_view_is_flat_and_shares_memory_or_is_none(arrange, rng):
    a = rng.standard_normal((2, 3, 4, 5))
    for order in itertools.permutations(range(4)):
        b = np.ascontiguousarray(a.transpose(order))
        view = kernels.memory_view(b.transpose(np.argsort(order)))
        assert np.shares_memory(view, b)
        np.testing.assert_array_equal(view, b.ravel())
    assert kernels.memory_view(arrange(a, "gaps")) is None
    assert kernels.memory_view(np.broadcast_to(np.ones(3), (2, 3))) is None
    assert kernels.memory_view(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5, 1, 3)])
def test_boxes_hold_exactly_the_range_in_order(shape):
    size = math.prod(shape)
    index = np.arange(size).reshape(shape)
    for a, b in itertools.combinations_with_replacement(range(size + 1), 2):
        found = [index[box] for box in arrays.boxes(shape, a, b)]
        assert len(found) <= 2 * len(shape) - 1
        assert [i for part in found for i in part.ravel().tolist()] == list(range(a, b))


def test_taps_meet_the_input_exactly(rng):
    for _ in range(500):
        n, out = (int(v) for v in rng.integers(0, 9, 2))
        stride, lo, step = int(rng.integers(1, 4)), int(rng.integers(-4, 6)), int(rng.integers(0, 6))
        outs, ins = arrays.taps(n, out, stride, lo, step)
        want = [(o, o * stride - lo + step) for o in range(out) if 0 <= o * stride - lo + step < n]
        assert list(zip(range(out)[outs], range(n)[ins], strict=True)) == want
