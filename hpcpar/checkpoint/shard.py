"""One rank's file: its pieces as contiguous HDF5 datasets, written at the speed of a plain write.

HDF5 lays the file out and says where each dataset's bytes lie; they are then written by the operating system's own
calls. The HDF5 library would hold Python's lock for the whole write, and training could not go on meanwhile.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpcpar.checkpoint.manifest import Stored, StoredFile
from hpcpar.checkpoint.pieces import Box

CHUNK_BYTES = 8 << 20
ALIGNMENT = 4096
QUEUED_PARTS = 4
TILE = (256, 8)


class Part(NamedTuple):
    """What a rank writes of one array: any memory order; the file has C order."""

    array: str
    box: Box
    data: np.ndarray


def write_shard(path: Path, parts: Sequence[Part], check: Callable[[Part], None] = lambda part: None) -> StoredFile:
    """Write one file and wait until it is on the disk.

    Parameters
    ----------
    path : Path
        Must not exist.
    parts : sequence of Part
        None of them empty.
    check : function
        Called with each part before it is written; what it raises is raised here.

    Raises
    ------
    OSError
        With the file's name: no space, no permission, a limit on the size of files.
    """
    names = _dataset_names(parts)
    try:
        places = _lay_out(path, names, parts)
        sums = _write_bytes(path, parts, places, check)
        size = path.stat().st_size
    except OSError as error:
        raise named(error, path) from error
    stored = tuple(Stored(p.array, p.box, name, checksum) for p, name, checksum in zip(parts, names, sums, strict=True))
    return StoredFile(path.name, size, stored)


def named(error: OSError, path: Path) -> OSError:
    """Return the error with the name of the file, which HDF5 and writes by number leave out."""
    if error.errno:
        return OSError(error.errno, os.strerror(error.errno), str(path))
    return OSError(f"{path}: {error}")


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _dataset_names(parts: Sequence[Part]) -> list[str]:
    """The array's name; with a number where a rank writes several parts of one array."""
    several = {p.array for i, p in enumerate(parts) if any(q.array == p.array for q in parts[:i])}
    count: dict[str, int] = {}
    names = []
    for part in parts:
        at = count[part.array] = count.get(part.array, -1) + 1
        names.append(f"{part.array}#{at}" if part.array in several else part.array)
    return names


def _lay_out(path: Path, names: Sequence[str], parts: Sequence[Part]) -> list[int]:
    """Create the file with all its datasets, without their values; returns the position of each one's bytes."""
    import h5py

    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    create.set_obj_track_times(False)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    places = []
    with h5py.File(path, "x", alignment_threshold=16 * ALIGNMENT, alignment_interval=ALIGNMENT) as file:
        for name, part in zip(names, parts, strict=True):
            kind = h5py.h5t.py_create(part.data.dtype, logical=True)
            space = h5py.h5s.create_simple(part.data.shape) if part.data.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, create, lcpl=link)
            h5py.Dataset(dataset).attrs["origin"] = [start for start, _ in part.box]
            places.append(dataset.get_offset())
    return places


def _write_bytes(path: Path, parts: Sequence[Part], places: Sequence[int], check: Callable[[Part], None]) -> list[int]:
    """Write the values; a second thread brings the next parts into the file's order and sums them up meanwhile.

    Both leave Python's lock to others nearly all the time.
    """
    sums: list[int] = []
    packed: queue.Queue = queue.Queue(QUEUED_PARTS)  # bounded: a part in another memory order is a copy
    stop = threading.Event()

    def pack() -> None:
        try:
            for part in parts:
                if stop.is_set():
                    return
                check(part)
                view = memoryview(in_file_order(part.data).reshape(part.data.size).view(np.uint8))
                checksum = 0
                for start in range(0, len(view), CHUNK_BYTES):
                    checksum = zlib.crc32(view[start : start + CHUNK_BYTES], checksum)
                sums.append(checksum)
                packed.put(view)
        except Exception as error:  # noqa: BLE001 (raised by the writer)
            packed.put(error)

    packer = threading.Thread(target=pack, name="hpcpar-pack", daemon=True)
    number = os.open(path, os.O_WRONLY)
    packer.start()
    try:
        for place in places:
            view = packed.get()
            if isinstance(view, Exception):
                raise view
            _write_at(number, view, place)
        os.fsync(number)
    finally:
        os.close(number)
        stop.set()
        while packer.is_alive():  # it may wait for room in the queue
            try:
                packed.get(timeout=0.01)
            except queue.Empty:
                continue
    return sums


def in_file_order(data: np.ndarray) -> np.ndarray:
    """Return an array in C order, a copy where it is not.

    Convolution weights lie kernel first and output channels last. Copied in tiles they go two to three times as fast
    where channels are powers of two: a row of the result would otherwise fetch all its numbers from the same few cache
    sets.
    """
    if data.flags.c_contiguous or data.ndim < 3:
        return np.asarray(data, order="C")
    result = np.empty(data.shape, data.dtype)
    rows, columns = TILE
    for i in range(0, data.shape[0], rows):
        for j in range(0, data.shape[1], columns):
            result[i : i + rows, j : j + columns] = data[i : i + rows, j : j + columns]
    return result


def _write_at(number: int, view: memoryview, place: int) -> None:
    """Write bytes at a place, and let the disk begin with each chunk while the next is prepared."""
    done = 0
    while done < len(view):
        count = os.pwrite(number, view[done : done + CHUNK_BYTES], place + done)
        if hasattr(os, "posix_fadvise"):  # what is not needed any more is written back at once (Linux)
            os.posix_fadvise(number, place + done, count, os.POSIX_FADV_DONTNEED)
        done += count
