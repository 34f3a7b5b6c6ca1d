"""Texts as tokens in HDF5 files: what ``hpcpar data text`` makes.

A file holds documents one behind the other. The token that ends documents stands before each of them and at the end
of the file: so the first token of a document has something to be predicted from, and its end is predicted too.

========== ========================== =====================================================================
dataset    shape, dtype               contents
========== ========================== =====================================================================
tokens     (T + 1,) uint16 or uint32  T of documents and of the ends before them, and the end of the file
offsets    (D + 1,) int64             where each document begins; the last is T
bytes      (D,) int64                 raw bytes of each document: what bits per byte divide by
names      (n,) uint8                 names of the documents, a line each
tokenizer  (n,) uint8                 contents of the ``tokenizer.json``; empty where tokens are bytes
========== ========================== =====================================================================

Attributes: ``format`` ("hpcpar text 1"), ``vocabulary`` (how many tokens there are), ``end`` (the token between
documents).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpcpar.data.files import DataError, is_made, make_folder, write_hdf5
from hpcpar.data.sharing import ALONE, Gather, Sharing, by_folder
from hpcpar.data.text_sources import Document, deal, find_documents, part_documents
from hpcpar.data.text_tokens import Tokens, dtype_for, make_tokens

__all__ = ["FORMAT", "make_text"]

FORMAT = "hpcpar text 1"


def make_text(
    out: str | os.PathLike,
    source: str | os.PathLike,
    *,
    pattern: str = "*",
    exclude: Sequence[str] = (),
    split_at: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    end: str | None = None,
    validation: float = 0.05,
    test: float = 0.05,
    seed: int = 0,
    file_bytes: int = 64 << 20,
    sharing: Sharing = ALONE,
) -> list[Path]:
    """Write a text as HDF5 files of tokens.

    Parameters
    ----------
    out : path
        Folder; gets ``train``, ``validation``, ``test`` (those with a share) and ``dataset.json``.
    source, pattern, exclude, split_at
        What the documents are; see `find_documents`.
    tokenizer : path, optional
        A ``tokenizer.json``; by default tokens are bytes.
    end : str, optional
        Its token for the end of a document; see `FileTokens`.
    validation, test, seed
        Shares of the bytes; see `part_documents`.
    file_bytes : int
        Raw bytes after which a new file begins.
    sharing : Sharing, optional
        How several ranks make the set together; by default this process makes all of it. Collective with a `gather`.

    Returns
    -------
    list of Path
        All files of the set, on every rank (also those that other ranks make).

    Raises
    ------
    FileNotFoundError, ModuleNotFoundError
        The source, or the package that reads tokenizers, is missing.
    DataError
        There are no documents, or not the same for all ranks; or a file made from other parameters or contents is in
        the way.

    Notes
    -----
    The files' bytes are a function of documents and parameters, not of the number of ranks. Files that are there are
    kept.
    """
    if file_bytes < 1:
        raise ValueError(f"file_bytes is {file_bytes}: a file holds at least one byte")
    out, tokens = make_folder(out), make_tokens(tokenizer, end)
    documents = find_documents(source, pattern, exclude, split_at)
    if sharing.gather is not None:
        _require_same(source, documents, sharing.gather)
    parts = part_documents(documents, {"validation": validation, "test": test}, seed)
    files = _deal_parts(parts, file_bytes)
    names = list(files)
    _require_room(out, names)
    written = sum(_write(out / name, name, files[name], tokens) for name in sharing.own(names))
    return sharing.finish("text", out, names, written, _summary(source, parts, names, tokens))


def _deal_parts(parts: dict[str, list[Document]], file_bytes: int) -> dict[str, list[Document]]:
    """Return the documents of each file of the set, by the file's name."""
    return {
        f"{part}/{number:05d}.h5": dealt
        for part, documents in parts.items()
        for number, dealt in enumerate(deal(documents, file_bytes))
    }


def _write(path: Path, name: str, documents: Sequence[Document], tokens: Tokens) -> bool:
    """Make one file unless it is there."""
    texts = [document.read() for document in documents]
    names = "\n".join(document.name for document in documents).encode()
    contents = hashlib.blake2b(names, digest_size=16)
    for text in texts:
        contents.update(hashlib.blake2b(text).digest())
    vocabulary = hashlib.blake2b(tokens.text.encode(), digest_size=16).hexdigest()
    recipe = {
        "data": "text", "format": FORMAT, "name": name, "contents": contents.hexdigest(), "vocabulary": vocabulary,
        "end": tokens.end,
    }  # fmt: skip
    if is_made(path, recipe):
        return False
    make_folder(path.parent)
    stream, offsets = encode(texts, tokens)
    datasets = {
        "tokens": stream,
        "offsets": offsets,
        "bytes": np.array([len(text) for text in texts], np.int64),
        "names": np.frombuffer(names, np.uint8),
        "tokenizer": np.frombuffer(tokens.text.encode(), np.uint8),
    }
    write_hdf5(path, datasets, {"format": FORMAT, "vocabulary": tokens.size, "end": tokens.end}, recipe)
    return True


def encode(texts: Sequence[bytes], tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Return the stream of tokens of some documents, and where each begins; its last entry is the last end's place."""
    between = np.array([tokens.end], dtype_for(tokens.size))
    pieces = [np.concatenate([between, tokens.encode(text).astype(between.dtype)]) for text in texts]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return np.concatenate([*pieces, between]), offsets


def _require_room(out: Path, names: Sequence[str]) -> None:
    """Files that an earlier set has left among ours would be trained on too."""
    there = {path.relative_to(out).as_posix() for path in out.glob("*/*.h5") if not path.name.startswith(".")}
    strangers = sorted(there.difference(names))
    if strangers:
        raise DataError(f"{out} holds {strangers[0]}, which is no file of this set; choose another folder or remove it")


def _require_same(source: str | os.PathLike, documents: Sequence[Document], gather: Gather) -> None:
    """Ranks that see other documents would make the files of other sets. Collective."""
    listing = "\n".join(f"{document.size} {document.name}" for document in documents)
    digest = hashlib.blake2b(listing.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    found = gather((digest, len(documents), sum(document.size for document in documents)))
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        seen = ", ".join(f"{found[r][1]} of {found[r][2]} bytes on rank {r}" for r in (0, other))
        raise DataError(f"{source} holds not the same documents for all ranks: {seen}; let all of them read one folder")


def _summary(source: str | os.PathLike, parts: dict[str, list[Document]], names: Sequence[str], tokens: Tokens) -> dict:
    """Contents of ``dataset.json``."""
    files = by_folder(names)
    return {
        "data": "text",
        "source": Path(source).name,
        "vocabulary": tokens.size,
        "end": tokens.end,
        "sets": {
            part: {
                "documents": len(chosen),
                "bytes": sum(document.size for document in chosen),
                "files": files.get(part, []),
            }
            for part, chosen in parts.items()
        },
    }
