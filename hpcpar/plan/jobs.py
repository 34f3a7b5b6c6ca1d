"""From a configuration to what a dry run needs: the mesh, the shape of a sample, the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from hpcpar.grid import resolve_lengths
from hpcpar.plan.dry import Task
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.train import build
from hpcpar.train.config import Job
from hpcpar.train.tasks import make_task


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
    """Return the shape of one input sample; see `hpcpar.train.tasks.Task.sample`."""
    return make_task(job).sample(given)


def task_of(job: Job, sample: Sequence[int]) -> Task:
    """Return the training step of a configuration.

    Parameters
    ----------
    sample : sequence of int
        Shape of one input sample.
    """
    every = VirtualMesh(dict.fromkeys(job.mesh, 1))
    outline = make_task(job).outline(sample)
    return replace(
        outline,
        model=lambda: build.recomputed(job, outline.model()),
        spread=build.make_spread(job, every),
        optimizer=lambda model: build.make_optimizer(job, model, 1),
        clip=job.optim.clip,
        dtype=job.run.dtype,
    )
