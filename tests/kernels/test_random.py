"""Random numbers are the words of NumPy's Philox by global index, under any partition."""

import itertools
import math

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels.generic.random import random_words

FAMILY = "random"
SEED, STREAM = 2**63 + 5, 77
pytestmark = pytest.mark.serial


def whole(shape, words=1):
    raw = np.random.Philox(key=np.array([SEED, STREAM], np.uint64)).random_raw(math.prod(shape) * words)
    return raw.reshape(*shape, words)


@pytest.mark.parametrize("words", [1, 2, 3])
def test_words_of_random_boxes_are_those_of_the_whole(rng, words):
    for shape in ((5,), (4, 301), (3, 2, 17, 19, 23), (2, 1, 600, 3), (7, 5, 1030)):
        full = whole(shape, words)
        for _ in range(12):
            ends = [sorted(int(i) for i in rng.integers(0, n + 1, 2)) for n in shape]
            got = random_words(SEED, STREAM, shape, ends, words)
            np.testing.assert_array_equal(got, full[tuple(slice(a, b) for a, b in ends)])


def test_uniform_is_what_numpys_generator_draws(implementation):
    shape = (2, 3, 8, 9, 10)
    want = np.random.Generator(np.random.Philox(key=np.array([SEED, STREAM], np.uint64))).random(shape)
    got = kernels.random_uniform(SEED, STREAM, shape)
    np.testing.assert_array_equal(got, want)
    assert kernels.is_channels_last(got)
    single = kernels.random_uniform(SEED, STREAM, shape, dtype=np.float32)
    assert single.dtype == np.float32 and single.max() < 1
    np.testing.assert_allclose(single, want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 5, 8, 9, 10), (2, 16, 33, 5), (3, 40, 70), (37, 65), (900,)])
def test_every_partition_gives_the_same_numbers(implementation, shape):
    calls = [lambda box: kernels.random_uniform(SEED, STREAM, shape, box),
             lambda box: kernels.random_normal(SEED, STREAM, shape, box, np.float32),
             lambda box: kernels.dropout_mask(SEED, STREAM, shape, box, 0.3)]
    for call in calls:
        everything = call(None)
        assert everything.shape == shape
        for parts in ((1,) * len(shape), (2,) * len(shape), *((1,) * d + (3,) + (1,) * (len(shape) - d - 1)
                                                              for d in range(len(shape)))):
            edges = [[i * n // p for i in range(p + 1)] for n, p in zip(shape, parts, strict=True)]
            for box in itertools.product(*(list(itertools.pairwise(e)) for e in edges)):
                np.testing.assert_array_equal(call(box), everything[tuple(slice(a, b) for a, b in box)])


def test_mask_keeps_where_the_uniform_number_reaches_p(implementation):
    shape = (2, 4, 9, 11)
    uniform = kernels.random_uniform(SEED, 3, shape)
    for p in (0.0, 0.25, 0.9, 1.0):
        mask = kernels.dropout_mask(SEED, 3, shape, None, p)
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, uniform >= p)
    with pytest.raises(ValueError, match="between 0 and 1"):
        kernels.dropout_mask(SEED, 3, shape, None, 1.5)


def test_normal_numbers_follow_the_documented_transform_and_the_distribution(implementation):
    shape = (100, 1000)
    got = kernels.random_normal(SEED, 9, shape)
    raw = np.random.Philox(key=np.array([SEED, 9], np.uint64)).random_raw(2 * got.size).reshape(*shape, 2)
    u, v = ((raw[..., i] >> np.uint64(11)) * 2.0**-53 for i in (0, 1))
    np.testing.assert_allclose(got, np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v), rtol=1e-12, atol=1e-12)
    # 1e5 samples: five standard errors of the mean, the variance and the fourth moment
    assert abs(got.mean()) < 5 / math.sqrt(1e5)
    assert abs(got.var() - 1) < 5 * math.sqrt(2 / 1e5)
    assert abs((got**4).mean() - 3) < 5 * math.sqrt(96 / 1e5)


def test_streams_and_seeds_differ(implementation):
    draws = [kernels.random_uniform(seed, stream, (64,)) for seed, stream in ((1, 1), (1, 2), (2, 1))]
    assert not any((a == b).any() for a, b in itertools.combinations(draws, 2))


def test_empty_boxes_draw_nothing_and_boxes_outside_are_refused(implementation):
    assert kernels.random_normal(1, 1, (4, 4, 4), ((0, 4), (2, 2), (0, 4))).shape == (4, 0, 4)
    assert kernels.dropout_mask(1, 1, (0, 3), None, 0.5).shape == (0, 3)
    for box in (((0, 5), (0, 4)), ((-1, 2), (0, 4)), ((3, 2), (0, 4)), ((0, 4),)):
        with pytest.raises(ValueError, match="does not lie"):
            kernels.random_uniform(1, 1, (4, 4), box)
