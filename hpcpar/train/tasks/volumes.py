"""Tasks on volumes (C, D, H, W): labels for every voxel, or a few numbers for each volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.autograd import no_grad
from hpcpar.data import Batches, DataError, HDF5Dataset, make_transforms
from hpcpar.data.augment import Log1p
from hpcpar.layout.layout import Layout
from hpcpar.models import CosmoFlow, Swin3d, UNet3d, ViT3d
from hpcpar.plan.dry import Task as Outline
from hpcpar.tensors import Tensor
from hpcpar.train import build, config
from hpcpar.train.config import ConfigError, Job
from hpcpar.train.scores import Confusion, Errors, Score
from hpcpar.train.tasks.base import Task

if TYPE_CHECKING:
    from hpcpar.mesh import Mesh
    from hpcpar.models import Spread

NAMES = {
    "universe": ("full", "unitPar"),
    "volume": ("volume", "segmentation"),
    "stacked": ("x", "y"),
    "auto": (None, None),
}
"""Names of input and target in the files of a format."""


class Volumes(Task):
    """What both have in common: files, augmentation, precision of the convolutions."""

    target_dtype: Any = None  # the run's
    target_layout = "samples"  # of `Spread`

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._loss = build.make_loss(job.loss)

    def network(self) -> nn.Module:
        """Return the network as configured."""
        raise NotImplementedError(f"{type(self).__name__} has no network")

    def check_samples(self, dataset: HDF5Dataset, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
        """Raise DataError or ConfigError for samples that the network cannot take."""
        raise NotImplementedError(f"{type(self).__name__} takes no samples")

    def make_model(self) -> nn.Module:
        return self.in_precision(self.network())

    def open(self, source: str | Sequence[str]) -> HDF5Dataset:
        """Return the samples of a folder or of files, under the names that the configuration gives or implies."""
        data = self.job.data
        input, target = NAMES[data.format]
        return HDF5Dataset(
            source,
            data.input or input,
            data.target or target,
            stacked=data.format == "stacked" or None,
            channels=self.job.model.channels,
        )

    def make_batches(self, which: str, mesh: Mesh, spread: Spread) -> Batches | None:
        job = self.job
        source = getattr(job.data, which)
        if not source:
            return None
        dataset = self.open(source)
        shape = dataset.shape(dataset.input)
        if len(shape) != 4:
            raise DataError(f"{dataset!r}: samples have shape {shape}; a volume is (C, D, H, W)")
        self.check_samples(dataset, shape, dataset.shape(dataset.target))
        train = which == "train"
        fixed = [Log1p()] if job.data.log1p else []
        return Batches(
            dataset,
            job.data.batch,
            spread.volume,
            getattr(spread, self.target_layout),
            mesh=mesh,
            seed=job.run.seed,
            shuffle=train,
            transforms=[*fixed, *(make_transforms(**vars(job.data.augment), seed=job.run.seed) if train else ())],
            dtype=np.dtype(job.run.dtype),
            target_dtype=self.target_dtype,
            depth=job.data.prefetch,
            transfer=build.to_device(job.run.device),
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss(output, target)

    def sample(self, given: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return (C, D, H, W); `given` is (D, H, W), or one edge of a cube.

        Raises
        ------
        ConfigError
            Another number of lengths.
        """
        channels = self.job.model.channels
        if given:
            if len(given) not in (1, 3) or min(given) < 1:
                raise ConfigError(f"a sample has three lengths, or one as an edge of a cube, got {tuple(given)}")
            return (channels, *(given if len(given) == 3 else given * 3))
        return self.own_sample()

    def own_sample(self) -> tuple[int, ...]:
        """Return (C, D, H, W) of what the data files hold.

        Raises
        ------
        ConfigError
            The configuration names none.
        """
        data = self.job.data
        for source in (data.train, data.validation, data.test):
            if source:
                with self.open(source) as dataset:
                    return tuple(dataset.shape(dataset.input))
        raise ConfigError("the configuration names no data and the model takes any size: give one with --shape D,H,W")


