"""Folders of ``.safetensors`` files, by the byte: the list of their tensors, and blocks of these read and written.

The format: eight bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), and the
elements, row-major and little-endian. With an index, ``model.safetensors.index.json``, there are several files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.models.pretrained.views import Box, View

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
BFLOAT16 = "BF16"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", BFLOAT16: "<u2"}
"""Their names in a header, and as what NumPy reads them."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype (a name of the format), shape, file and first byte there."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(DTYPES[self.dtype]).itemsize


def list_tensors(folder: Path) -> dict[str, Stored]:
    """Return all tensors of a folder by name; reads headers only.

    Raises
    ------
    FileNotFoundError
        There is neither an index nor one file, or a file of the index is missing.
    ValueError
        A file is not of the format, or is too short for what its header says.
    """
    index = folder / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif (folder / FILE).exists():
        names = [FILE]
    else:
        raise FileNotFoundError(f"{folder} has neither {FILE} nor {INDEX}")
    found: dict[str, Stored] = {}
    for name in names:
        found.update(_header(folder / name))
    return found


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path} is no safetensors file, or is cut off")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path} is no safetensors file: its header is no JSON") from None
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if 8 + length + max(ends, default=0) > size:
        raise ValueError(f"{path} is cut off: it has {size} bytes, its header tells of {8 + length + max(ends)}")
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), path.name, 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


class Reader:
    """Reads blocks of parameters, and no byte that is not in them.

    Attributes
    ----------
    bytes_read : int
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        self.folder, self.tensors, self.bytes_read = folder, tensors, 0
        self._open: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: Any) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, view: View, box: Box) -> np.ndarray:
        """Return a block of the parameter; float32 where the file holds bfloat16, else in the file's dtype."""
        stored = self.tensors[view.name]
        order = view.order
        block = np.empty([box[d][1] - box[d][0] for d in order], DTYPES[stored.dtype])
        flat, at = block.reshape(block.size).view(np.uint8), 0
        runs = view.runs(box)
        nbytes = runs.length * stored.itemsize
        for first in runs:
            self._fill(stored, stored.start + first * stored.itemsize, flat[at : at + nbytes])
            at += nbytes
        self.bytes_read += at
        return _numbers(block, stored.dtype).transpose(np.argsort(order).tolist())

    def _fill(self, stored: Stored, position: int, into: np.ndarray) -> None:
        descriptor = self._open.get(stored.file)
        if descriptor is None:
            descriptor = self._open[stored.file] = os.open(self.folder / stored.file, os.O_RDONLY)
        view = memoryview(into)
        while view:  # one call reads 2 GiB at most
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise OSError(f"{self.folder / stored.file} ends before byte {position + len(view)}")
            view, position = view[count:], position + count


class Writer:
    """Writes blocks of parameters to where they belong in one file that was laid out by `lay_out`."""

    def __init__(self, path: Path, tensors: Mapping[str, Stored]) -> None:
        self.tensors = tensors
        self._descriptor = os.open(path, os.O_WRONLY)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: Any) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def write(self, view: View, box: Box, block: np.ndarray) -> None:
        """Write a block of the parameter, converted to the file's dtype."""
        stored = self.tensors[view.name]
        flat = np.ascontiguousarray(_elements(block.transpose(view.order), stored.dtype))
        flat, at = flat.reshape(flat.size).view(np.uint8), 0
        runs = view.runs(box)
        nbytes = runs.length * stored.itemsize
        for first in runs:
            self._put(stored.start + first * stored.itemsize, flat[at : at + nbytes])
            at += nbytes

    def _put(self, position: int, data: np.ndarray) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, position)
            view, position = view[count:], position + count


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtype: str, file: str) -> tuple[dict[str, Stored], bytes, int]:
    """Return where each tensor of a new file goes, its header with the eight bytes before it, and its size."""
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + prod(shape) * itemsize]}
        at += prod(shape) * itemsize
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    places = {
        name: Stored(dtype, tuple(shape), file, start + entries[name]["data_offsets"][0])
        for name, shape in shapes.items()
    }
    return places, len(text).to_bytes(8, "little") + text, start + at


def _numbers(block: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != BFLOAT16:
        return block
    return (block.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _elements(block: np.ndarray, dtype: str) -> np.ndarray:
    from hpcpar.kernels import round_to_bfloat16

    if dtype != BFLOAT16:
        return block.astype(DTYPES[dtype], copy=False)
    return (round_to_bfloat16(block.astype(np.float32)).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def groups(sizes: Iterable[tuple[str, int]], limit: int | None) -> list[list[str]]:
    """Part names, in order, so that no group but one of a single tensor is larger than `limit` bytes."""
    parted: list[list[str]] = [[]]
    held = 0
    for name, nbytes in sizes:
        if limit is not None and parted[-1] and held + nbytes > limit:
            parted.append([])
            held = 0
        parted[-1].append(name)
        held += nbytes
    return parted
