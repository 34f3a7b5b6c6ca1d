"""Blocks of HDF5 samples: equal to slices of the whole, read with their own bytes, with clear errors."""

import multiprocessing
import os
import threading

import h5py
import numpy as np
import pytest

from hpcpar.data import DataError, HDF5Dataset
from hpcpar.layout.blocks import owned

pytestmark = pytest.mark.serial


def write(path, **datasets):
    with h5py.File(path, "w") as file:
        for name, value in datasets.items():
            file[name] = value


@pytest.fixture
def universes(tmp_path):
    """Three files with `full` and `unitPar`, and their contents."""
    rng = np.random.default_rng(5)
    full = rng.integers(0, 900, (3, 2, 7, 5, 6)).astype(np.int16)
    parameters = rng.random((3, 4), dtype=np.float32)
    for i in range(3):
        write(tmp_path / f"universe-{i}.h5", full=full[i], unitPar=parameters[i])
    return tmp_path, full, parameters


def test_a_folder_of_universes_is_read_in_name_order(universes):
    folder, full, parameters = universes
    data = HDF5Dataset(folder)
    assert (len(data), data.input, data.target) == (3, "full", "unitPar")
    assert data.shape("full") == (2, 7, 5, 6) and data.dtype("full") == np.int16
    for i in range(3):
        np.testing.assert_array_equal(data.read(i, "full"), full[i])
        np.testing.assert_array_equal(data.read(i, "unitPar"), parameters[i])


@pytest.mark.parametrize("parts", [(1, 2, 1), (3, 1, 1), (2, 2, 3), (1, 7, 1)], ids=str)
def test_blocks_of_any_partition_fit_together(universes, parts):
    folder, full, _ = universes
    data = HDF5Dataset(folder)
    found = np.zeros_like(full[1])
    for place in np.ndindex(*parts):
        inner = tuple(owned(n, p, r) for n, p, r in zip((7, 5, 6), parts, place, strict=True))
        where = (slice(None), *(slice(a, b) for a, b in inner))
        found[where] += data.read(1, "full", ((0, 2), *inner))
    np.testing.assert_array_equal(found, full[1])
    assert data.bytes_read == full[1].nbytes


def test_an_empty_block_reads_nothing(universes):
    data = HDF5Dataset(universes[0])
    assert data.read(0, "full", ((0, 2), (3, 3), (0, 5), (0, 6))).shape == (2, 0, 5, 6)
    assert data.bytes_read == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts the read calls of Linux")
def test_half_a_sample_costs_half_of_the_bytes_from_the_file_system(tmp_path):
    volume = np.arange(4 * 64**3, dtype=np.float32).reshape(4, 64, 64, 64)
    for name in ("half", "whole"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.h5", full=volume, unitPar=np.zeros(4, np.float32))

    def bytes_from_read_calls():
        with open("/proc/self/io") as file:
            return int(file.read().split()[1])

    def cost(data, box):
        data.read(0, "unitPar")  # opens the file
        before = bytes_from_read_calls()
        data.read(0, "full", box)
        return bytes_from_read_calls() - before

    whole = cost(HDF5Dataset(tmp_path / "whole"), None)
    half = cost(HDF5Dataset(tmp_path / "half"), ((0, 4), (32, 64), (0, 64), (0, 64)))
    assert volume.nbytes <= whole < 1.02 * volume.nbytes
    assert half < 0.52 * whole


def test_volumes_with_labels_and_stacked_samples_are_recognised(tmp_path):
    volume = np.random.default_rng(0).random((1, 4, 3, 2), dtype=np.float32)
    labels = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    write(tmp_path / "brain.h5", volume=volume, segmentation=labels)
    data = HDF5Dataset(tmp_path / "brain.h5")
    assert (len(data), data.input, data.target, data.stacked) == (1, "volume", "segmentation", False)
    np.testing.assert_array_equal(data.read(0, "segmentation", ((1, 3), (0, 3), (1, 2))), labels[1:3, :, 1:2])

    x = np.arange(7 * 2 * 3, dtype=np.float64).reshape(7, 2, 3)
    write(tmp_path / "first.h5", x=x[:5], y=np.arange(5))
    write(tmp_path / "second.h5", x=x[5:], y=np.arange(5, 7))
    data = HDF5Dataset([tmp_path / "first.h5", tmp_path / "second.h5"])
    assert len(data) == 7 and data.shape("x") == (2, 3) and data.shape("y") == ()
    for i in range(7):
        np.testing.assert_array_equal(data.read(i, "x", ((0, 2), (1, 3))), x[i, :, 1:])
        assert data.read(i, "y") == i
    with pytest.raises(IndexError, match="sample 7 of a dataset with 7"):
        data.read(7, "x")


def test_a_missing_file_is_named(universes):
    folder = universes[0]
    data = HDF5Dataset([folder / "universe-0.h5", folder / "gone.h5"])
    with pytest.raises(FileNotFoundError, match="gone.h5 does not exist"):
        data.read(1, "full")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        HDF5Dataset(folder / "nowhere")
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no HDF5 file"):
        HDF5Dataset(folder / "empty")


@pytest.mark.parametrize("left", [0, 100, 700, 2000], ids="{} bytes left".format)
def test_a_truncated_file_is_named(universes, left):
    folder = universes[0]
    path = folder / "universe-1.h5"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataError, match=rf"universe-1.h5 \({left} bytes\) is truncated or no HDF5 file"):
        HDF5Dataset(folder).read(1, "full")


