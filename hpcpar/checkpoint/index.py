"""The index file: every array as one whole dataset, whatever the files that hold its pieces.

The datasets are virtual (HDF5 1.10): any program that reads HDF5 sees whole arrays in torch's shapes. The file is a
window for people and other programs; loading reads the pieces themselves, since HDF5 shows zeros where a file of a
virtual dataset is missing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.checkpoint import manifest
from hpcpar.checkpoint.folder import Folder
from hpcpar.checkpoint.manifest import ArrayInfo, Manifest, Stored, StoredFile
from hpcpar.checkpoint.pieces import slices
from hpcpar.checkpoint.shard import named

NAME = "index.h5"


def seal(
    folder: Folder,
    step: int,
    arrays: Mapping[str, ArrayInfo],
    files: Sequence[StoredFile],
    scalars: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Finish a checkpoint whose shards are on the disk: index, manifest, and its name. One rank alone calls it.

    Raises
    ------
    OSError
        With the name of the file.
    """
    aside = folder.aside(step)
    try:
        files = [*files, write_index(aside, arrays, files, scalars, state)]
        path = aside / manifest.NAME
        path.write_text(Manifest(step, dict(state), dict(arrays), tuple(files)).dumps(), encoding="utf-8")
        sealed(path)
        return folder.publish(step, keep)
    except OSError as error:
        raise error if error.filename else named(error, aside) from error


def write_index(
    folder: Path,
    arrays: Mapping[str, ArrayInfo],
    files: Sequence[StoredFile],
    scalars: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
) -> StoredFile:
    """Write ``index.h5`` beside the shards and wait until it is on the disk.

    Parameters
    ----------
    scalars : mapping
        Values of the 0-dim arrays, which HDF5 cannot make virtual.
    state : mapping
        Shown as attributes of the root: numbers and texts as they are, the rest as JSON.
    """
    import h5py

    path = folder / NAME
    pieces: dict[str, list[tuple[StoredFile, Stored]]] = {}
    for file in files:
        for piece in file.pieces:
            pieces.setdefault(piece.array, []).append((file, piece))
    with h5py.File(path, "x") as index:
        for name, info in arrays.items():
            dtype = np.dtype(info.dtype)
            if not info.shape or 0 in info.shape:
                index.create_dataset(name, info.shape, dtype, data=scalars.get(name))
            else:
                layout = h5py.VirtualLayout(info.shape, dtype)
                for source, piece in pieces[name]:
                    box = slices(piece.box)
                    extent = info.shape if source.whole else tuple(stop - start for start, stop in piece.box)
                    dataset = h5py.VirtualSource(source.name, piece.path, extent, dtype)
                    layout[box] = dataset[box] if source.whole else dataset
                index.create_virtual_dataset(name, layout)
            if info.shown is not None:
                index[name].attrs["torch_shape"] = info.shown
        describe(index, state)
    return sealed(path)


def describe(file: Any, state: Mapping[str, Any]) -> None:
    """Show the state as attributes of the root of an open file."""
    for key, value in state.items():
        plain = isinstance(value, (int, float, str))
        file.attrs[key] = value if plain else json.dumps(value)


def sealed(path: Path) -> StoredFile:
    """Wait until a small finished file is on the disk; returns its entry with a checksum of all its bytes."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        content = file.read()
    return StoredFile(path.name, len(content), (), zlib.crc32(content))
