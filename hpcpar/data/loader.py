"""Batches of local blocks: each rank reads, of each global batch, the box that its layouts give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpcpar.data.augment import Key, Transform
from hpcpar.data.files import DataError
from hpcpar.data.hdf5 import Box, HDF5Dataset
from hpcpar.data.orientation import Orientation
from hpcpar.data.reader import BatchReader
from hpcpar.data.sampler import Position, Sampler
from hpcpar.trace import span

__all__ = ["Batch", "Loader", "whole"]


@dataclass(frozen=True)
class Batch:
    """What one rank holds of a global batch.

    Attributes
    ----------
    input, target : array
        This rank's blocks. Spatial arrays (N, C, *spatial) lie channels last in memory.
    input_shape, target_shape : tuple of int
        Global shapes; dim 0 is the number of samples of this global batch, less than usual for the last of an epoch.
    indices : array of int64
        Sample indices of the whole global batch.
    position, after : Position
        Where the batch starts and where the next one does. A checkpoint stores `after`.
    """

    input: np.ndarray
    target: np.ndarray
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    indices: np.ndarray
    position: Position
    after: Position


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a process that owns everything."""
    return tuple((0, n) for n in shape)


class Loader(BatchReader):
    """Reads, augments and prefetches the local blocks of global batches.

    Parameters
    ----------
    dataset : HDF5Dataset
        Or any object with its ``input``, ``target``, ``shape``, ``dtype``, ``read`` and ``len``.
    sampler : Sampler
        Over as many samples as the dataset has.
    input_box, target_box : callable
        From the global shape of a batch, (N, C, *spatial) or (N, ...), to this rank's (start, stop) in each dim, dim
        0 included. The shape changes with the remainder batch.
    transforms : sequence of Transform
        Augmentations, in order. All of them are functions of (seed, sample, epoch) and of global indices, so the
        blocks of any partition fit together.
    dtype : dtype
        Of the input, and of a floating-point target. Integer targets (labels) keep the file's dtype unless
        `target_dtype` is given.
    depth : int
        Batches read ahead by a background thread; 0 reads when asked.

    """

    def __init__(
        self,
        dataset: HDF5Dataset,
        sampler: Sampler,
        input_box: Callable[[tuple[int, ...]], Box] = whole,
        target_box: Callable[[tuple[int, ...]], Box] = whole,
        transforms: Sequence[Transform] = (),
        dtype=np.float32,
        target_dtype=None,
        depth: int = 2,
    ):
        super().__init__(dataset, sampler, depth)
        self.input_box = input_box
        self.target_box = target_box
        self.transforms = tuple(transforms)
        self.dtype = np.dtype(dtype)
        stored = dataset.dtype(dataset.target)
        self.target_dtype = np.dtype(target_dtype or (dtype if stored.kind == "f" else stored))

    def batch(self, position: Position, indices: np.ndarray | None = None) -> Batch:
        """Read this rank's part of the global batch that starts at `position`."""
        if indices is None:
            indices = self.sampler.indices(position)
        data, n = self.dataset, len(indices)
        input_shape = (n, *data.shape(data.input))
        target_shape = (n, *data.shape(data.target))
        with span("read and augment", "io"):
            x = self._block(data.input, input_shape, self.input_box(input_shape), indices, position.epoch)
            y = self._block(data.target, target_shape, self.target_box(target_shape), indices, position.epoch)
        return Batch(
            input=x,
            target=y,
            input_shape=input_shape,
            target_shape=target_shape,
            indices=indices,
            position=position,
            after=self.sampler.after(position),
        )

    def _block(self, key: str, shape: tuple[int, ...], box: Box, indices: np.ndarray, epoch: int) -> np.ndarray:
        """Fill this rank's block of one dataset, sample by sample."""
        is_input = key == self.dataset.input
        extent = tuple(stop - start for start, stop in box)
        block = channels_last(extent, self.dtype) if is_input else np.empty(extent, self.target_dtype)
        if block.size == 0:
            return block
        for row, index in enumerate(indices[box[0][0] : box[0][1]]):
            sample = Key(int(index), epoch)
            turn = self._orientation(sample, shape[1:])
            values = self.dataset.read(sample.sample, key, turn.source_box(shape[1:], box[1:]))
            if values.dtype.kind == "f" and block.dtype.kind in "iu":
                _require_whole(values, key, sample.sample)
            block[row] = turn.apply(values)
            if is_input:
                for transform in self.transforms:
                    transform.intensity(block[row], sample, shape[1:], box[1:])
        return block

    def _orientation(self, sample: Key, shape: tuple[int, ...]) -> Orientation:
        """How a sample is turned: the input, and a target that ends in the input's spatial dims."""
        extent = self.dataset.shape(self.dataset.input)[1:]
        if not extent or shape[-len(extent) :] != extent:
            return Orientation.identity(0)
        turn = Orientation.identity(len(extent))
        for transform in self.transforms:
            turn = turn.then(transform.orientation(sample, extent))
        return turn


def _require_whole(values: np.ndarray, key: str, sample: int) -> None:
    """Refuse labels that a cast to integers would change."""
    wrong = values[~(np.floor(values) == values)]  # NaN too; infinities have no integer either
    wrong = wrong if wrong.size else values[np.isinf(values)]
    if wrong.size:
        raise DataError(f"sample {sample}: '{key}' holds {wrong[0]}; labels are whole numbers")


def channels_last(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array of logical shape (N, C, *spatial) with memory (N, *spatial, C)."""
    if len(shape) < 3:
        return np.empty(shape, dtype)
    return np.moveaxis(np.empty((shape[0], *shape[2:], shape[1]), dtype), -1, 1)
