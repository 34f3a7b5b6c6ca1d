"""Order of samples: a function of (seed, epoch), the same on every rank and for every mesh."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hpcpar.data.streams import permutation, stream

__all__ = ["Position", "Sampler"]


@dataclass(frozen=True, order=True)
class Position:
    """Place in the endless sequence of epochs: `sample` samples of epoch `epoch` have been used.

    Counted in samples, not in batches, so a run that resumes with another batch size neither repeats nor skips any.
    """

    epoch: int = 0
    sample: int = 0

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint; ``Position(**state)`` restores it."""
        return {"epoch": self.epoch, "sample": self.sample}


@dataclass(frozen=True)
class Sampler:
    """Global batches of sample indices. Of each batch a rank takes the block that its layout gives it along dim 0.

    Parameters
    ----------
    samples : int
        Samples in the data set.
    batch : int
        Samples in a global batch, over all ranks. The last batch of an epoch holds the remainder: every epoch uses
        every sample once. A mean over such a batch divides by its own length.
    seed : int
        Together with the epoch, decides the order.
    shuffle : bool
        False keeps the order of the files (validation, test).
    """

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    _order: object = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self):
        if self.samples < 1:
            raise ValueError(f"{self.samples} samples: there is nothing to make batches of")
        if self.batch < 1:
            raise ValueError(f"global batch size {self.batch}: it is at least 1")
        object.__setattr__(self, "_order", functools.lru_cache(maxsize=2)(self._make_order))

    def __len__(self) -> int:
        """Batches in an epoch, the remainder batch included."""
        return -(-self.samples // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """Sample indices of an epoch in the order of use, shape (samples,), int64, read-only."""
        return self._order(epoch)

    def indices(self, position: Position) -> np.ndarray:
        """The global batch that starts at a position: 1 to `batch` sample indices.

        Raises
        ------
        ValueError
            The position is outside of an epoch.
        """
        if not 0 <= position.sample < self.samples:
            raise ValueError(f"{position} is outside of an epoch of {self.samples} samples")
        return self.order(position.epoch)[position.sample : position.sample + self.batch]

    def after(self, position: Position) -> Position:
        """The position after the batch that starts at `position`."""
        sample = position.sample + len(self.indices(position))
        return Position(position.epoch + 1, 0) if sample == self.samples else Position(position.epoch, sample)

    def seen(self, position: Position) -> int:
        """Samples used before a position, over all epochs: what learning-rate schedules count."""
        return position.epoch * self.samples + position.sample

    def epoch(self, position: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """(start, indices) of the batches from `position` to the end of its epoch."""
        epoch = position.epoch
        while position.epoch == epoch:
            yield position, self.indices(position)
            position = self.after(position)

    def _make_order(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            order = permutation(self.seed, stream("order", epoch), self.samples)
        else:
            order = np.arange(self.samples)
        order.setflags(write=False)
        return order
