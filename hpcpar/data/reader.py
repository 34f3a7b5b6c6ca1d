"""Reading global batches one after another, ahead of their use: what the loaders of all kinds of data share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hpcpar.data.prefetch import Prefetch
from hpcpar.data.sampler import Position, Sampler
from hpcpar.data.samples import Samples

__all__ = ["BatchReader"]


class BatchReader:
    """Batches from a position on, of which a background thread reads some ahead.

    Parameters
    ----------
    dataset : Samples
    sampler : Sampler
        Over as many samples as the dataset has.
    depth : int
        Batches read ahead by a background thread; 0 reads when asked.

    Notes
    -----
    Iterating runs from `position` to the end of its epoch; `stream` goes on through all epochs. `position` moves when
    the consumer takes a batch, not when it is prefetched, and can be set to resume.
    """

    def __init__(self, dataset: Samples, sampler: Sampler, depth: int = 2):
        if sampler.samples != len(dataset):
            raise ValueError(f"the sampler counts {sampler.samples} samples, the dataset holds {len(dataset)}")
        self.dataset = dataset
        self.sampler = sampler
        self.depth = depth
        self.position = Position()
        self._running: Prefetch | None = None

    def batch(self, position: Position, indices: np.ndarray | None = None) -> Any:
        """Read this rank's part of the global batch that starts at `position`; the result has its end as `after`."""
        raise NotImplementedError(f"{type(self).__name__} reads nothing")

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.sampler)

    @property
    def samples_seen(self) -> int:
        """Samples of all batches taken so far, over all ranks."""
        return self.sampler.seen(self.position)

    def __iter__(self) -> Iterator[Any]:
        """The batches from `position` to the end of its epoch."""
        return self._run(self.sampler.epoch(self.position))

    def stream(self) -> Iterator[Any]:
        """The batches from `position` on, epoch after epoch, without end; prefetching crosses the epochs."""
        return self._run(self._endless(self.position))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, starts: Iterable[tuple[Position, np.ndarray]]) -> Iterator[Any]:
        self.close()
        self._running = running = Prefetch((self.batch(*start) for start in starts), self.depth)
        with running:
            for batch in running:
                self.position = batch.after
                yield batch

    def _endless(self, position: Position) -> Iterator[tuple[Position, np.ndarray]]:
        while True:
            yield from self.sampler.epoch(position)
            position = Position(position.epoch + 1)
