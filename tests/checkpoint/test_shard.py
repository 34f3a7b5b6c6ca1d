"""One rank's file: values in any memory order, several parts of one array, errors with the file's name."""

import os
import zlib

import h5py
import numpy as np
import pytest

from hpcpar.checkpoint.shard import Part, in_file_order, write_shard

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (300, 20, 3), (5, 17, 3, 2, 3), (2, 1, 1, 1, 300)])
def test_any_memory_order_becomes_c_order(shape):
    value = np.random.default_rng(0).normal(size=shape)
    for axes in (tuple(range(len(shape))), tuple(reversed(range(len(shape))))):
        memory = np.ascontiguousarray(value.transpose(axes)).reshape([shape[a] for a in axes])
        data = memory.transpose(np.argsort(axes).astype(int).tolist())
        ordered = in_file_order(data)
        assert ordered.flags.c_contiguous
        np.testing.assert_array_equal(ordered, value, strict=True)


def test_parts_of_one_array_have_names_and_origins(tmp_path):
    value = np.arange(60.0).reshape(12, 5)
    parts = [Part("model/w", ((0, 4), (0, 5)), value[0:4]), Part("model/w", ((8, 12), (0, 5)), value[8:12])]
    parts.append(Part("model/flag", ((0, 3),), np.array([True, False, True])))
    stored = write_shard(tmp_path / "s.h5", parts)
    assert [p.path for p in stored.pieces] == ["model/w#0", "model/w#1", "model/flag"]
    assert stored.size == (tmp_path / "s.h5").stat().st_size
    with h5py.File(tmp_path / "s.h5") as file:
        np.testing.assert_array_equal(file["model/w#1"][...], value[8:12])
        assert file["model/w#1"].attrs["origin"].tolist() == [8, 0]
        np.testing.assert_array_equal(file["model/flag"][...], [True, False, True])
    assert stored.pieces[1].checksum == zlib.crc32(value[8:12].tobytes())


def test_many_large_parts_and_an_error_in_the_middle(tmp_path):
    parts = [Part(f"x{i}", ((0, 50_000),), np.full(50_000, float(i))) for i in range(12)]

    def check(part):
        if part.array == "x7":
            raise FloatingPointError("x7 is not finite")

    with pytest.raises(FloatingPointError, match="x7"):
        write_shard(tmp_path / "broken.h5", parts, check)
    stored = write_shard(tmp_path / "whole.h5", parts)
    assert [p.checksum for p in stored.pieces] == [zlib.crc32(p.data.tobytes()) for p in parts]


def test_errors_name_the_file(tmp_path):
    part = Part("x", ((0, 3),), np.zeros(3))
    write_shard(tmp_path / "s.h5", [part])
    with pytest.raises(OSError, match="s.h5"):  # it must not exist
        write_shard(tmp_path / "s.h5", [part])
    with pytest.raises(OSError, match=os.path.join("nowhere", "s.h5")):
        write_shard(tmp_path / "nowhere" / "s.h5", [part])
