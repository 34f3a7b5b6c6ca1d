"""Metrics as TensorBoard event files, written without TensorFlow.

A file is a row of records: length (8 bytes) and its checksum (4), the data and its checksum (4), little-endian; the
checksum is the masked CRC-32C of the TFRecord format. The data of each record is one Event message of protocol buffers,
of which the few fields that scalars need are put together here: wall_time = 1 (double), step = 2 (int64),
file_version = 3 (string), summary = 5, in it value = 1 with tag = 1 (string) and simple_value = 2 (float).
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_made = itertools.count()


def _table() -> tuple[int, ...]:
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class EventWriter:
    """Appends scalars to one event file in a folder; every record is on the disk when `add` returns.

    Parameters
    ----------
    folder : path
        Made where it is missing. TensorBoard shows all files of a folder as one run, so a run that goes on adds one.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        unique = f"{os.getpid()}.{next(_made)}"
        self.path = folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{unique}"
        self._append(_number(1, now) + _bytes(3, b"brain.Event:2"))

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the numbers among `figures` under their names, as of this step."""
        values = b"".join(
            _bytes(1, _bytes(1, name.encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in figures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        self._append(_number(1, time.time()) + b"\x10" + _varint(step) + _bytes(5, values))

    def _append(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        with open(self.path, "ab") as file:
            file.write(length + _masked(length) + data + _masked(data))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


class Scalar(NamedTuple):
    """One value of an event file."""

    step: int
    tag: str
    value: float


def read_scalars(path: str | Path) -> Iterator[Scalar]:
    """Yield the scalars of an event file in order.

    Raises
    ------
    ValueError
        A checksum is wrong, or the file is cut.
    """
    data, at = Path(path).read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event, end = data[at + 12 : at + 12 + size], at + 16 + size
        sums = data[at + 8 : at + 12] + data[end - 4 : end]
        if end > len(data) or _masked(data[at : at + 8]) + _masked(event) != sums:
            raise ValueError(f"{path}: the record at byte {at} is damaged")
        fields = dict(_fields(event))
        for number, value in _fields(fields.get(5, b"")):
            if number == 1:
                entry = dict(_fields(value))
                yield Scalar(fields.get(2, 0), entry[1].decode(), struct.unpack("<f", entry[2])[0])
        at = end


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and content of the fields of a message; numbers of fixed width as they are stored."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind, size = key & 7, {1: 8, 5: 4}.get(key & 7)
        if kind == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if size is None:
            size, at = _read_varint(data, at)
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not byte & 0x80:
            return value, at
