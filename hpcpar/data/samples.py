"""Samples in HDF5 files: what data sets of every form share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpcpar.data.handles import Handles

__all__ = ["Samples", "Source", "find_files"]

Source = str | os.PathLike | Iterable[str | os.PathLike]
Block = TypeVar("Block", bound=np.ndarray)
Self = TypeVar("Self", bound="Samples")
SUFFIXES = (".h5", ".hdf5", ".hdf")


class Samples:
    """Files in an order, each with a number of samples, read by any threads; base of the data sets.

    A subclass sets `_starts`: how many samples lie before each file, and how many there are.

    Parameters
    ----------
    source : path or sequence of paths
        As of `find_files`.
    handles : Handles, optional
        Files opened independently, by default.

    Attributes
    ----------
    paths : list of Path
    bytes_read : int
        Bytes delivered so far, over all threads, as stored.
    """

    _starts: np.ndarray

    def __init__(self, source: Source, handles: Handles | None = None):
        self.paths = find_files(source)
        self._handles = handles or Handles()
        self._lock = threading.Lock()
        self.bytes_read = 0

    def __len__(self) -> int:
        """Samples."""
        return int(self._starts[-1])

    def close(self) -> None:
        """Close all files of all threads of this process. Reading again opens them again."""
        self._handles.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _find(self, index: int) -> tuple[int, int]:
        """Number of the file of a sample, and of the sample in there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset with {len(self)} samples")
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        return place, int(index - self._starts[place])

    def _delivered(self, block: Block) -> Block:
        with self._lock:
            self.bytes_read += block.nbytes
        return block


def find_files(source: Source) -> list[Path]:
    """Return the HDF5 files that a source names.

    Parameters
    ----------
    source : path or sequence of paths
        A folder (its ``.h5``, ``.hdf5`` and ``.hdf`` files in name order), one file, or files in the given order.

    Raises
    ------
    FileNotFoundError
        There is none, or not the first of them.
    """
    if isinstance(source, (str, os.PathLike)):
        source = Path(source)
        if source.is_dir():
            found = sorted(p for p in source.iterdir() if p.suffix in SUFFIXES and not p.name.startswith("."))
            if not found:
                raise FileNotFoundError(f"folder {source} holds no HDF5 file ({', '.join(SUFFIXES)})")
            return found
        source = [source]
    paths = [Path(p) for p in source]
    if not paths:
        raise FileNotFoundError("an HDF5 dataset was asked for without any file")
    if not paths[0].exists():
        raise FileNotFoundError(f"no such file or folder: {paths[0]} (looked for HDF5 data; working in {Path.cwd()})")
    return paths
