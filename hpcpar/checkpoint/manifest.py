"""The table of contents of a checkpoint: arrays, the files that hold their pieces, checksums, and the state.

It is the last file written, and carries a checksum of itself: a checkpoint without a readable manifest is none.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpar.checkpoint.pieces import Box

NAME = "manifest.json"
FORMAT = "hpcpar checkpoint 1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: which file, and what is wrong with it."""


@dataclass(frozen=True)
class Stored:
    """A piece in a file: the dataset `path`, or its box where the file holds whole arrays."""

    array: str
    box: Box
    path: str
    checksum: int  # CRC-32 of its bytes in C order


@dataclass(frozen=True)
class StoredFile:
    """One file with its size in bytes and its pieces: datasets, or boxes of datasets that are whole arrays."""

    name: str
    size: int
    pieces: tuple[Stored, ...] = ()
    checksum: int | None = None  # of the whole file, for the small ones
    whole: bool = False


@dataclass(frozen=True)
class ArrayInfo:
    """Global shape, dtype (NumPy's string) and, where torch knows the array under another shape, that."""

    shape: tuple[int, ...]
    dtype: str
    shown: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    state: dict[str, Any]
    arrays: dict[str, ArrayInfo]
    files: tuple[StoredFile, ...]
    format: str = field(default=FORMAT)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def dumps(self) -> str:
        """Return the text of the file."""
        body = {
            "format": self.format,
            "step": self.step,
            "state": self.state,
            "arrays": {name: [info.shape, info.dtype, info.shown] for name, info in self.arrays.items()},
            "files": [
                {
                    "name": f.name,
                    "size": f.size,
                    "checksum": f.checksum,
                    "whole": f.whole,
                    # one short line a piece: on many ranks there are many
                    "pieces": [[p.array, p.box, p.path, p.checksum] for p in f.pieces],
                }
                for f in self.files
            ],
        }
        text = json.dumps(body, separators=(",", ":"))
        return json.dumps({"checksum": zlib.crc32(text.encode()), "body": text}) + "\n"


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises
    ------
    CheckpointError
        There is none, it is damaged, or it is of a format that this version does not know.
    """
    path = folder / NAME
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        text, checksum = outer["body"], outer["checksum"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was not finished") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if zlib.crc32(text.encode()) != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    body = json.loads(text)
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {body['format']!r}, this version reads {FORMAT!r}")
    arrays = {
        name: ArrayInfo(tuple(shape), dtype, None if shown is None else tuple(shown))
        for name, (shape, dtype, shown) in body["arrays"].items()
    }
    files = tuple(
        StoredFile(f["name"], f["size"], tuple(_stored(*p) for p in f["pieces"]), f["checksum"], f["whole"])
        for f in body["files"]
    )
    return Manifest(body["step"], body["state"], arrays, files)


def _stored(array: str, box: list[list[int]], path: str, checksum: int) -> Stored:
    return Stored(array, tuple((start, stop) for start, stop in box), path, checksum)
