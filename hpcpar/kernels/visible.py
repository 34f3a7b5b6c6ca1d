"""Which keys a query of attention may see, as plain arrays, and what that makes of a block of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import Array, array_module, is_device
from .generic.random import mask_of, random_words

#: States of a block of scores: no query sees a key, some do, all see all of them.
NONE, SOME, ALL = 0, 1, 2

#: Positions made of at most so many runs of consecutive numbers are cut where the runs meet.
RUNS = 16


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys a query may see; all given conditions must hold.

    Attributes
    ----------
    causal : bool
        The key's position is not after the query's.
    window : (int, int), optional
        (left, right): ``query position - left <= key position <= query position + right``.
    q_positions, k_positions : int array (L,) and (S,), optional
        Positions in the sequence, in any order; default 0, 1, 2, ... They decide with causal, window and dropout.
    q_documents, k_documents : int array (N, L) and (N, S), optional
        Both or neither: a query sees the keys of its own document.
    mask : bool or float array that broadcasts to (N, H, L, S), optional
        As torch's ``attn_mask``: True may be seen; floats are added to the scores.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    q_positions: Array | None = None
    k_positions: Array | None = None
    q_documents: Array | None = None
    k_documents: Array | None = None
    mask: Array | None = None


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the weights of attention: kept weights are divided by 1 - p.

    Element (n + n0, h + h0, query position, key position) of a global array of scores decides, by
    `hpcpar.kernels.dropout_mask`: the same under every layout and order.

    Attributes
    ----------
    seed, stream : int
    p : float
        Probability that a weight becomes 0.
    shape : (int, int, int, int)
        (N, H, L, S) of the global array.
    offset : (int, int)
        (n0, h0): the first sample and head of the arrays at hand.
    """

    seed: int
    stream: int
    p: float
    shape: tuple[int, int, int, int]
    offset: tuple[int, int] = (0, 0)

    @property
    def factor(self) -> float:
        """What kept weights are multiplied by."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def kept(self, samples: slice, heads: slice, rows: np.ndarray, keys: np.ndarray, like: Array) -> Array:
        """Mask (samples, heads, rows, keys) of a block's kept weights, from the positions of its rows and keys."""
        first, second = self.offset
        box = ((first + samples.start, first + samples.stop), (second + heads.start, second + heads.stop))
        kept = np.empty((samples.stop - samples.start, heads.stop - heads.start, rows.size, keys.size), bool)
        for r in few_runs(rows):
            for k in few_runs(keys):
                q, s = ((int(p.min()), int(p.max()) + 1) for p in (rows[r], keys[k]))
                words = random_words(self.seed, self.stream, self.shape, (*box, q, s))
                kept[:, :, r, k] = mask_of(words, self.p, kept)[:, :, rows[r] - q[0]][..., keys[k] - s[0]]
        return array_module(like).asarray(kept)


