"""Making data files so that a file that exists is whole, and is the one that was asked for."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

__all__ = ["DataError", "is_made", "make_folder", "replaced", "write_hdf5", "write_json"]

RECIPE = "recipe"  # attribute that holds the parameters a file was made from


class DataError(ValueError):
    """Data on disk are not what the run asks for: which file, which dataset, what was expected and what is there."""


def make_folder(path: str | os.PathLike) -> Path:
    """Make a folder and its parents; many ranks may do so at once.

    On parallel file systems ``exist_ok=True`` can still raise FileExistsError while another node's folder is not
    visible yet, so the error counts only if no folder is there.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise FileExistsError(f"{path} is in the way: it is a file where a folder is to be made") from None
    return path


@contextlib.contextmanager
def replaced(path: str | os.PathLike) -> Iterator[Path]:
    """Write a file aside and put it in place by one rename, on the disk before its name is.

    Yields the path to write. If the body raises, nothing is left and what stood at `path` stays.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_hdf5(
    path: str | os.PathLike, datasets: Mapping[str, np.ndarray], attributes: Mapping, recipe: Mapping
) -> None:
    """Write one HDF5 file, whole or not at all.

    Parameters
    ----------
    path : path
        Name of the finished file; its folder exists.
    datasets : mapping of str to array
        Stored contiguous (not chunked), so a block along the first dims is read with exactly its own bytes.
    attributes : mapping
        Attributes of the file's root.
    recipe : mapping
        Every parameter the contents depend on; JSON in the attribute ``recipe``, read back by `is_made`. The bytes of
        the file are a function of these arguments (no time stamps).
    """
    import h5py

    with replaced(path) as aside, h5py.File(aside, "w", track_order=True) as file:
        for name, value in datasets.items():
            file.create_dataset(name, data=value, track_times=False)
        file.attrs.update(attributes)
        file.attrs[RECIPE] = json.dumps(dict(recipe), sort_keys=True)


def write_json(path: str | os.PathLike, value: Mapping) -> None:
    """Write a JSON file, whole or not at all."""
    with replaced(path) as aside:
        aside.write_text(json.dumps(value, indent=2) + "\n")


def is_made(path: str | os.PathLike, recipe: Mapping) -> bool:
    """Whether `path` is a whole file made from `recipe`, so that making it again can be left out.

    False for a missing or damaged file. Raises DataError for a whole file made from other parameters: it is not ours
    to overwrite.
    """
    import h5py

    path = Path(path)
    if not path.exists():
        return False
    try:
        with h5py.File(path, "r", locking=False) as file:
            found = json.loads(file.attrs.get(RECIPE, "{}"))
    except OSError:
        return False
    wanted = json.loads(json.dumps(dict(recipe)))
    if found == wanted:
        return True
    keys = [k for k in sorted({*found, *wanted}) if found.get(k) != wanted.get(k)]
    differences = ", ".join(f"{k}: {found.get(k, 'absent')} there, {wanted.get(k, 'absent')} asked for" for k in keys)
    raise DataError(f"{path} was made from other parameters ({differences}); choose another folder or remove this one")
