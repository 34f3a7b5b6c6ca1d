"""Event files: read back by the reader here, by TensorBoard itself where it is installed, and checked byte by byte."""

import struct

import pytest

from hpcpar.train.tensorboard import EventWriter, Scalar, crc32c, read_scalars

pytestmark = pytest.mark.serial


def written(folder):
    writer = EventWriter(folder)
    writer.add(1, {"loss": 0.5, "lr": 1e-3, "note": "text", "flag": True})
    writer.add(300, {"loss": 0.25, "samples": 12})
    return writer.path


def test_the_checksum_is_that_of_the_standard():
    # RFC 3720, appendix B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_what_is_written_is_read(tmp_path):
    path = written(tmp_path / "tensorboard")
    assert ".tfevents." in path.name  # by which TensorBoard finds it
    lr = struct.unpack("<f", struct.pack("<f", 1e-3))[0]
    assert list(read_scalars(path)) == [
        Scalar(1, "loss", 0.5), Scalar(1, "lr", lr), Scalar(300, "loss", 0.25), Scalar(300, "samples", 12.0)
    ]  # fmt: skip


def test_a_flipped_bit_and_a_cut_file_are_found(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    for at in (3, 9, 40, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            list(read_scalars(path))
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="is damaged"):
        list(read_scalars(path))


def test_two_writers_in_one_second_have_two_files(tmp_path):
    assert EventWriter(tmp_path).path != EventWriter(tmp_path).path


def test_tensorboard_reads_it(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    path = written(tmp_path)
    events = list(loader.RawEventFileLoader(str(path)).Load())
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    parsed = [event_pb2.Event.FromString(bytes(event)) for event in events]
    assert parsed[0].file_version == "brain.Event:2"
    shown = [(e.step, v.tag, v.simple_value) for e in parsed[1:] for v in e.summary.value]
    assert shown == [tuple(scalar) for scalar in read_scalars(path)]
