"""Batches as tensors: the loader's local blocks with the layouts they were read for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcpar.creation import from_shard
from hpcpar.data.augment import Transform
from hpcpar.data.hdf5 import HDF5Dataset
from hpcpar.data.loader import Batch, Loader
from hpcpar.data.orientation import Box
from hpcpar.data.reader import BatchReader
from hpcpar.data.sampler import Position, Sampler
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor

__all__ = ["Batches", "TensorBatches", "box_of"]


class TensorBatches:
    """Global batches as pairs (inputs, target) of tensors: what the trainer knows of any kind of data.

    Attributes
    ----------
    loader : BatchReader
        Reads this rank's part of each batch.
    """

    loader: BatchReader

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)

    @property
    def position(self) -> Position:
        """Where the next batch starts; set it to resume."""
        return self.loader.position

    @position.setter
    def position(self, position: Position) -> None:
        self.loader.position = position

    @property
    def samples_seen(self) -> int:
        """Samples of all batches taken so far, over all ranks."""
        return self.loader.samples_seen

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Pairs from `position` to the end of its epoch."""
        return map(self.pair, self.loader)

    def stream(self) -> Iterator[tuple[Any, Tensor]]:
        """Pairs from `position` on, epoch after epoch, without end."""
        return map(self.pair, self.loader.stream())

    def pair(self, batch: Any) -> tuple[Any, Tensor]:
        """Return what the loader has read as tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no pair")

    def close(self) -> None:
        """Stop reading ahead and close the files."""
        self.loader.close()
        self.loader.dataset.close()

    def __enter__(self) -> TensorBatches:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def box_of(mesh: Mesh, layout: Layout) -> Callable[[tuple[int, ...]], Box]:
    """Return the function from a global shape to this rank's box; it may run in the reading thread."""

    def box(shape: tuple[int, ...]) -> Box:
        # not the interned signature: the table of those belongs to the main thread
        return Signature(mesh, shape, layout.on(shape, mesh.shape)).box

    return box


class Batches(TensorBatches):
    """Global batches of a data set as pairs (input, target) of tensors, each read under its layout without a message.

    Parameters
    ----------
    dataset : HDF5Dataset
        The same files on every rank.
    batch : int
        Samples in a global batch, over all ranks; the last of an epoch holds the remainder.
    layout : Layout
        Of the input, (N, C, *spatial). By default dim 0 is split over the axis ``batch`` if the mesh has one.
    target_layout : Layout, optional
        Of the target. By default its samples, and its spatial dims if it has the input's, are split as the input's.
    mesh : Mesh, optional
        The current mesh by default.
    seed, shuffle
        Order of the samples, as in `Sampler`.
    transforms : sequence of Transform
        Augmentations.
    dtype, target_dtype, depth
        As in `Loader`.
    transfer : callable, optional
        Applied to each local array before it becomes a shard: ``cupy.asarray`` moves it to the device.

    Notes
    -----
    Every rank must take the same number of batches: operations on them are collective. A rank whose block is empty gets
    an empty shard.
    """

    def __init__(
        self,
        dataset: HDF5Dataset,
        batch: int,
        layout: Layout | None = None,
        target_layout: Layout | None = None,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        shuffle: bool = True,
        transforms: Sequence[Transform] = (),
        dtype: Any = np.float32,
        target_dtype: Any = None,
        depth: int = 2,
        transfer: Callable[[np.ndarray], Any] = lambda array: array,
    ):
        self.mesh = mesh or current_mesh()
        if layout is None:
            layout = Layout("batch") if "batch" in self.mesh.shape else Layout()
        self.layout = layout
        self.target_layout = matching_layout(layout, dataset) if target_layout is None else target_layout
        self.transfer = transfer
        for key, lay in ((dataset.input, self.layout), (dataset.target, self.target_layout)):
            # a layout that does not fit is an error here, not later
            box_of(self.mesh, lay)((batch, *dataset.shape(key)))
        self.loader = Loader(
            dataset,
            Sampler(len(dataset), batch, seed, shuffle),
            box_of(self.mesh, self.layout),
            box_of(self.mesh, self.target_layout),
            transforms,
            dtype,
            target_dtype,
            depth,
        )

    def pair(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return (
            from_shard(self.transfer(batch.input), batch.input_shape, self.mesh, self.layout),
            from_shard(self.transfer(batch.target), batch.target_shape, self.mesh, self.target_layout),
        )


def matching_layout(layout: Layout, dataset: HDF5Dataset) -> Layout:
    """Layout of a target whose samples, and spatial dims if it has the input's, are split as the input's."""
    target, spatial = dataset.shape(dataset.target), dataset.shape(dataset.input)[1:]
    if not spatial or target[-len(spatial) :] != spatial:
        return Layout(layout.entry(0))
    between = (None,) * (len(target) - len(spatial))
    return Layout(layout.entry(0), *between, *(layout.entry(2 + d) for d in range(len(spatial))))
