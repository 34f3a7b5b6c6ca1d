"""From a configuration to its parts: mesh, spread, model, loss, optimizer, batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcpar import functional as F
from hpcpar import kernels, nn, optim
from hpcpar.data import DataError, HDF5Dataset, make_transforms
from hpcpar.data.augment import Log1p
from hpcpar.data.batches import Batches
from hpcpar.launch.devices import choose_device
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models import CosmoFlow, Spread, UNet3d
from hpcpar.optim import schedules
from hpcpar.tensors import Tensor
from hpcpar.train import config
from hpcpar.train.config import ConfigError, Job

Loss = Callable[[Tensor, Tensor], Tensor]

NAMES = {
    "universe": ("full", "unitPar"),
    "volume": ("volume", "segmentation"),
    "stacked": ("x", "y"),
    "auto": (None, None),
}


def make_spread(job: Job, mesh: Mesh) -> Spread:
    """Return which axes split samples, channels and space, without those that the mesh does not have."""
    lay = job.layout
    return Spread(lay.axes("batch"), lay.axes("channels"), tuple(lay.axes(d) for d in ("depth", "height", "width"))).on(
        mesh
    )


# convolutions that multiply in float32 where the configuration does not say which
KEPT_IN_FLOAT32 = {config.UNet3d: ("down0.conv1", "head"), config.CosmoFlow: ("conv1",)}


def make_model(job: Job) -> nn.Module:
    """Return the network, on the current mesh, replicated; `models.place` lays it out.

    Raises
    ------
    ConfigError
        ``run.compute_except`` names no convolution of the network.
    """
    s = job.model
    if isinstance(s, config.UNet3d):
        model: nn.Module = UNet3d(s.channels, s.classes, s.base, s.levels, s.batch_norm, s.norm_scope, s.dropout)
    else:
        model = CosmoFlow(
            s.width, s.channels, s.outputs, s.batch_norm, s.norm_scope, s.dropout, s.base, s.norm_momentum
        )
    if job.run.compute != "float32":
        kept = job.run.compute_except
        try:
            nn.set_compute_dtype(model, job.run.compute, KEPT_IN_FLOAT32[type(s)] if kept is None else kept)
        except ValueError as error:
            raise ConfigError(f"run.compute_except: {error}") from None
    return model


def require_compute(compute: str, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks where one of them does not multiply as ``run.compute`` says. Collective."""
    if compute == "float32":
        return
    found = mesh.world.gather_objects(kernels.bfloat16_missing())
    for host, missing in zip(mesh.node.hosts, found, strict=True):
        if missing:
            raise ConfigError(f"run.compute is {compute!r}, which {host} does not have: {missing}")


def make_loss(settings: Any) -> Loss:
    """Return the function from outputs and targets to a replicated scalar."""
    if isinstance(settings, config.MSE):
        return F.mse_loss
    if isinstance(settings, config.L1):
        return F.l1_loss
    ignore = settings.ignore_index

    def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=settings.weights or None, ignore_index=ignore)

    def dice(output: Tensor, target: Tensor) -> Tensor:
        return F.dice_loss(F.softmax(output, 1), target, ignore_index=ignore)

    if isinstance(settings, config.CrossEntropy):
        return cross_entropy
    if isinstance(settings, config.Dice):
        return dice
    return lambda output, target: cross_entropy(output, target) + dice(output, target) * settings.dice


def make_schedule(job: Job, steps: int) -> optim.optimizer.Schedule:
    """Return the learning rate as a function of the step."""
    lr, settings = job.optim.lr, job.schedule
    if isinstance(settings, config.Step):
        chosen = schedules.step(lr, settings.at, settings.factor)
    elif isinstance(settings, config.Cosine):
        chosen = schedules.cosine(lr, steps, settings.final * lr)
    elif isinstance(settings, config.Polynomial):
        chosen = schedules.polynomial(lr, steps, settings.power, settings.final * lr)
    else:
        chosen = schedules.constant(lr)
    return schedules.warm_up(chosen, settings.warmup) if settings.warmup else chosen


