"""Windows of a text: samples of a fixed number of tokens, each token of the text predicted once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcpar.data.files import DataError
from hpcpar.data.samples import Samples, Source
from hpcpar.data.text import FORMAT
from hpcpar.data.text_tokens import Tokens, tokens_from

__all__ = ["IGNORED", "TextDataset", "Window"]

IGNORED = -100
"""The target of a place behind the end of a text: ``ignore_index`` of torch's cross entropy."""

OUTSIDE = -1
"""The document of such a place."""


@dataclass(frozen=True)
class Window:
    """Some places of one window, arrays of equal length.

    Attributes
    ----------
    tokens, targets : array of int64
        What stands there, and what follows; behind the end of the text the end token, and `IGNORED`.
    positions : array of int64
        Tokens since the start of the document, or of the window where that comes later.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray


class TextDataset(Samples):
    """Files of tokens (`hpcpar.data.text`), cut into windows.

    Parameters
    ----------
    source : path or sequence of paths
        A folder, a file, or files in the given order.
    sequence : int
        Tokens of a window. The windows of a file follow each other without overlap; the last may reach behind the end.

    Attributes
    ----------
    sequence : int
    vocabulary, end : int
        Number of tokens, and the one between documents.
    targets, raw_bytes : int
        Over all files: tokens to be predicted, and the bytes that they stand for.
    bytes_read : int
        Bytes of tokens delivered so far, over all threads, as stored.

    Raises
    ------
    FileNotFoundError
        A file or folder is missing.
    DataError
        A file is no such file, or has another vocabulary than the first.
    """

    input = "tokens"

    def __init__(self, source: Source, sequence: int):
        if sequence < 1:
            raise ValueError(f"a window has at least one token, got {sequence}")
        super().__init__(source)
        self.sequence = sequence
        self.vocabulary, self.end, self._tokenizer = self._describe(self.paths[0])
        self._offsets = [self._read_offsets(path) for path in self.paths]
        self._lengths = [int(offsets[-1]) for offsets in self._offsets]
        self.targets = sum(self._lengths)
        self.raw_bytes = sum(int(self._dataset(path, "bytes")[()].sum()) for path in self.paths)
        self._starts = np.concatenate([[0], np.cumsum([-(-n // sequence) for n in self._lengths])]).astype(np.int64)

    @property
    def filled(self) -> float:
        """Share of the places of all windows that hold a token to be predicted from; the others are padding."""
        return self.targets / max(len(self) * self.sequence, 1)

    @property
    def longest(self) -> int:
        """Tokens to be predicted of the longest file."""
        return max(self._lengths)

    def shape(self, key: str = "tokens") -> tuple[int, ...]:
        """Shape of one sample."""
        return (self.sequence,)

    def vocabulary_tokens(self) -> Tokens:
        """Return what encodes and decodes; raises ModuleNotFoundError where the package for it is missing."""
        return tokens_from(self._tokenizer, self.end)

    def where(self, index: int) -> tuple[int, int]:
        """Number of the file of a window, and where in its stream the window begins.

        Raises
        ------
        IndexError
            There are not so many windows.
        """
        place, window = self._find(index)
        return place, window * self.sequence

    def counted(self, index: int) -> int:
        """Targets of a window that count: all but those behind the end."""
        place, base = self.where(index)
        return min(self.sequence, self._lengths[place] - base)

    def read(self, index: int, places: np.ndarray) -> Window:
        """Read some places of a window; of the file, just these and the token behind each run of them.

        Parameters
        ----------
        places : array of int64
            In [0, sequence), in any order.
        """
        place, base = self.where(index)
        offsets, length = self._offsets[place], self._lengths[place]
        at = base + np.asarray(places, np.int64)
        tokens, targets = np.full(at.shape, self.end, np.int64), np.full(at.shape, IGNORED, np.int64)
        for begin, end in runs(at):
            first, last = int(at[begin]), min(int(at[end - 1]) + 1, length)
            if first < last:
                found = self._stretch(place, first, last + 1)
                there = slice(begin, begin + last - first)
                tokens[there], targets[there] = found[:-1], found[1:]
        documents = self.documents(index, places)
        starts = np.where(documents == OUTSIDE, base, np.maximum(offsets[documents], base))
        return Window(tokens, targets, at - starts)

    def documents(self, index: int, places: np.ndarray) -> np.ndarray:
        """Return the documents that some places of a window belong to: numbers in the file, `OUTSIDE` behind its end.

        Nothing is read: where documents begin is known.
        """
        place, base = self.where(index)
        at = base + np.asarray(places, np.int64)
        found = np.searchsorted(self._offsets[place], at, side="right") - 1
        return np.where(at < self._lengths[place], found, OUTSIDE)

    def __repr__(self) -> str:
        return (
            f"TextDataset({len(self)} windows of {self.sequence} tokens in {len(self.paths)} files: {self.targets} "
            f"tokens of {self.vocabulary}, {self.raw_bytes} bytes)"
        )

    def _stretch(self, place: int, start: int, stop: int) -> np.ndarray:
        return self._delivered(self._dataset(self.paths[place], "tokens")[start:stop])

    def _dataset(self, path: Path, name: str):
        dataset = self._handles.file(path).get(name)
        if dataset is None:
            raise DataError(f"{path}: dataset '{name}' is missing; make it with hpcpar data text")
        return dataset

    def _describe(self, path: Path) -> tuple[int, int, str]:
        """Vocabulary, end and tokenizer of a file."""
        attributes = self._handles.file(path).attrs
        if attributes.get("format") != FORMAT:
            raise DataError(f"{path} is no file of tokens ({FORMAT}); make one with hpcpar data text")
        text = self._dataset(path, "tokenizer")[()].tobytes().decode()
        return int(attributes["vocabulary"]), int(attributes["end"]), text

    def _read_offsets(self, path: Path) -> np.ndarray:
        if self._describe(path) != (self.vocabulary, self.end, self._tokenizer):
            raise DataError(f"{path} has another vocabulary than {self.paths[0]}")
        offsets, stored = self._dataset(path, "offsets")[()], self._dataset(path, "tokens").shape[0]
        if offsets[-1] + 1 != stored:
            raise DataError(f"{path}: its documents have {offsets[-1]} tokens, and {stored - 1} are there")
        return offsets


def runs(at: np.ndarray) -> list[tuple[int, int]]:
    """Index ranges of an array in which each number is the one before plus 1."""
    if not at.size:
        return []
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    edges = [0, *breaks.tolist(), at.size]
    return list(zip(edges, edges[1:], strict=False))
