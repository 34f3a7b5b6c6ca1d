"""From bytes to tokens and back: bytes themselves, or a vocabulary from a ``tokenizer.json``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hpcpar.data.files import DataError

__all__ = ["ByteTokens", "FileTokens", "Tokens", "make_tokens"]

END_WORDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""What the end of a document is called in the vocabularies in use."""


class Tokens(Protocol):
    """A vocabulary.

    Attributes
    ----------
    size : int
        Number of tokens, the end of a document included.
    end : int
        The token between documents.
    text : str
        What makes the vocabulary again: the contents of a ``tokenizer.json``; empty for bytes.
    """

    size: int
    end: int
    text: str

    def encode(self, document: bytes) -> np.ndarray:
        """Return the tokens of a document, without its end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, ends left out."""
        ...


class ByteTokens:
    """Every byte is a token, 0 to 255; 256 is the end of a document. Any file can be encoded."""

    size, end, text = 257, 256, ""

    def encode(self, document: bytes) -> np.ndarray:
        """Return the bytes, uint16."""
        return np.frombuffer(document, np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; what is no UTF-8 becomes the sign for that."""
        return bytes(int(t) for t in tokens if t < 256).decode("utf-8", errors="replace")


class FileTokens:
    """The vocabulary of a ``tokenizer.json``, as the `tokenizers` library reads it.

    Parameters
    ----------
    text : str
        Contents of the file.
    end : str or int, optional
        The token that ends a document. By default the first of `END_WORDS` that the vocabulary has, else a new one
        behind all others.
    source : path, optional
        The file, for errors.

    Raises
    ------
    ModuleNotFoundError
        The library is missing; the message names the extra that brings it.
    DataError
        The file is no tokenizer, or has no such token.
    """

    def __init__(self, text: str, end: str | int | None = None, source: str | os.PathLike = "the vocabulary") -> None:
        self.text = text
        self._made = _load(text, source)
        known = self._made.get_vocab_size(with_added_tokens=True)
        self.end = self._find_end(end, known)
        self.size = max(known, self.end + 1)

    def _find_end(self, end: str | int | None, known: int) -> int:
        if isinstance(end, int):
            return end
        for word in END_WORDS if end is None else (end,):
            if (number := self._made.token_to_id(word)) is not None:
                return number
        if end is not None:
            raise DataError(f"the tokenizer has no token {end!r}; it has {known} others")
        return known

    def encode(self, document: bytes) -> np.ndarray:
        """Return the tokens, without what the tokenizer would put around a text; no UTF-8 becomes the sign for that."""
        words = document.decode("utf-8", errors="replace")
        return np.asarray(self._made.encode(words, add_special_tokens=False).ids, dtype_for(self.size))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        return self._made.decode([int(t) for t in tokens if t != self.end])


def _load(text: str, source: str | os.PathLike) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        message = "a tokenizer.json is read by the package tokenizers: pip install 'hpcpar[text]'"
        raise ModuleNotFoundError(message, name="tokenizers") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        raise DataError(f"{source} is no tokenizer.json: {error}") from None


def make_tokens(tokenizer: str | os.PathLike | None = None, end: str | None = None) -> Tokens:
    """Return the vocabulary of a file, or of bytes without one."""
    if tokenizer is None:
        return ByteTokens()
    return FileTokens(Path(tokenizer).read_text(encoding="utf-8"), end, tokenizer)


def tokens_from(text: str, end: int) -> Tokens:
    """Return the vocabulary that a data file keeps."""
    return FileTokens(text, end) if text else ByteTokens()


def dtype_for(size: int) -> np.dtype:
    """Return the smallest of uint16 and uint32 that numbers a vocabulary."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