def make_optimizer(job: Job, model: nn.Module, steps: int) -> optim.Optimizer:
    """Return the optimizer with its schedule."""
    settings, lr = job.optim, make_schedule(job, steps)
    if isinstance(settings, config.SGD):
        return optim.SGD(
            model, lr, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=settings.weight_decay
        )
    kind = optim.AdamW if isinstance(settings, config.AdamW) else optim.Adam
    return kind(model, lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)


def make_batches(job: Job, which: str, mesh: Mesh, spread: Spread) -> Batches | None:
    """Return the batches of ``train``, ``validation`` or ``test``; None where the configuration names no files.

    Training batches are shuffled and augmented; of the others each sample comes once, in order.
    """
    source = getattr(job.data, which)
    if not source:
        return None
    input_name, target_name = NAMES[job.data.format]
    dataset = HDF5Dataset(source, input_name, target_name, channels=job.model.channels)
    _check_samples(job, dataset)
    train = which == "train"
    segments = isinstance(job.model, config.UNet3d)
    augment = job.data.augment
    fixed = [Log1p()] if job.data.log1p else []
    return Batches(
        dataset,
        job.data.batch,
        spread.volume,
        spread.labels if segments else Layout(spread.batch),
        mesh=mesh,
        seed=job.run.seed,
        shuffle=train,
        transforms=[*fixed, *(make_transforms(**vars(augment), seed=job.run.seed) if train else ())],
        dtype=np.dtype(job.run.dtype),
        target_dtype=np.int64 if segments else None,
        depth=job.data.prefetch,
        transfer=_to_device(job.run.device),
    )


def _check_samples(job: Job, dataset: HDF5Dataset) -> None:
    """Shapes that the network cannot take are found before the first step."""
    shape, target = dataset.shape(dataset.input), dataset.shape(dataset.target)
    if len(shape) != 4:
        raise DataError(f"{dataset!r}: samples have shape {shape}; a volume is (C, D, H, W)")
    if isinstance(job.model, config.UNet3d):
        if target != shape[1:]:
            raise DataError(f"{dataset!r}: labels have shape {target}, the volume needs {shape[1:]}")
        return
    if shape[1:] != (job.model.width,) * 3:
        raise ConfigError(f"model.width is {job.model.width}, but {dataset!r} holds volumes of {shape[1:]}")
    if target != (job.model.outputs,):
        raise ConfigError(f"model.outputs is {job.model.outputs}, but {dataset!r} holds targets of shape {target}")


def _to_device(device: str) -> Callable[[np.ndarray], Any]:
    if device == "cpu":
        return lambda array: array
    import cupy

    return cupy.asarray


def use_device(device: str, mesh: Mesh) -> None:
    """Choose this rank's GPU by what the ranks of its node can see; see `choose_devices`. Collective."""
    if device == "cpu":
        return
    try:
        import cupy

        runtime = cupy.cuda.runtime
        # the PCI address alone is the same for all MIG parts of one card
        mine = [
            f"{runtime.deviceGetPCIBusId(i)} {runtime.getDeviceProperties(i).get('uuid')}"
            for i in range(runtime.getDeviceCount())
        ]
    except ImportError:
        raise ConfigError("run.device is 'gpu', but CuPy is not installed: pip install 'hpcpar[gpu]'") from None
    except Exception as error:  # cupy raises its runtime's own errors where there is no driver or no device
        raise ConfigError(f"run.device is 'gpu', but no GPU can be used: {error}") from error
    choice, crowded = choose_device(mesh.node.hosts, mesh.world.gather_objects(mine), mesh.rank)
    if crowded and mesh.rank == 0:
        sys.stderr.write(f"hpcpar: warning: {crowded}\n")
    cupy.cuda.Device(choice.index).use()