class Sight:
    """A `Visible` with its arrays made ready, for N samples of L queries and S keys cut into blocks.

    Attributes
    ----------
    rows, keys : lists of slice
        The blocks of queries and of keys.
    states : uint8 array (N or 1, blocks of queries, blocks of keys)
        NONE, SOME or ALL.
    """

    def __init__(self, visible: Visible, shape: Sequence[int], block: tuple[int, int]) -> None:
        self.visible, self.shape = visible, tuple(shape)
        _, _, length, keys = shape
        self.q_positions = _positions(visible.q_positions, length, "q_positions")
        self.k_positions = _positions(visible.k_positions, keys, "k_positions")
        self.q_documents, self.k_documents = visible.q_documents, visible.k_documents
        self._check(shape)
        self.mask = None if visible.mask is None else np.broadcast_to(visible.mask, shape)
        self.rows, self.keys = _cut(self.q_positions, block[0]), _cut(self.k_positions, block[1])
        self.states = self._states()

    def _check(self, shape: Sequence[int]) -> None:
        n, _, length, keys = shape
        if (self.q_documents is None) != (self.k_documents is None):
            raise ValueError("attention: documents are given for queries and keys, or for neither")
        for name, documents, size in (("q", self.q_documents, length), ("k", self.k_documents, keys)):
            if documents is not None and documents.shape != (n, size):
                raise ValueError(f"attention: {name}_documents has shape {documents.shape}, expected {(n, size)}")

    def _states(self) -> np.ndarray:
        q_low, q_high = (e[:, None] for e in _ends(self.q_positions, self.rows))
        k_low, k_high = _ends(self.k_positions, self.keys)
        none = np.zeros((1, len(self.rows), len(self.keys)), bool)
        every = np.ones(none.shape, bool)
        if self.visible.causal:
            none |= k_low > q_high
            every &= k_high <= q_low
        if self.visible.window is not None:
            left, right = self.visible.window
            none |= (k_high < q_low - left) | (k_low > q_high + right)
            every &= (k_low >= q_high - left) & (k_high <= q_low + right)
        if self.q_documents is not None and not is_device(self.q_documents):
            q_low, q_high = (e[:, :, None] for e in _ends(self.q_documents, self.rows))
            k_low, k_high = (e[:, None, :] for e in _ends(self.k_documents, self.keys))
            none = none | (k_high < q_low) | (k_low > q_high)
            every = every & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        elif self.q_documents is not None:
            every[...] = False
        if self.mask is not None:
            every[...] = False
        return np.where(none, NONE, np.where(every, ALL, SOME)).astype(np.uint8)

    def state(self, samples: slice, row: int, key: int) -> int:
        """What some samples see of a block: ALL or NONE if that holds of each."""
        states = self.states[samples if len(self.states) > 1 else slice(0, 1), row, key]
        low = int(states.min(initial=ALL))
        return low if low == int(states.max(initial=NONE)) else SOME

    def intervals(self, sample: int, row: int, key: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The keys [low, high) of a block, counted from its first, that each row may see by position and document.

        None where they are no intervals (positions in disorder, documents that return).
        """
        rows, keys = self.rows[row], self.keys[key]
        if not self.ordered[sample if self.q_documents is not None else 0, key]:
            return None
        low, high = np.zeros(rows.stop - rows.start, np.int64), np.full(rows.stop - rows.start, keys.stop - keys.start)
        q, k = self.q_positions[rows], self.k_positions[keys]
        if self.visible.causal:
            high = np.searchsorted(k, q, "right")
        if self.visible.window is not None:
            left, right = self.visible.window
            low = np.searchsorted(k, q - left, "left")
            high = np.minimum(high, np.searchsorted(k, q + right, "right"))
        if self.q_documents is not None:
            q, k = self.q_documents[sample, rows], self.k_documents[sample, keys]
            low = np.maximum(low, np.searchsorted(k, q, "left"))
            high = np.minimum(high, np.searchsorted(k, q, "right"))
        return low, np.maximum(low, high)

    @cached_property
    def ordered(self) -> np.ndarray:
        """Whether each block of keys (N or 1, blocks) has ascending positions and documents."""
        falls = (np.diff(self.k_positions) < 0)[None]
        if self.k_documents is not None:
            falls = falls | (np.diff(self.k_documents) < 0)
        before = np.concatenate([np.zeros((len(falls), 1), np.int64), falls.cumsum(1)], axis=1)  # falls before a key
        return np.stack([before[:, k.stop - 1] == before[:, k.start] for k in self.keys], axis=1)

    def seen(self, samples: slice, rows: slice, keys: slice, like: Array) -> tuple[Array | None, Array | None]:
        """Of a block, what may be seen (bool) and what is added to the scores; each broadcasts to (n, H, rows, keys).

        None: everything, or nothing.
        """
        xp = array_module(like)
        conditions = []
        q, k = xp.asarray(self.q_positions[rows])[:, None], xp.asarray(self.k_positions[keys])
        if self.visible.causal:
            conditions.append(k <= q)
        if self.visible.window is not None:
            left, right = self.visible.window
            conditions.append((k >= q - left) & (k <= q + right))
        if self.q_documents is not None:
            q, k = self.q_documents[samples, rows], self.k_documents[samples, keys]
            conditions.append(q[:, None, :, None] == k[:, None, None, :])
        added = None if self.mask is None else self.mask[samples, :, rows, keys]
        if added is not None and added.dtype == bool:
            conditions.append(added)
            added = None
        allowed = conditions[0] if conditions else None
        for condition in conditions[1:]:
            allowed = allowed & condition
        return allowed, added


def runs(positions: np.ndarray) -> list[slice]:
    """The parts of an array of positions in which each is one more than the one before."""
    if positions.size == 0:
        return []
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), positions.size]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def few_runs(positions: np.ndarray) -> list[slice]:
    """The runs of positions; all positions as one part where runs are many."""
    parts = runs(positions)
    return parts if len(parts) <= RUNS else [slice(0, positions.size)]


def _positions(given: Array | None, size: int, name: str) -> np.ndarray:
    """Positions on the host."""
    if given is None:
        return np.arange(size)
    if given.shape != (size,):
        raise ValueError(f"attention: {name} has shape {given.shape}, expected {(size,)}")
    return given.get() if is_device(given) else np.asarray(given)


def _cut(positions: np.ndarray, block: int) -> list[slice]:
    """Blocks of about equal length, at most ``block``; none holds a jump where there are few of them."""
    blocks = []
    for part in few_runs(positions):
        size = part.stop - part.start
        count = math.ceil(size / block)
        edges = [part.start + size * i // count for i in range(count + 1)]
        blocks += [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    return blocks


def _ends(a: np.ndarray, blocks: Sequence[slice]) -> tuple[Any, Any]:
    """Smallest and largest number of each block of the last dim."""
    if a.size == 0 or not blocks:
        empty = np.zeros((*a.shape[:-1], len(blocks)), np.int64)
        return empty, empty
    starts = [block.start for block in blocks]
    return np.minimum.reduceat(a, starts, axis=-1), np.maximum.reduceat(a, starts, axis=-1)
