"""All ranks write one file together, through an HDF5 library that was built with MPI.

For file systems that prefer one large file to many. It is a collective of all ranks: nothing else goes on meanwhile.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpcpar.checkpoint.manifest import ArrayInfo, Stored, StoredFile
from hpcpar.checkpoint.pieces import slices
from hpcpar.checkpoint.shard import Part, named
from hpcpar.transport import Comm

NAME = "arrays.h5"
PIECE_BYTES = 1 << 30
"""Largest write at once: the MPI under HDF5 counts bytes in 32 bits."""


def require_parallel_hdf5() -> None:
    """Raise ValueError where h5py cannot write from several ranks at once."""
    import h5py

    if not h5py.get_config().mpi:
        raise ValueError(
            f"checkpoint.one_file needs an h5py built with MPI, and h5py {h5py.__version__} here is serial. Without "
            "the key each rank writes its own file, and index.h5 shows them as one; or build h5py with HDF5_MPI=ON"
        )


def write_together(path: Path, comm: Comm, arrays: Mapping[str, ArrayInfo], parts: Sequence[Part]) -> StoredFile:
    """Write whole datasets, every rank its parts. Collective.

    Parameters
    ----------
    arrays : mapping
        The same on all ranks.

    Returns
    -------
    StoredFile
        With the pieces of this rank; see `merged`.

    Raises
    ------
    OSError
        With the file's name.
    ValueError
        On all ranks: their arrays differ, as in a pipeline.
    """
    import h5py

    names = comm.gather_objects(list(arrays))
    if any(other != names[0] for other in names):
        raise ValueError("checkpoint.one_file: the ranks hold different arrays (a pipeline?); use files of their own")
    pieces = []
    try:
        with h5py.File(path, "w", driver="mpio", comm=comm.handle) as file:
            for name, info in arrays.items():
                file.create_dataset(name, info.shape, np.dtype(info.dtype), track_times=False)
            for part in parts:
                data = np.asarray(part.data, order="C")
                _write(file[part.array], part, data)
                checksum = zlib.crc32(data.reshape(data.size).view(np.uint8))
                pieces.append(Stored(part.array, part.box, part.array, checksum))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        comm.barrier()  # only now the size is final
        return StoredFile(path.name, path.stat().st_size, tuple(pieces), whole=True)
    except OSError as error:
        raise named(error, path) from error


def merged(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Join the entries that several ranks have made of one file."""
    found: dict[str, StoredFile] = {}
    for file in files:
        before = found.get(file.name)
        pieces = (*before.pieces, *file.pieces) if before else file.pieces
        found[file.name] = StoredFile(file.name, file.size, pieces, file.checksum, file.whole)
    return list(found.values())


def _write(dataset: object, part: Part, data: np.ndarray) -> None:
    """Write one part, in pieces along its first dim."""
    if not data.ndim:
        dataset[()] = data
        return
    low, high = part.box[0]
    rows = max(1, PIECE_BYTES * data.shape[0] // max(data.nbytes, 1))
    for start in range(low, high, rows):
        stop = min(start + rows, high)
        dataset[slices(((start, stop), *part.box[1:]))] = data[start - low : stop - low]
