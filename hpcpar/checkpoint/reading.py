"""One checkpoint on disk: opened, verified, and its arrays read box by box. No MPI: any program may do it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcpar.checkpoint.manifest import ArrayInfo, CheckpointError, Manifest, Stored, StoredFile, load_manifest
from hpcpar.checkpoint.pieces import Box, overlap, slices, volume

PATIENCE_SECONDS = 3.0
"""How long a file may be invisible: another node's file appears late on network file systems."""


class Place(NamedTuple):
    """Where a piece is; `whole` files hold whole arrays."""

    path: Path
    piece: Stored
    whole: bool


class Checkpoint:
    """A finished checkpoint.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    step : int
    state : dict
    arrays : dict of str to StoredArray
        Whole arrays that are read when they are sliced.

    Raises
    ------
    CheckpointError
        When there is no readable manifest.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = load_manifest(self.path)
        self.step, self.state = self.manifest.step, self.manifest.state
        pieces: dict[str, list[Place]] = {name: [] for name in self.manifest.arrays}
        for file in self.manifest.files:
            for piece in file.pieces:
                pieces[piece.array].append(Place(self.path / file.name, piece, file.whole))
        self.arrays = {name: StoredArray(name, info, pieces[name]) for name, info in self.manifest.arrays.items()}

    def group(self, prefix: str) -> dict[str, StoredArray]:
        """Return the arrays whose names begin with ``prefix/``, without it."""
        start = prefix + "/"
        return {name[len(start) :]: array for name, array in self.arrays.items() if name.startswith(start)}

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Read every byte and compare checksums; or one of several equal shares of the files.

        Raises
        ------
        CheckpointError
            Names the file, the array, and what is wrong.
        """
        largest_first = sorted(self.manifest.files, key=lambda file: (-file.size, file.name))
        for file in largest_first[share::shares]:
            self._verify_file(file)
        if share == 0:
            self._verify_cover()

    def _verify_file(self, file: StoredFile) -> None:
        path = self.path / file.name
        size = _size(path)
        if size != file.size:
            raise CheckpointError(f"{path} has {size} bytes, {file.size} were written")
        if file.checksum is not None and zlib.crc32(path.read_bytes()) != file.checksum:
            raise CheckpointError(f"{path} is damaged: its checksum differs")
        for piece, data in _read(path, file.pieces, self.manifest.arrays, file.whole):
            if zlib.crc32(data.reshape(data.size).view(np.uint8)) != piece.checksum:
                raise CheckpointError(f"{path} is damaged: the checksum of {piece.array} {_shown(piece.box)} differs")

    def _verify_cover(self) -> None:
        for array in self.arrays.values():
            held = sum(volume(place.piece.box) for place in array.pieces)
            if held != prod(array.shape):
                raise CheckpointError(f"{self.path}: {held} of {prod(array.shape)} elements of {array.name} are there")


class StoredArray:
    """A whole array in a checkpoint; an index reads what it asks for and no more.

    Attributes
    ----------
    shape, dtype, ndim
    shown : tuple of int
        The shape under which torch knows it.
    """

    def __init__(self, name: str, info: ArrayInfo, pieces: list[Place]) -> None:
        self.name, self.info, self.pieces = name, info, pieces
        self.shape, self.ndim, self.dtype = info.shape, len(info.shape), np.dtype(info.dtype)
        self.shown = info.shown or info.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a box: slices with step 1, one for each leading dim; the rest is whole."""
        index = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        ranges = [s.indices(n) for s, n in zip(index, self.shape, strict=False)]
        if any(step != 1 for _, _, step in ranges):
            raise IndexError(f"{self.name}: slices of a stored array have step 1, got {index}")
        box = (*((start, max(start, stop)) for start, stop, _ in ranges), *((0, n) for n in self.shape[len(index) :]))
        return self.read(box)

    def read(self, box: Box) -> np.ndarray:
        """Return a box of the array, C-contiguous.

        Raises
        ------
        CheckpointError
            A file is missing or damaged, or pieces do not cover the box.
        """
        out = np.empty([stop - start for start, stop in box], self.dtype)
        found = 0
        for path, piece, whole in self.pieces:
            shared = overlap(box, piece.box) if box else ()
            if shared is None:
                continue
            for _, data in _read(path, [piece], {self.name: self.info}, whole, shared):
                out[slices(shared, box)] = data
            found += volume(shared)
        if found != volume(box):
            raise CheckpointError(f"{self.name} {_shown(box)}: {found} of {volume(box)} elements are in the checkpoint")
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[...] if dtype is None else self[...].astype(dtype)


def _read(
    path: Path, pieces: Iterable[Stored], arrays: Mapping[str, ArrayInfo], whole: bool, box: Box | None = None
) -> Iterable[tuple[Stored, np.ndarray]]:
    """Read pieces of one file, whole or the part of each that lies in `box`."""
    import h5py

    pieces = list(pieces)
    if not pieces:
        return
    try:
        _size(path)
        with h5py.File(path, "r", locking=False) as file:
            for piece in pieces:
                dataset = file[piece.path]
                info = arrays[piece.array]
                if dataset.dtype != np.dtype(info.dtype):
                    raise CheckpointError(f"{path} is damaged: {piece.array} is {dataset.dtype}, not {info.dtype}")
                wanted = slices(piece.box if box is None else box, None if whole else piece.box)
                yield piece, np.asarray(dataset[wanted], order="C")
    except (OSError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _size(path: Path, patience: float = PATIENCE_SECONDS) -> int:
    """Size of a file that another node may have made a moment ago."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{path} is missing") from None
            time.sleep(0.1)


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