def test_wrong_datasets_are_named_with_what_was_expected_and_found(universes):
    folder, full, parameters = universes
    with pytest.raises(DataError, match=r"universe-0.h5: dataset 'full' has 2 channels .* the network takes 4"):
        HDF5Dataset(folder, channels=4)
    with pytest.raises(DataError, match=r"dataset 'density' is missing; the file holds \['full', 'unitPar'\]"):
        HDF5Dataset(folder, input="density", target="unitPar")
    write(folder / "universe-2.h5", full=full[2, :, :-1], unitPar=parameters[2])
    with pytest.raises(DataError, match=r"universe-2.h5: dataset 'full' has shape \(2, 6, 5, 6\).*\(2, 7, 5, 6\)"):
        HDF5Dataset(folder).read(2, "full", ((0, 1), (0, 1), (0, 1), (0, 1)))
    with pytest.raises(DataError, match="universe-2.h5"):
        HDF5Dataset(folder).verify()
    write(folder / "universe-0.h5", other=full[0])
    with pytest.raises(DataError, match=r"universe-0.h5 holds \['other'\]: none of the known pairs"):
        HDF5Dataset(folder)


@pytest.mark.parametrize("kind", ["S3", "c8", "O"])
def test_samples_that_are_no_real_numbers_are_refused_before_they_are_read(universes, kind):
    folder, full, parameters = universes
    value = {"S3": np.array([b"abc"]), "c8": full[0].astype("c8"), "O": "text"}[kind]
    write(folder / "universe-0.h5", full=value, unitPar=parameters[0])
    with pytest.raises(DataError, match="universe-0.h5: dataset 'full' has dtype .*real numbers"):
        HDF5Dataset(folder)


def test_datasets_may_lie_in_groups_and_a_group_is_told_from_a_dataset(universes):
    folder, full, parameters = universes
    write(folder / "universe-0.h5", **{"raw/full": full[0], "raw/parameters": parameters[0]})
    data = HDF5Dataset(folder / "universe-0.h5", "raw/full", "raw/parameters")
    np.testing.assert_array_equal(data.read(0, "raw/full"), full[0])
    with pytest.raises(DataError, match="'raw' is a group that holds 'raw/full', 'raw/parameters'"):
        HDF5Dataset(folder, "raw", "raw/parameters")


@pytest.mark.parametrize("shape", [(), (5, 4, 3)])
def test_a_volume_without_channels_is_told_what_its_first_dim_counts(universes, shape):
    folder, _, parameters = universes
    write(folder / "universe-0.h5", full=np.ones(shape), unitPar=parameters[0])
    with pytest.raises(DataError, match="of which the first dim counts channels.*takes 1"):
        HDF5Dataset(folder, channels=1)


def test_a_box_outside_of_the_sample_is_refused(universes):
    data = HDF5Dataset(universes[0])
    for box in [((0, 2), (0, 8), (0, 5), (0, 6)), ((0, 2), (3, 2), (0, 5), (0, 6)), ((0, 2), (0, 7))]:
        with pytest.raises(ValueError, match="is not inside a sample"):
            data.read(0, "full", box)


def test_parallel_hdf5_is_refused_by_a_serial_build(universes):
    if h5py.get_config().mpi:
        pytest.skip("this h5py is built with MPI")
    with pytest.raises(ValueError, match="needs an h5py built with MPI, and h5py .* here is serial"):
        HDF5Dataset(universes[0], driver="mpio")
    with pytest.raises(ValueError, match="'mpi-posix' is not known"):
        HDF5Dataset(universes[0], driver="mpi-posix")


def test_a_bounded_number_of_files_stays_open(tmp_path):
    for i in range(12):
        write(tmp_path / f"{i:02}.h5", full=np.full((1, 2, 2, 2), i), unitPar=np.zeros(1))
    data = HDF5Dataset(tmp_path, max_open=3)
    for i in [*range(12), 3, 11, 0]:
        assert (data.read(i, "full") == i).all()
        assert len(data._handles._mine()) <= 3
    data.close()
    assert (data.read(4, "full") == 4).all()


def test_threads_read_right_samples_at_the_same_time(universes):
    folder, full, _ = universes
    data = HDF5Dataset(folder, max_open=1)
    wrong = []

    def work(start):
        for k in range(40):
            i = (start + k) % 3
            if not np.array_equal(data.read(i, "full"), full[i]):
                wrong.append((start, i))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert data.bytes_read == 4 * 40 * full[0].nbytes
    data.close()


def _compare(data, full, out):
    out.put([bool(np.array_equal(data.read(i, "full"), full[i])) for i in (2, 0, 1, 2)])


def test_a_forked_process_opens_its_own_handles(universes):
    folder, full, _ = universes
    data = HDF5Dataset(folder)
    data.read(0, "full")
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    children = [context.Process(target=_compare, args=(data, full, out)) for _ in range(2)]
    for child in children:
        child.start()
    np.testing.assert_array_equal(data.read(1, "full"), full[1])
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert [out.get(), out.get()] == [[True] * 4] * 2
