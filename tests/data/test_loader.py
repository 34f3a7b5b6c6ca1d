"""Local blocks of global batches: put together they are the batches of one process, for any partition."""

import h5py
import numpy as np
import pytest

from hpcpar.data import BiasField, DataError, Flip, HDF5Dataset, Loader, Noise, Position, Sampler, ScaleShift
from hpcpar.layout.blocks import owned

pytestmark = pytest.mark.serial

SAMPLES, SPATIAL = 7, (6, 5, 8)
TRANSFORMS = [Flip((0, 2), seed=1), ScaleShift(seed=2), BiasField(seed=3), Flip((1, 2), seed=4), Noise(seed=5)]


@pytest.fixture
def volumes(tmp_path):
    """Seven volumes whose labels are a function of the intensity, so that a wrong pairing shows."""
    rng = np.random.default_rng(1)
    for i in range(SAMPLES):
        labels = rng.integers(0, 4, SPATIAL).astype(np.uint8)
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file["volume"] = (labels + i / 10)[None].astype(np.float32)
            file["segmentation"] = labels
    return HDF5Dataset(tmp_path)


def boxes(parts, place):
    """(input_box, target_box) of the rank at `place` of a grid over batch, depth, height, width."""

    def box(shape):
        dims = (0, *range(len(shape) - 3, len(shape)))  # the sample's dim and the spatial ones
        found = [(0, n) for n in shape]
        for d, p, r in zip(dims, parts, place, strict=True):
            found[d] = owned(shape[d], p, r)
        return tuple(found)

    return box, box


def cut(box):
    return tuple(slice(a, b) for a, b in box)


@pytest.mark.parametrize(
    "parts", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (1, 1, 2, 3), (4, 7, 1, 1)], ids=str
)
def test_blocks_of_all_ranks_make_up_the_batches_of_one_process(volumes, parts):
    sampler = Sampler(SAMPLES, 3, seed=6)
    serial = list(Loader(volumes, sampler, transforms=TRANSFORMS, depth=0))
    assert [b.input_shape[0] for b in serial] == [3, 3, 1]
    for place in np.ndindex(*parts):
        of_input, of_target = boxes(parts, place)
        before = volumes.bytes_read
        batches = list(Loader(volumes, sampler, of_input, of_target, TRANSFORMS))
        owned_bytes = 0
        for batch, whole in zip(batches, serial, strict=True):
            assert batch.input_shape == whole.input.shape and batch.target_shape == whole.target.shape
            np.testing.assert_array_equal(batch.indices, whole.indices)
            np.testing.assert_array_equal(batch.input, whole.input[cut(of_input(batch.input_shape))])
            np.testing.assert_array_equal(batch.target, whole.target[cut(of_target(batch.target_shape))])
            owned_bytes += batch.input.nbytes + batch.target.nbytes
        assert volumes.bytes_read - before == owned_bytes


def test_labels_turn_with_the_volume(volumes):
    loader = Loader(volumes, Sampler(SAMPLES, 2, seed=3), transforms=[Flip((0, 1, 2), seed=9)])
    turned = 0
    for batch in loader:
        for x, y, index in zip(batch.input, batch.target, batch.indices, strict=True):
            np.testing.assert_allclose(x[0], y + index / 10, rtol=1e-6)
            turned += not np.array_equal(y, volumes.read(int(index), "segmentation"))
    assert turned >= 4


def test_arrays_lie_channels_last_and_have_the_asked_dtype(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["full"] = np.arange(3 * 4**3, dtype=np.int16).reshape(3, 4, 4, 4)
        file["unitPar"] = np.ones(4, np.float32)
    (batch,) = Loader(HDF5Dataset(tmp_path), Sampler(1, 1), dtype=np.float64)
    assert batch.input.dtype == batch.target.dtype == np.float64
    assert batch.input.transpose(0, 2, 3, 4, 1).flags.c_contiguous
    assert batch.input[0, 2, 3, 1, 0] == 2 * 64 + 3 * 16 + 4
    assert batch.target_shape == (1, 4)


def test_integer_labels_keep_their_dtype_unless_told(volumes):
    sampler = Sampler(SAMPLES, 7)
    assert next(iter(Loader(volumes, sampler))).target.dtype == np.uint8
    assert next(iter(Loader(volumes, sampler, target_dtype=np.int64))).target.dtype == np.int64


@pytest.mark.parametrize("wrong", [0.5, np.nan, np.inf, -np.inf])
def test_labels_stored_as_floats_are_whole_numbers(tmp_path, wrong):
    labels = np.arange(64.0).reshape(4, 4, 4)
    for name, label in (("0", 5.0), ("1", wrong)):
        labels[1, 2, 3] = label
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["volume"], file["segmentation"] = np.ones((1, 4, 4, 4), np.float32), labels
    batches = iter(Loader(HDF5Dataset(tmp_path), Sampler(2, 1, shuffle=False), target_dtype=np.int64))
    assert next(batches).target[0, 1, 2, 3] == 5
    with pytest.raises(DataError, match=f"sample 1: 'segmentation' holds {wrong}; labels are whole numbers"):
        next(batches)


def test_the_position_follows_the_consumer_and_resumes_exactly(volumes):
    sampler = Sampler(SAMPLES, 2, seed=8)
    unbroken = Loader(volumes, sampler, transforms=TRANSFORMS)
    stream = unbroken.stream()
    batches = [next(stream) for _ in range(9)]
    assert unbroken.position == Position(2, 2) and unbroken.samples_seen == 16
    unbroken.close()

    resumed = Loader(volumes, sampler, transforms=TRANSFORMS)
    resumed.position = batches[4].after
    stream = resumed.stream()
    for expected in batches[5:]:
        batch = next(stream)
        np.testing.assert_array_equal(batch.input, expected.input)
        np.testing.assert_array_equal(batch.indices, expected.indices)
    resumed.close()


def test_each_iteration_is_one_epoch_with_new_draws(volumes):
    loader = Loader(volumes, Sampler(SAMPLES, 3, seed=1), transforms=[Noise(seed=2)])
    first, second = list(loader), list(loader)
    assert loader.position == Position(2, 0) and len(first) == len(second) == len(loader) == 3
    one, two = ({int(i): x for b in e for i, x in zip(b.indices, b.input, strict=True)} for e in (first, second))
    assert sorted(one) == sorted(two) == list(range(SAMPLES))
    assert all(not np.array_equal(one[i], two[i]) for i in range(SAMPLES))


def test_a_bad_file_stops_the_consumer_with_its_name(volumes):
    path = volumes.paths[4]
    path.write_bytes(path.read_bytes()[:900])
    loader = Loader(volumes, Sampler(SAMPLES, 1, shuffle=False))
    with pytest.raises(DataError, match="4.h5"):
        list(loader)
    assert loader.position == Position(0, 4)


def test_a_sampler_of_another_size_is_refused(volumes):
    with pytest.raises(ValueError, match="counts 8 samples, the dataset holds 7"):
        Loader(volumes, Sampler(8, 2))
