"""From a configuration to the parts that all tasks share: device, spread, losses, optimizer and its schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcpar import functional as F
from hpcpar import kernels, nn, optim
from hpcpar.launch.devices import choose_device
from hpcpar.mesh import Mesh
from hpcpar.models import Spread
from hpcpar.nn.state import entries
from hpcpar.optim import schedules
from hpcpar.tensors import Tensor
from hpcpar.train import config
from hpcpar.train.config import ConfigError, Job
from hpcpar.train.settings.layout import TRANSFORMER

Loss = Callable[[Tensor, Tensor], Tensor]


def make_spread(job: Job, mesh: Mesh) -> Spread:
    """Return which axes split samples, channels, space and tokens, without those that the mesh does not have."""
    lay = job.layout
    return Spread(
        lay.axes("batch"),
        lay.axes("channels"),
        tuple(lay.axes(dim) for dim in ("depth", "height", "width")),
        lay.axes("sequence"),
        **{option: getattr(lay, option) for option in TRANSFORMER},
    ).on(mesh)


def recomputed(job: Job, model: nn.Module) -> nn.Module:
    """Mark what backward runs again, as ``run.recompute`` and ``run.recompute_ops`` say, and return the model.

    Raises
    ------
    ConfigError
        A pattern that matches nothing, or an operation that there is not.
    """
    run = job.run
    if run.recompute is not None or run.recompute_ops:
        try:
            nn.recompute(model, run.recompute or "", run.recompute_ops or None)
        except ValueError as error:
            raise ConfigError(f"run.{error}") from None
    return model


def require_compute(compute: str, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks where one of them does not multiply as ``run.compute`` says. Collective."""
    if compute == "float32":
        return
    found = mesh.world.gather_objects(kernels.compute_missing(compute))
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
    settings, lr, parameters = job.optim, make_schedule(job, steps), _parameters(job, model)
    if isinstance(settings, config.SGD):
        return optim.SGD(
            parameters, lr, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=settings.weight_decay
        )
    kind = optim.AdamW if isinstance(settings, config.AdamW) else optim.Adam
    return kind(parameters, lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)


def _parameters(job: Job, model: nn.Module) -> Any:
    """What the optimizer is given: the model, or groups with and without weight decay."""
    if job.optim.decay == "all":
        return model
    shown = {id(entry.tensor): len(entry.shape) for entry in entries(model).values()}  # in torch's shapes
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if shown[id(p)] > 1]
    others = [(name, p) for name, p in named if shown[id(p)] < 2]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def to_device(device: str) -> Callable[[np.ndarray], Any]:
    """Return what brings a host array to the device of a run."""
    if device == "cpu":
        return lambda array: array
    import cupy

    return cupy.asarray


def use_device(device: str, mesh: Mesh) -> None:
    """Choose this rank's GPU by what the ranks of its node can see; see `choose_devices`. Collective.

    Raises
    ------
    ConfigError
        CuPy or a GPU is missing.
    """
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
