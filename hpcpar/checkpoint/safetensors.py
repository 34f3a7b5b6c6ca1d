"""Weights to and from ``.safetensors``: one file, or several with an index, under torch's names and shapes.

The format and the names of the parts are those of the Hugging Face libraries; the package ``safetensors`` does the
reading and writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.checkpoint.folder import Folder
from hpcpar.checkpoint.index import seal
from hpcpar.checkpoint.manifest import ArrayInfo, CheckpointError, StoredFile
from hpcpar.checkpoint.reading import Checkpoint, StoredArray
from hpcpar.checkpoint.shard import Part, write_shard
from hpcpar.data.files import make_folder, replaced

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
KEEP_ALL = 1 << 30


def export_weights(checkpoint: Checkpoint, out: str | Path, shard_bytes: int | None = None) -> list[Path]:
    """Write parameters and buffers of a checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
    out : path
        A file ``*.safetensors``; or, with `shard_bytes`, a folder.
    shard_bytes : int, optional
        Largest number of bytes of a file, and of what is held in memory; a larger array has a file of its own.

    Returns
    -------
    list of Path
        The files, and the index last where there are several.

    Raises
    ------
    CheckpointError
        The checkpoint holds no model.
    ValueError
        The name of a single file does not end in ``.safetensors``.
    ImportError
        The package safetensors is missing.
    """
    library, out = _library(), Path(out)
    arrays = checkpoint.group("model")
    if not arrays:
        raise CheckpointError(f"{checkpoint.path} holds no model")
    about = {"format": "pt", "step": str(checkpoint.step), "source": "hpcpar"}
    if shard_bytes is None:
        if out.suffix != SUFFIX:
            raise ValueError(f"{out}: the name of one file ends in {SUFFIX}; a folder needs a size of its files")
        make_folder(out.parent)
        with replaced(out) as aside:
            library.numpy.save_file({name: _whole(array) for name, array in arrays.items()}, aside, about)
        return [out]
    make_folder(out)
    groups = _groups(arrays, shard_bytes)
    files, places = [], {}
    for number, names in enumerate(groups, 1):
        path = out / f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        with replaced(path) as aside:
            library.numpy.save_file({name: _whole(arrays[name]) for name in names}, aside, about)
        files.append(path)
        places.update(dict.fromkeys(names, path.name))
    total = sum(prod(array.shape) * array.dtype.itemsize for array in arrays.values())
    with replaced(out / INDEX) as aside:
        aside.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
    return [*files, out / INDEX]


def import_weights(source: str | Path, folder: str | Path, step: int = 0) -> Path:
    """Make a checkpoint of weights alone, from which training begins anew; returns its path.

    Parameters
    ----------
    source : path
        A file ``*.safetensors``, an index ``*.index.json``, or a folder with either.
    folder : path
        Of checkpoints.
    step : int
        In the name of the checkpoint.

    Raises
    ------
    ValueError
        An array is in two of the files.
    FileNotFoundError
        There are no such files.
    ImportError
        The package safetensors is missing.
    """
    target = Folder(folder)
    aside = target.prepare(step)
    arrays: dict[str, ArrayInfo] = {}
    scalars: dict[str, np.ndarray] = {}
    files: list[StoredFile] = []
    for path in _sources(Path(source)):
        values = {f"model/{name}": value for name, value in _read(path)}
        twice = set(values) & set(arrays)
        if twice:
            raise ValueError(f"{path}: {min(twice)[6:]} is in another file too")
        arrays.update({name: ArrayInfo(value.shape, value.dtype.str) for name, value in values.items()})
        scalars.update({name: value for name, value in values.items() if not value.ndim})
        parts = [Part(name, tuple((0, n) for n in value.shape), value) for name, value in values.items() if value.size]
        if parts:
            files.append(write_shard(aside / f"shard-{len(files):05d}.h5", parts))
    return seal(target, step, arrays, files, scalars, {"step": step, "source": str(source)}, KEEP_ALL)


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("weights as .safetensors need a package: pip install 'hpcpar[safetensors]'") from None
    return safetensors


def _whole(array: StoredArray) -> np.ndarray:
    return array[...].reshape(array.shown)


def _groups(arrays: dict[str, StoredArray], limit: int) -> list[list[str]]:
    """Names in order, parted so that no group but one of a single array is larger than the limit."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, array in arrays.items():
        nbytes = prod(array.shape) * array.dtype.itemsize
        if groups[-1] and held + nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    return groups


def _sources(path: Path) -> list[Path]:
    if path.is_dir():
        index = path / INDEX
        path = index if index.exists() else path / "model.safetensors"
    if path.suffix != ".json":
        return [path]
    places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    return [path.parent / name for name in sorted(set(places.values()))]


def _read(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    library = _library()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with library.safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
    except (library.SafetensorError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error} (NumPy has no bfloat16: convert to float32 first)") from None
