"""From a configuration to what a dry run needs: the mesh, the shape of a sample, the task."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpcpar.grid import resolve_lengths
from hpcpar.plan.dry import Task
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.train import build, config
from hpcpar.train.config import ConfigError, Job


def mesh_shape(job: Job, ranks: int | None = None) -> dict[str, int]:
    """Return the axes and lengths of the configured mesh.

    Parameters
    ----------
    ranks : int, optional
        What an axis of -1 is found from; without it such an axis is 1 long.

    Raises
    ------
    MeshError
        The lengths do not multiply to the ranks.
    """
    if ranks is None:
        ranks = prod(n for n in job.mesh.values() if n != -1)
    return resolve_lengths(job.mesh, ranks)


def sample_shape(job: Job, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return (C, D, H, W) of one input sample: as given, as in the data files, or as the model has it.

    Parameters
    ----------
    given : sequence of int, optional
        (D, H, W), or one edge of a cube.

    Raises
    ------
    ConfigError
        Nothing says how large a sample is.
    """
    channels = job.model.channels
    if given:
        if len(given) not in (1, 3) or min(given) < 1:
            raise ConfigError(f"a sample has three lengths, or one as an edge of a cube, got {tuple(given)}")
        return (channels, *(given if len(given) == 3 else given * 3))
    if isinstance(job.model, config.CosmoFlow):
        return (channels, *(job.model.width,) * 3)
    from hpcpar.data import HDF5Dataset

    for source in (job.data.train, job.data.validation, job.data.test):
        if source:
            names = build.NAMES[job.data.format]
            dataset = HDF5Dataset(source, *names, channels=channels)
            return tuple(dataset.shape(dataset.input))
    raise ConfigError("the configuration names no data and the model takes any size: give one with --shape D,H,W")


def task_of(job: Job, sample: Sequence[int]) -> Task:
    """Return the training step of a configuration.

    Parameters
    ----------
    sample : sequence of int
        (C, D, H, W) of one input sample.
    """
    batch, segments = job.data.batch, isinstance(job.model, config.UNet3d)
    every = VirtualMesh(dict.fromkeys(job.mesh, 1))
    return Task(
        model=lambda: build.make_model(job),
        loss=build.make_loss(job.loss),
        input=(batch, *sample),
        target=(batch, *sample[1:]) if segments else (batch, job.model.outputs),
        spread=build.make_spread(job, every),
        optimizer=lambda model: build.make_optimizer(job, model, 1),
        clip=job.optim.clip,
        dtype=job.run.dtype,
    )
