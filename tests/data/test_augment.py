"""Any partition of a volume yields the same augmented volume, bit for bit, and the transforms do what they say."""

import itertools

import numpy as np
import pytest

from hpcpar.data import BiasField, Flip, Gamma, Noise, ScaleShift, SwapDims
from hpcpar.data.augment import Key
from hpcpar.data.orientation import Orientation
from hpcpar.layout.blocks import owned

pytestmark = pytest.mark.serial

SHAPE = (2, 8, 7, 9)
KEY = Key(sample=3, epoch=5)
INTENSITY = [ScaleShift(seed=1), Gamma(seed=2), BiasField(seed=3), Noise(seed=4)]
PARTITIONS = [(1, 2, 1, 1), (1, 3, 1, 1), (1, 1, 2, 2), (2, 2, 3, 2), (1, 8, 7, 1), (1, 1, 1, 12)]


def volume(dtype=np.float32, shape=SHAPE):
    return np.random.default_rng(0).random(shape).astype(dtype)


def blocks(shape, parts):
    """All boxes of a partition."""
    for place in np.ndindex(*parts):
        yield tuple(owned(n, p, r) for n, p, r in zip(shape, parts, place, strict=True))


def cut(box):
    return tuple(slice(a, b) for a, b in box)


def changed(transforms, array, box=None, shape=SHAPE, key=KEY):
    """The array, a block of a sample, after the intensity transforms."""
    block = array.copy()
    for transform in transforms:
        transform.intensity(block, key, shape, box or tuple((0, n) for n in shape))
    return block


@pytest.mark.parametrize("parts", PARTITIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "transforms", [*([t] for t in INTENSITY), INTENSITY], ids=lambda ts: "+".join(type(t).__name__ for t in ts)
)
def test_intensity_does_not_depend_on_the_partition(transforms, dtype, parts):
    x = volume(dtype)
    whole = changed(transforms, x)
    assert whole.dtype == dtype and not np.array_equal(whole, x)
    for box in blocks(SHAPE, parts):
        np.testing.assert_array_equal(changed(transforms, x[cut(box)], box), whole[cut(box)])


def test_memory_order_does_not_change_bits():
    x = volume()
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0)
    for transform in INTENSITY:
        transform.intensity(last, KEY, SHAPE, tuple((0, n) for n in SHAPE))
    np.testing.assert_array_equal(last, changed(INTENSITY, x))


@pytest.mark.parametrize("transform", INTENSITY, ids=lambda t: type(t).__name__)
def test_draws_change_with_seed_sample_and_epoch_only(transform):
    x = volume()
    first = changed([transform], x)
    np.testing.assert_array_equal(changed([transform], x), first)
    other_seed = type(transform)(seed=transform.seed + 10)
    assert not np.array_equal(changed([other_seed], x), first)
    assert not np.array_equal(changed([transform], x, key=Key(4, 5)), first)
    assert not np.array_equal(changed([transform], x, key=Key(3, 6)), first)


def test_scale_and_shift_stay_in_their_range():
    x = np.array([[[[0.0, 1.0]]]])
    found = [changed([ScaleShift(0.2, 0.3)], x, shape=x.shape, key=Key(i, 0)).ravel() for i in range(300)]
    shift = np.array([f[0] for f in found])
    scale = np.array([f[1] - f[0] for f in found])
    assert -0.3 <= shift.min() < -0.28 and 0.28 < shift.max() <= 0.3
    assert 0.8 <= scale.min() < 0.82 and 1.18 < scale.max() <= 1.2


def test_gamma_is_one_power_for_the_whole_sample_and_keeps_signs():
    x = volume(np.float64) - 0.3
    power = np.log(np.abs(changed([Gamma(0.5)], x))) / np.log(np.abs(x))
    np.testing.assert_allclose(power, power.flat[0], rtol=1e-9)
    assert 1 / 1.5 <= power.flat[0] <= 1.5
    np.testing.assert_array_equal(np.sign(changed([Gamma(0.5)], x)), np.sign(x))


def test_the_bias_field_is_the_sum_of_cosines_it_claims_to_be():
    transform = BiasField(strength=0.4, order=2, seed=3)
    field = changed([transform], np.ones(SHAPE))
    a = transform.draw(KEY, 27, -1, 1)
    a[0] = 0
    a = (a / np.abs(a).sum()).reshape(3, 3, 3)
    grids = np.meshgrid(*((np.arange(n) + 0.5) / n for n in SHAPE[1:]), indexing="ij")
    expected = 1.0 + 0.4 * sum(
        a[m] * np.prod([np.cos(np.pi * k * g) for k, g in zip(m, grids, strict=True)], axis=0)
        for m in itertools.product(range(3), repeat=3)
    )
    np.testing.assert_allclose(field, np.stack([expected] * 2), rtol=1e-13)
    assert 0.6 <= field.min() < field.max() <= 1.4


def test_noise_has_the_standard_deviation_it_draws_and_no_mean():
    shape = (1, 32, 32, 32)
    transform = Noise(sigma=0.5, seed=1)
    noise = changed([transform], np.zeros(shape), shape=shape)
    sigma = transform.draw(KEY, 1, 0, 0.5)[0]
    assert abs(noise.std() / sigma - 1) < 0.02 and abs(noise.mean()) < 0.025 * sigma
    assert abs(((noise / sigma) ** 4).mean() - 3) < 0.15


CUBE = (2, 6, 6, 6)


@pytest.mark.parametrize("dims", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("flips", list(itertools.product([False, True], repeat=3)), ids=str)
def test_a_block_of_a_turned_volume_is_one_hyperslab_of_the_stored_one(dims, flips):
    x = volume(shape=CUBE)
    turn = Orientation(dims, flips)
    turned = np.flip(x.transpose(0, *(1 + d for d in dims)), [1 + d for d in range(3) if flips[d]])
    np.testing.assert_array_equal(turn.apply(x), turned)
    for box in blocks(CUBE, (2, 2, 1, 3)):
        np.testing.assert_array_equal(turn.apply(x[cut(turn.source_box(CUBE, box))]), turned[cut(box)])


def test_orientations_compose():
    x = volume(shape=CUBE)
    kinds = [
        Orientation(dims, flips)
        for dims in itertools.permutations(range(3))
        for flips in itertools.product([False, True], repeat=3)
    ]
    for a, b in itertools.product(kinds[::5], kinds[::3]):
        np.testing.assert_array_equal(a.then(b).apply(x), b.apply(a.apply(x)))
    assert kinds[0] == Orientation.identity(3)


def test_flips_concern_the_dims_asked_for_with_the_probability_asked_for():
    flip = Flip(dims=(0, -1), probability=0.25, seed=2)
    drawn = np.array([flip.orientation(Key(i, 0), (8, 7, 9)).flips for i in range(1000)])
    assert not drawn[:, 1].any()
    np.testing.assert_allclose(drawn.mean(0), [0.25, 0, 0.25], atol=0.05)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 2])[0, 1]) < 0.1
    with pytest.raises(ValueError, match="spatial dim 3 of a sample with 3"):
        Flip(dims=(3,)).orientation(KEY, (8, 7, 9))


def test_all_orders_of_dims_occur_for_cubes_only():
    swap = SwapDims(seed=1)
    orders = [swap.orientation(Key(i, 0), (6, 6, 6)).dims for i in range(600)]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert min(counts) > 60 and sum(counts) == 600
    with pytest.raises(ValueError, match="dims of equal extent"):
        swap.orientation(KEY, (8, 7, 9))
