"""HDF5 samples read by hyperslab: a rank reads the block its layout gives it, never a whole split sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.data.files import DataError
from hpcpar.data.handles import Handles
from hpcpar.data.orientation import Box
from hpcpar.data.samples import Samples, Source

__all__ = ["Box", "DataError", "HDF5Dataset"]

# Names of input and target in the formats that are recognised without being told.
KNOWN_PAIRS = (("full", "unitPar"), ("volume", "segmentation"), ("x", "y"))


class HDF5Dataset(Samples):
    """Samples in HDF5 files: one file a sample, or files that stack many samples along their first dim.

    Parameters
    ----------
    source : path or sequence of paths
        A folder (its ``.h5``, ``.hdf5`` and ``.hdf`` files in name order), one file, or files in the given order.
    input, target : str, optional
        Dataset names, ``group/name`` inside groups. By default the pair the first file holds: ``full`` (C, D, H, W) and
        ``unitPar`` (P,), ``volume`` (C, D, H, W) and ``segmentation`` (D, H, W), or ``x`` (N, ...) and ``y`` (N, ...).
    stacked : bool, optional
        True when dim 0 of both datasets counts samples. By default true for the names ``x`` and ``y`` only.
    channels : int, optional
        Channels the network takes: checked against dim 0 of each input.
    driver : {None, "mpio"}
        None opens files independently and read-only, which any h5py can do. "mpio" goes through MPI-IO, wants an h5py
        built with MPI and `comm`, and then every open is collective over `comm`.
    comm : mpi4py communicator, optional
        For ``driver="mpio"`` only: ranks that read the same files in the same order.
    max_open : int
        Most files one thread keeps open; the one used longest ago is closed first.

    Attributes
    ----------
    bytes_read : int
        Bytes delivered by `read` so far, over all threads, in the file's dtype.

    Raises
    ------
    FileNotFoundError
        A file or folder is missing.
    DataError
        A file is truncated or no HDF5, a dataset is missing or holds no real numbers, or a shape, dtype or channel
        count differs.

    Notes
    -----
    Handles belong to one thread of one process: a forked process opens its own, and none is shared. File locking is
    off, since files that are only read need none and network file systems often lack it; the environment variable
    HDF5_USE_FILE_LOCKING overrides this, as HDF5 defines.
    """

    def __init__(
        self,
        source: Source,
        input: str | None = None,
        target: str | None = None,
        *,
        stacked: bool | None = None,
        channels: int | None = None,
        driver: str | None = None,
        comm: Any = None,
        max_open: int = 16,
    ):
        super().__init__(source, Handles(driver, comm, max_open))
        self.input, self.target = self._names(input, target)
        self.stacked = self.input == "x" if stacked is None else stacked
        self._signature = {key: self._describe(self.paths[0], key) for key in (self.input, self.target)}
        self._starts = self._count_rows() if self.stacked else np.arange(len(self.paths) + 1)
        shape = self.shape(self.input)
        if channels is not None and shape[:1] != (channels,):
            raise DataError(
                f"{self.paths[0]}: dataset '{self.input}' has {shape[0] if shape else 'no'} channels (sample shape"
                f" {shape}, of which the first dim counts channels), the network takes {channels}"
            )

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one sample of dataset `key` (the samples' dim of stacked files is left out)."""
        return self._signature[key][0]

    def dtype(self, key: str) -> np.dtype:
        """dtype of dataset `key` in the files."""
        return self._signature[key][1]

    def where(self, index: int) -> tuple[Path, int | None]:
        """File of sample `index`, and its row in there (None where a file is one sample).

        Raises
        ------
        IndexError
            There are not so many samples.
        """
        place, row = self._find(index)
        return self.paths[place], row if self.stacked else None

    def read(self, index: int, key: str, box: Box | None = None) -> np.ndarray:
        """Read a block of one sample.

        Parameters
        ----------
        index : int
            Sample, in [0, len).
        key : str
            Dataset: `input` or `target`.
        box : tuple of (start, stop), optional
            One pair per dim of the sample, in global indices; may be empty. By default the whole sample.

        Returns
        -------
        array
            Of shape ``stop - start`` per dim, C-contiguous, in the file's dtype.

        Raises
        ------
        IndexError, ValueError
            No such sample, or a box that is not inside of it.
        DataError
            The file is not what the first one is, or cannot be read.
        """
        shape, dtype = self._signature[key]
        box = tuple((0, n) for n in shape) if box is None else tuple((int(a), int(b)) for a, b in box)
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
            raise ValueError(f"box {box} is not inside a sample of '{key}', shape {shape}")
        block = np.empty([b - a for a, b in box], dtype)
        if block.size == 0:
            return block
        path, row = self.where(index)
        dataset = self._dataset(path, key)
        self._check(path, key, dataset)
        where = tuple(slice(a, b) for a, b in box)
        try:
            dataset.read_direct(block, where if row is None else (row, *where))
        except OSError as error:
            raise DataError(f"{path}: reading dataset '{key}', block {box}, failed: {error}") from error
        return self._delivered(block)

    def verify(self) -> None:
        """Open every file and check names, shapes and dtypes; raises as `read` would, for the first bad file."""
        for path in self.paths:
            for key in (self.input, self.target):
                self._check(path, key, self._dataset(path, key))

    def __repr__(self) -> str:
        keys = ", ".join(f"{key} {shape} {dtype}" for key, (shape, dtype) in self._signature.items())
        return f"HDF5Dataset({len(self)} samples in {len(self.paths)} files: {keys})"

    def _names(self, input: str | None, target: str | None) -> tuple[str, str]:
        if input is not None and target is not None:
            return input, target
        held = set(self._handles.file(self.paths[0]))
        for pair in KNOWN_PAIRS:
            if input in (None, pair[0]) and target in (None, pair[1]) and held.issuperset(pair):
                return pair
        known = ", ".join(f"'{a}' and '{b}'" for a, b in KNOWN_PAIRS)
        raise DataError(f"{self.paths[0]} holds {sorted(held)}: none of the known pairs {known}; name input and target")

    def _dataset(self, path: Path, key: str):
        file = self._handles.file(path)
        dataset = file.get(key)
        if dataset is None:
            raise DataError(f"{path}: dataset '{key}' is missing; the file holds {sorted(file)}")
        if not hasattr(dataset, "read_direct"):
            within = ", ".join(f"'{key}/{name}'" for name in sorted(dataset)) or "nothing"
            raise DataError(f"{path}: '{key}' is a group that holds {within}; name a dataset")
        if dataset.dtype.kind not in "biuf":
            raise DataError(f"{path}: dataset '{key}' has dtype {dataset.dtype}; samples are real numbers")
        return dataset

    def _describe(self, path: Path, key: str) -> tuple[tuple[int, ...], np.dtype]:
        dataset = self._dataset(path, key)
        if self.stacked and dataset.ndim == 0:
            raise DataError(f"{path}: dataset '{key}' is a scalar; expected samples stacked along dim 0")
        return (dataset.shape[1:] if self.stacked else dataset.shape), dataset.dtype

    def _check(self, path: Path, key: str, dataset) -> None:
        shape, dtype = self._signature[key]
        found = dataset.shape[1:] if self.stacked else dataset.shape
        if found != shape or dataset.dtype != dtype:
            raise DataError(
                f"{path}: dataset '{key}' has shape {found} and dtype {dataset.dtype};"
                f" expected shape {shape} and dtype {dtype}, as in {self.paths[0]}"
            )

    def _count_rows(self) -> np.ndarray:
        counts = []
        for path in self.paths:
            rows = {key: self._dataset(path, key).shape[0] for key in (self.input, self.target)}
            if len(set(rows.values())) != 1:
                listed = " and ".join(f"{n} in '{key}'" for key, n in rows.items())
                raise DataError(f"{path}: different numbers of samples: {listed}")
            counts.append(rows[self.input])
        return np.concatenate([[0], np.cumsum(counts)])
