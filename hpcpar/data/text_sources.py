"""Documents of a text: found in files, parted into training, validation and test, and dealt to output files.

All of it is arithmetic on names and sizes, the same on every rank; contents are read by whoever makes the output file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from hpcpar.data.files import DataError
from hpcpar.data.streams import permutation, stream

__all__ = ["PARTS", "Document", "deal", "find_documents", "part_documents"]

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """A range of bytes of a file.

    Attributes
    ----------
    path : Path
    name : str
        Relative to the source, with ``/`` between folders; with the range where it is not the whole file.
    start, stop : int
    """

    path: Path
    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def read(self) -> bytes:
        """Return the bytes; raises DataError where the file has become shorter."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            found = file.read(self.size)
        if len(found) != self.size:
            raise DataError(f"{self.path} has changed: {len(found)} bytes where {self.size} were, from {self.start}")
        return found

    def piece(self, start: int, stop: int) -> Document:
        """Return the bytes ``start`` to ``stop`` of this document as one of their own."""
        name = self.name.partition("[")[0]
        begin, end = self.start + start, self.start + stop
        return replace(self, name=f"{name}[{begin}:{end}]", start=begin, stop=end)


def find_documents(
    source: str | os.PathLike, pattern: str = "*", exclude: Sequence[str] = (), split_at: str | None = None
) -> list[Document]:
    """List the documents of a source in name order; empty ones are left out.

    Parameters
    ----------
    source : path
        A file, or a folder that is searched with all folders in it.
    pattern : str
        Names of files, with the wildcards of a shell.
    exclude : sequence of str
        Paths below the source that are left out, with the same wildcards (``*`` matches ``/`` too).
    split_at : str, optional
        Regular expression: a document begins at each line that it matches at its start; what stands before the first
        is a document too. Without it a document is a file.

    Raises
    ------
    FileNotFoundError
        The source is missing.
    DataError
        It holds no document, or the expression cannot be used.
    """
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"no such file or folder: {source} (working in {Path.cwd()})")
    try:
        expression = re.compile(f"(?m)^(?:{split_at})".encode()) if split_at else None
    except re.error as error:
        raise DataError(f"{split_at!r} is no regular expression: {error}") from None
    found = []
    for name, path in _files(source, pattern, exclude):
        whole = Document(path, name, 0, path.stat().st_size)
        found += [d for d in (_parts(whole, expression) if expression else [whole]) if d.size]
    if not found:
        raise DataError(f"{source} holds no document: no file {pattern!r} that is not empty")
    return found


def _files(source: Path, pattern: str, exclude: Sequence[str]) -> list[tuple[str, Path]]:
    if source.is_file():
        return [(source.name, source)]
    named = [(path.relative_to(source).as_posix(), path) for path in source.rglob(pattern) if path.is_file()]
    return sorted((name, path) for name, path in named if not any(fnmatch(name, wild) for wild in exclude))


def _parts(whole: Document, expression: re.Pattern[bytes]) -> list[Document]:
    text = whole.read()
    cuts = sorted({0, *(match.start() for match in expression.finditer(text)), whole.size})
    return [whole.piece(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def part_documents(documents: Sequence[Document], shares: dict[str, float], seed: int = 0) -> dict[str, list[Document]]:
    """Part documents into training, validation and test.

    Parameters
    ----------
    documents : sequence of Document
    shares : dict of str to float
        Of the bytes, for ``validation`` and ``test``; the rest is for training.
    seed : int
        Of the order in which documents are drawn.

    Returns
    -------
    dict of str to list of Document
        In the given order; parts with a share of 0 are left out.

    Raises
    ------
    ValueError
        Shares that leave nothing for training.
    DataError
        Fewer documents than parts, but more than one.

    Notes
    -----
    Documents are drawn whole, in an order that depends on `seed` and their number alone: the test takes each that its
    share still has room for (the smallest one, if none fits), then the validation of the others. A single document is
    cut by position: its first part is for training, the next for validation, the last for the test; each cut lies at
    the next start of a line.
    """
    wanted = {part: share for part, share in shares.items() if share > 0}
    if any(not 0 <= share < 1 for share in shares.values()) or sum(wanted.values()) >= 1:
        raise ValueError(f"shares of validation and test are at least 0 and leave something for training, got {shares}")
    if len(documents) == 1:
        return _cut(documents[0], wanted)
    if len(documents) <= len(wanted):
        raise DataError(f"{len(documents)} documents cannot be parted into training, {' and '.join(wanted)}")
    sizes = [d.size for d in documents]
    left = permutation(seed, stream("text parts"), len(documents)).tolist()
    chosen: dict[str, list[int]] = {}
    for part in reversed(PARTS[1:]):
        if part in wanted:
            chosen[part] = _draw(left, sizes, wanted[part] * sum(sizes))
            left = [i for i in left if i not in set(chosen[part])]
    chosen["train"] = left
    return {part: [documents[i] for i in sorted(chosen[part])] for part in PARTS if part in chosen}


def _draw(order: list[int], sizes: list[int], room: float) -> list[int]:
    taken = []
    for i in order:
        if sizes[i] <= room:
            taken.append(i)
            room -= sizes[i]
    return taken or [min(order, key=lambda i: (sizes[i], i))]


def _cut(document: Document, wanted: dict[str, float]) -> dict[str, list[Document]]:
    """Cut one document into consecutive parts."""
    text, parts = document.read(), [part for part in PARTS if part == "train" or part in wanted]
    ends, at = [], (1 - sum(wanted.values())) * len(text)
    for part in parts[1:]:
        ends.append((text.find(b"\n", int(at)) + 1) or len(text))
        at += wanted[part] * len(text)
    cuts = [0, *ends, len(text)]
    if any(a >= b for a, b in zip(cuts, cuts[1:], strict=False)):
        raise DataError(f"{document.path} is too short, or has lines too long, to be cut into {', '.join(parts)}")
    return {p: [document.piece(a, b)] for p, a, b in zip(parts, cuts, cuts[1:], strict=False)}


def deal(documents: Sequence[Document], file_bytes: int) -> list[list[Document]]:
    """Deal documents in order to files, a new one after each `file_bytes`."""
    ends = np.cumsum([d.size for d in documents])
    numbers = (ends - 1) // file_bytes
    return [[documents[i] for i in np.flatnonzero(numbers == k)] for k in np.unique(numbers)]
