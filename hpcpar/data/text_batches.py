"""Batches of windows of a text as tensors; each rank reads its samples and its tokens of them, whatever their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcpar.creation import from_shard
from hpcpar.data.batches import TensorBatches, box_of
from hpcpar.data.orientation import Box
from hpcpar.data.reader import BatchReader
from hpcpar.data.sampler import Position, Sampler
from hpcpar.data.text_dataset import IGNORED, TextDataset
from hpcpar.layout.layout import Layout
from hpcpar.layout.sequence import zigzag
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.tensors import Tensor
from hpcpar.trace import span

__all__ = ["Text", "TextBatches"]


class Text(NamedTuple):
    """What a model for texts is given.

    Attributes
    ----------
    tokens : Tensor
        (N, S) int64.
    positions, documents : Tensor or None
        (N, S) int64, where the configuration asks for them. Documents are whole on all ranks that share a text: queries
        of each meet keys of all, and so no layer has to gather them.
    counted : int
        Targets of the batch that count, over all ranks.
    """

    tokens: Tensor
    positions: Tensor | None
    documents: Tensor | None
    counted: int


@dataclass(frozen=True)
class TextBatch:
    """What one rank holds of a global batch, and what `Text` and `Batch` tell of the whole one.

    Attributes
    ----------
    tokens, targets, positions : array (n, s)
    documents : array (n, S) or None
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray | None
    shape: tuple[int, int]
    counted: int
    indices: np.ndarray
    position: Position
    after: Position


class TextLoader(BatchReader):
    """Reads the local blocks of global batches of windows.

    Parameters
    ----------
    dataset : TextDataset
    sampler : Sampler
        Over its windows.
    box : callable
        From the global shape (N, S) to this rank's (start, stop) in both dims.
    order : array of int64
        (S,) which place of the window lies at each index of the sequence dim.
    documents : bool
        Say which document each token belongs to.
    depth : int
        Batches read ahead.
    """

    def __init__(
        self,
        dataset: TextDataset,
        sampler: Sampler,
        box: Callable[[tuple[int, ...]], Box],
        order: np.ndarray,
        documents: bool = False,
        depth: int = 2,
    ):
        super().__init__(dataset, sampler, depth)
        self.box, self.order, self.documents = box, order, documents

    def batch(self, position: Position, indices: np.ndarray | None = None) -> TextBatch:
        if indices is None:
            indices = self.sampler.indices(position)
        shape = (len(indices), self.dataset.sequence)
        (first, last), (lo, hi) = self.box(shape)
        mine = [int(index) for index in indices[first:last]]
        blocks = np.empty((3, len(mine), hi - lo), np.int64)
        documents = np.empty((len(mine), shape[1]), np.int64) if self.documents else None
        with span("read windows", "io"):
            for row, index in enumerate(mine):
                if hi > lo:
                    window = self.dataset.read(index, self.order[lo:hi])
                    blocks[:, row] = window.tokens, window.targets, window.positions
                if documents is not None:
                    documents[row] = self.dataset.documents(index, self.order)
        counted = sum(self.dataset.counted(int(index)) for index in indices)
        return TextBatch(*blocks, documents, shape, counted, indices, position, self.sampler.after(position))


class TextBatches(TensorBatches):
    """Global batches of windows as pairs (`Text`, targets), each block read by its rank without a message.

    Parameters
    ----------
    dataset : TextDataset
        The same files on every rank.
    batch : int
        Windows in a global batch, over all ranks; the last of an epoch holds the remainder.
    layout : Layout
        Of (N, S).
    mesh : Mesh, optional
        The current mesh by default.
    order : {"natural", "zigzag"}
        Which token lies where in the sequence dim; see `hpcpar.layout.sequence.zigzag`.
    documents : bool
        Give the model the document of each token, so that none sees another document.
    restart : bool
        Give it positions that begin anew with each document.
    ignore_index : int
        The target of places behind the end of a text.
    seed, shuffle
        Order of the windows, as in `Sampler`.
    depth : int
        Batches read ahead.
    transfer : callable, optional
        Applied to each local array before it becomes a shard.
    """

    def __init__(
        self,
        dataset: TextDataset,
        batch: int,
        layout: Layout,
        *,
        mesh: Mesh | None = None,
        order: str = "natural",
        documents: bool = False,
        restart: bool = False,
        ignore_index: int = IGNORED,
        seed: int = 0,
        shuffle: bool = True,
        depth: int = 2,
        transfer: Callable[[np.ndarray], Any] = lambda array: array,
    ):
        self.mesh, self.layout = mesh or current_mesh(), layout
        self.restart, self.ignore_index, self.transfer = restart, ignore_index, transfer
        box = box_of(self.mesh, layout)
        box((batch, dataset.sequence))  # a layout that does not fit is an error here, not later
        n = dataset.sequence
        split = self.mesh.length(*layout.on((batch, n), self.mesh.shape).entry(1))
        places = zigzag(n, split) if order == "zigzag" else np.arange(n)
        self.loader = TextLoader(dataset, Sampler(len(dataset), batch, seed, shuffle), box, places, documents, depth)

    def pair(self, batch: TextBatch) -> tuple[Text, Tensor]:
        targets = batch.targets
        if self.ignore_index != IGNORED:
            targets = np.where(targets == IGNORED, self.ignore_index, targets)
        tokens, target = self._tensor(batch, batch.tokens), self._tensor(batch, targets)
        positions = self._tensor(batch, batch.positions) if self.restart else None
        documents = None
        if batch.documents is not None:
            documents = self._tensor(batch, batch.documents, Layout(self.layout.entry(0)))
        return Text(tokens, positions, documents, batch.counted), target

    def _tensor(self, batch: TextBatch, block: np.ndarray, layout: Layout | None = None) -> Tensor:
        return from_shard(self.transfer(block), batch.shape, self.mesh, layout or self.layout)
