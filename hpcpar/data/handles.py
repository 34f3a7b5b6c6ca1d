"""Open HDF5 files, kept per thread and process, a bounded number of them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.data.files import DataError

if TYPE_CHECKING:
    import h5py

__all__ = ["Handles"]

INHERITED: list = []  # handles that came through fork: kept alive, so that they are neither used nor closed here


class Handles:
    """Read-only files, opened when first needed by the thread that needs them.

    HDF5 keeps the file position and its caches in the handle, so one inherited through fork or used from two threads
    reads wrong data. A handle is therefore found only by the thread and process that opened it.
    """

    def __init__(self, driver: str | None = None, comm: Any = None, max_open: int = 16):
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}: at least one file must be open to be read")
        self._options = open_options(driver, comm)
        self._max_open = max_open
        self._forget()

    def file(self, path: Path) -> h5py.File:
        """The open `h5py.File` of `path`. Raises FileNotFoundError, or DataError for a file that is not whole."""
        if self._process != os.getpid():
            INHERITED.append(self._all)
            self._forget()
        opened = self._mine()
        if path in opened:
            opened.move_to_end(path)
            return opened[path]
        while len(opened) >= self._max_open:
            opened.popitem(last=False)[1].close()
        opened[path] = open_file(path, self._options)
        return opened[path]

    def close(self) -> None:
        """Close the files of all threads of this process."""
        if self._process != os.getpid():
            return
        with self._lock:
            for opened in self._all:
                while opened:
                    opened.popitem()[1].close()

    def _mine(self) -> OrderedDict:
        if not hasattr(self._local, "opened"):
            self._local.opened = OrderedDict()
            with self._lock:
                self._all.append(self._local.opened)
        return self._local.opened

    def _forget(self) -> None:
        self._process = os.getpid()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._all: list[OrderedDict] = []


def open_options(driver: str | None, comm: Any) -> dict[str, Any]:
    """Arguments of `h5py.File`; raises ValueError for a driver that this h5py cannot serve."""
    if driver is None:
        return {"locking": False}
    if driver != "mpio":
        raise ValueError(f"HDF5 driver {driver!r} is not known: None (independent reads) or 'mpio'")
    import h5py

    if not h5py.get_config().mpi:
        raise ValueError(
            f"driver='mpio' needs an h5py built with MPI, and h5py {h5py.__version__} here is serial; leave the driver"
            " out (each rank then opens files by itself, read-only) or build h5py with HDF5_MPI=ON"
        )
    if comm is None:
        raise ValueError("driver='mpio' needs comm: the communicator whose ranks open the same files together")
    return {"driver": "mpio", "comm": comm}


def open_file(path: Path, options: dict[str, Any]) -> h5py.File:
    """Open one file read-only, with errors that say what is wrong with it.

    Raises
    ------
    FileNotFoundError, PermissionError
        As the name says.
    DataError
        A folder, or a file that is truncated or no HDF5.
    """
    import h5py

    try:
        return h5py.File(path, "r", **options)
    except FileNotFoundError:
        raise FileNotFoundError(f"HDF5 file {path} does not exist (working in {Path.cwd()})") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder; an HDF5 file was expected") from None
    except PermissionError as error:
        raise PermissionError(f"HDF5 file {path} may not be read: {error.strerror or error}") from None
    except OSError as error:
        size = path.stat().st_size if path.exists() else 0
        raise DataError(f"{path} ({size} bytes) is truncated or no HDF5 file: {error}") from error
