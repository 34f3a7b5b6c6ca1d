"""Batches as tensors: under any mesh and layout the same logical arrays, read without a message."""

import h5py
import numpy as np
import pytest

import hpcpar as hp
from hpcpar.data import Batches, HDF5Dataset, Position, make_transforms
from hpcpar.transport.counter import counter

SAMPLES, SPATIAL = 5, (6, 4, 7)
SPLIT = hp.Layout("batch", None, "depth", "height", None)
MESHES = [{"batch": -1}, {"depth": -1}, {"height": -1}, {"batch": -1, "depth": 1}, {"model": -1}, {"width": -1}]


def shared_dataset(folder, comm, make_sample):
    """Files that rank 0 writes and all ranks read."""
    if comm.rank == 0:
        for i in range(SAMPLES):
            with h5py.File(folder / f"{i}.h5", "w") as file:
                for name, value in make_sample(np.random.default_rng(i)).items():
                    file[name] = value
    comm.barrier()
    return HDF5Dataset(folder)


@pytest.fixture
def volumes(shared_path, comm):
    return shared_dataset(
        shared_path,
        comm,
        lambda rng: {
            "volume": rng.random((2, *SPATIAL), dtype=np.float32),
            "segmentation": rng.integers(0, 4, SPATIAL).astype(np.uint8),
        },
    )


@pytest.fixture
def universes(shared_path, comm):
    return shared_dataset(
        shared_path,
        comm,
        lambda rng: {
            "full": rng.random((2, *SPATIAL), dtype=np.float32),
            "unitPar": rng.random(4, dtype=np.float32),
        },
    )


@pytest.fixture(params=MESHES, ids=str)
def mesh(request):
    mesh = hp.Mesh(**request.param)
    yield mesh
    mesh.free()


def fitting(layout, mesh):
    """The layout without the axes that the mesh does not have."""
    return hp.Layout(*(tuple(a for a in layout.entry(d) if a in mesh.shape) for d in range(5)))


def transforms():
    return make_transforms(flip=(0, 1, 2), gamma=0.3, bias=0.2, scale=0.1, shift=0.1, noise=0.1, seed=7)


def arrays(batches):
    return [(x.numpy(), y.numpy()) for x, y in batches]


def test_volumes_and_labels_are_the_same_under_every_mesh(volumes, mesh):
    alone = hp.Mesh(everybody=-1)  # nothing is split over this axis: each rank reads all
    expected = arrays(Batches(volumes, 2, mesh=alone, seed=4, transforms=transforms()))
    alone.free()
    assert [len(x) for x, _ in expected] == [2, 2, 1]

    with Batches(volumes, 2, fitting(SPLIT, mesh), mesh=mesh, seed=4, transforms=transforms()) as batches:
        before = volumes.bytes_read
        with counter.counting() as sent:
            pairs = list(batches)
        assert not sent
        local = sum(x.shard.nbytes + y.shard.nbytes for x, y in pairs)
        assert volumes.bytes_read - before == local
        for (x, y), (whole_x, whole_y) in zip(pairs, expected, strict=True):
            assert y.layout == hp.Layout(*(x.layout.entry(d) for d in (0, 2, 3, 4)))
            np.testing.assert_array_equal(x.numpy(), whole_x)
            np.testing.assert_array_equal(y.numpy(), whole_y)


def test_a_split_sample_is_never_read_whole(volumes):
    mesh = hp.Mesh(depth=-1)
    before = volumes.bytes_read
    with Batches(volumes, SAMPLES, hp.Layout(None, None, "depth"), mesh=mesh) as batches:
        list(batches)
    mine = (mesh.index("depth") + 1) * 6 // mesh.shape["depth"] - mesh.index("depth") * 6 // mesh.shape["depth"]
    assert volumes.bytes_read - before == SAMPLES * mine * 4 * 7 * (2 * 4 + 1)
    mesh.free()


def test_parameters_of_universes_are_split_by_samples_only(universes, mesh):
    with Batches(universes, 3, fitting(SPLIT, mesh), mesh=mesh, shuffle=False) as batches:
        found = [y for _, y in batches]
    assert all(y.layout.axes == ("batch",) or not y.layout.axes for y in found)
    expected = [universes.read(i, "unitPar") for i in range(SAMPLES)]
    np.testing.assert_array_equal(np.concatenate([y.numpy() for y in found]), expected)


def test_by_default_samples_are_split_over_the_batch_axis(volumes):
    with hp.Mesh(batch=-1) as mesh, Batches(volumes, 4) as batches:
        x, _ = next(iter(batches))
        assert x.mesh is mesh and x.layout == hp.Layout("batch").on(x.shape, mesh.shape)
    mesh.free()


def test_resuming_goes_on_with_the_next_sample_even_with_another_batch_size(volumes):
    mesh = hp.Mesh(batch=-1)
    with Batches(volumes, 2, mesh=mesh, seed=9, transforms=transforms()) as batches:
        stream = batches.stream()
        unbroken = [next(stream)[0].numpy() for _ in range(6)]
        assert batches.samples_seen == 10
    with Batches(volumes, 3, mesh=mesh, seed=9, transforms=transforms()) as batches:
        batches.position = Position(0, 4)
        stream = batches.stream()
        resumed = [next(stream)[0].numpy() for _ in range(3)]
    np.testing.assert_array_equal(np.concatenate(resumed), np.concatenate(unbroken[2:6]))
    mesh.free()


def test_a_layout_that_does_not_fit_is_refused_at_once(volumes):
    mesh = hp.Mesh(batch=-1)
    with pytest.raises(hp.LayoutError, match="6 entries"):
        Batches(volumes, 2, hp.Layout(None, None, None, None, None, "batch"), mesh=mesh)
    with pytest.raises(hp.LayoutError, match="depth"):
        Batches(volumes, 2, hp.Layout("batch", None, "depth"), mesh=mesh)
    mesh.free()


def test_local_arrays_pass_through_the_transfer(volumes):
    mesh = hp.Mesh(batch=-1)
    with Batches(volumes, 2, mesh=mesh, transfer=lambda a: a * 2, target_dtype=np.int64, dtype=np.float64) as batches:
        x, y = next(iter(batches))
    first = batches.loader.sampler.order(0)[:2]
    np.testing.assert_array_equal(x.numpy(), 2.0 * np.stack([volumes.read(int(i), "volume") for i in first]))
    assert x.dtype == np.float64 and y.dtype == np.int64
    mesh.free()
