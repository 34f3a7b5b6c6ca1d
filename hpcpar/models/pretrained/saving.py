"""A decoder as a Hugging Face folder: each rank writes the blocks that it owns to their places in the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.data.files import make_folder, write_json
from hpcpar.models.decoder import Decoder
from hpcpar.models.pretrained.families import family_for
from hpcpar.models.pretrained.files import DTYPES, FILE, INDEX, Writer, groups, lay_out
from hpcpar.models.pretrained.loading import CONFIG
from hpcpar.models.pretrained.views import View
from hpcpar.signature import Signature
from hpcpar.together import on_all, on_root
from hpcpar.transport.device import to_host

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SHARD_BYTES = 5 << 30


def save_pretrained(
    model: Decoder, folder: str | Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write a decoder so that the Hugging Face libraries load it. Collective.

    Parameters
    ----------
    folder : path
        Made where it is missing; all ranks must see it. Files appear whole, under their names, at the end.
    dtype : {"float64", "float32", "float16", "bfloat16"}, optional
        Of the files; that of the parameters by default.
    shard_bytes : int
        Largest number of bytes of a file; a larger tensor has a file of its own.

    Returns
    -------
    list of Path
        The files of tensors.

    Raises
    ------
    ValueError
        On all ranks: no known model_type has this configuration; the error says what each lacks.
    OSError
        On all ranks: a file cannot be written.
    """
    folder, world = Path(folder), model.embedding.weight.mesh.world
    family = family_for(model.config)
    views = family.views(model.config)
    kind = np.dtype(model.embedding.weight.dtype).name if dtype is None else dtype
    if kind not in NAMES:
        raise ValueError(f"save_pretrained: dtype is one of {', '.join(NAMES)}, got {kind!r}")
    shapes = {view.name: view.stored for view in views.values()}
    itemsize = np.dtype(DTYPES[NAMES[kind]]).itemsize
    parts = groups([(name, prod(shape) * itemsize) for name, shape in shapes.items()], shard_bytes)
    count = len(parts)
    names = [FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, part in zip(names, parts, strict=True):
        _write_file(model, folder / name, views, {n: shapes[n] for n in part}, NAMES[kind])
    about = {**family.write_config(model.config), "dtype": kind, "torch_dtype": kind}
    on_root(world, lambda: _finish(folder, names, parts, about, sum(map(prod, shapes.values())) * itemsize))
    return [folder / name for name in names]


def _write_file(
    model: Decoder, path: Path, views: Mapping[str, View], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> None:
    """Write one file aside, every rank its blocks; then put it in place."""
    world = model.embedding.weight.mesh.world
    aside = path.with_name(f".{path.name}.partial")
    places, header, size = lay_out(shapes, dtype, path.name)
    on_root(world, lambda: _make(aside, header, size))

    def write() -> None:
        with Writer(aside, places) as writer:
            for name, parameter in model.named_parameters():
                if views[name].name in places and _first_owner(parameter.sig):
                    writer.write(views[name], parameter.sig.box, to_host(parameter.shard))

    try:
        on_all(world, write)
    except (OSError, ValueError):
        if world.rank == 0:
            aside.unlink(missing_ok=True)
        raise
    on_root(world, lambda: os.replace(aside, path))


def _make(path: Path, header: bytes, size: int) -> None:
    make_folder(path.parent)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size)


def _first_owner(sig: Signature) -> bool:
    """Whether this rank is the one of several with equal blocks that writes."""
    coords = sig.mesh.coords
    return all(coords[axis] == 0 for axis in sig.mesh.axes if axis not in sig.split_axes)


def _finish(folder: Path, names: list[str], parts: list[list[str]], about: dict[str, Any], total: int) -> None:
    """Write the index, where there is more than one file, and the configuration; remove what would contradict them."""
    if len(names) > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    write_json(folder / CONFIG, about)