class Segmentation(Volumes):
    """A class for every voxel."""

    target_dtype, target_layout = np.int64, "labels"

    def network(self) -> nn.Module:
        s = self.job.model
        options = {key: value for key, value in vars(s).items() if key not in ("name", "channels")}
        if isinstance(s, config.ViT3d):
            return ViT3d(s.channels, **{**options, "size": s.size or None})
        return (Swin3d if isinstance(s, config.Swin3d) else UNet3d)(s.channels, **options)

    @property
    def kept_in_float32(self) -> tuple[str, ...]:  # the first convolution, and the layer that makes the logits
        s = self.job.model
        if isinstance(s, config.UNet3d):
            return "down0.conv1", "head"
        refined = not isinstance(s, config.ViT3d) or s.refine
        return "embedding.conv", "head" if refined else "voxels"

    def check_samples(self, dataset: HDF5Dataset, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
        if target != shape[1:]:
            raise DataError(f"{dataset!r}: labels have shape {target}, the volume needs {shape[1:]}")

    @property
    def ignore_index(self) -> int:
        """The label that counts nowhere."""
        return getattr(self.job.loss, "ignore_index", -100)

    def count(self, inputs: Tensor, target: Tensor) -> float:
        """Return what the mean of the cross entropy divides by: voxels that are not ignored, by their class weights.

        The Dice loss is no mean over voxels; beside other batches it counts by them too.
        """
        labels, weights = target.shard, getattr(self.job.loss, "weights", ())
        valid = labels != self.ignore_index
        if weights:
            numbers = [float((valid & (labels == k)).sum()) * weight for k, weight in enumerate(weights)]
        else:
            numbers = [float(valid.sum())]
        comm = target.mesh.comm(*target.sig.split_axes)
        return float(comm.all_reduce(np.array([sum(numbers)]))[0])

    def score(self, batches: Batches) -> Score:
        return Confusion(self.job.model.classes, self.ignore_index)

    def examples(self, model: nn.Module, batches: Batches) -> dict[str, dict[str, Tensor]]:
        """Return input, label and prediction of the first sample."""
        batches.position = type(batches.position)()
        x, y = next(iter(batches))
        model.eval()
        with no_grad():
            predicted = F.argmax(self.forward(model, x), 1)
        model.train()
        return {"prediction.h5": {"input": _first(x), "label": _first(y), "prediction": _first(predicted)}}

    def outline(self, sample: Sequence[int]) -> Outline:
        batch = self.job.data.batch
        return Outline(self.make_model, self.loss, (batch, *sample), (batch, *sample[1:]))


class Regression(Volumes):
    """A few numbers for each volume, which is a cube of a given width."""

    kept_in_float32 = ("conv1",)

    def network(self) -> nn.Module:
        s = self.job.model
        return CosmoFlow(s.width, s.channels, s.outputs, s.batch_norm, s.norm_scope, s.dropout, s.base, s.norm_momentum)

    def check_samples(self, dataset: HDF5Dataset, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
        model = self.job.model
        if shape[1:] != (model.width,) * 3:
            raise ConfigError(f"model.width is {model.width}, but {dataset!r} holds volumes of {shape[1:]}")
        if target != (model.outputs,):
            raise ConfigError(f"model.outputs is {model.outputs}, but {dataset!r} holds targets of shape {target}")

    def count(self, inputs: Tensor, target: Tensor) -> float:
        """Return the number of samples."""
        return float(target.shape[0])

    def score(self, batches: Batches) -> Score:
        return Errors()

    def own_sample(self) -> tuple[int, ...]:
        return (self.job.model.channels, *(self.job.model.width,) * 3)

    def outline(self, sample: Sequence[int]) -> Outline:
        batch = self.job.data.batch
        return Outline(self.make_model, self.loss, (batch, *sample), (batch, self.job.model.outputs))


def _first(x: Tensor) -> Tensor:
    """The first sample of a batch whose samples may be split: its owner's block, others none."""
    rest = Layout(None, *[x.sig.dims[d] for d in range(1, x.ndim)])
    return F.repartition(x, rest)[0]
