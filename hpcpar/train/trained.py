"""A decoder as a run left it: its newest checkpoint, on any mesh, and the vocabulary of its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcpar import nn
from hpcpar.checkpoint.choosing import choose
from hpcpar.checkpoint.manifest import CheckpointError
from hpcpar.checkpoint.training import restore_model
from hpcpar.data import TextDataset
from hpcpar.data.text_tokens import Tokens
from hpcpar.mesh import Mesh
from hpcpar.models import Decoder, Spread, place
from hpcpar.nn import init
from hpcpar.train.config import ConfigError, load_job
from hpcpar.train.tasks.choose import make_task
from hpcpar.train.tasks.text import LanguageModelling

CONFIG = "config.toml"


def load_trained(
    run: str | Path, mesh: Mesh, spread: Spread | None = None, say: Callable[[str], None] = print
) -> tuple[Decoder, Tokens]:
    """Return the decoder of a run directory, in evaluation mode, and what its tokens mean. Collective.

    Parameters
    ----------
    run : path
        Run directory of ``hpcpar train``; the data that its configuration names are still there.
    mesh : Mesh
        Need not be the mesh of the run.
    spread : Spread, optional
        The plan; the usual names of axes by default.
    say : callable
        Told on rank 0 of checkpoints that are passed over.

    Raises
    ------
    ConfigError
        The run trained no decoder.
    CheckpointError
        There is no whole checkpoint.
    """
    job = load_job(Path(run, CONFIG))
    task = make_task(job)
    if not isinstance(task, LanguageModelling):
        raise ConfigError(f"{run} trained {job.model.name!r}, which writes no text")
    choice = choose(run, mesh.world, say)
    if choice.checkpoint is None:
        raise CheckpointError(f"{run} holds no checkpoint; checkpoint.every in the configuration leaves some")
    with mesh, init.skipped(), nn.default_dtype(job.run.dtype):
        model = task.make_model()
        place(model, mesh, spread)
    restore_model(choice.checkpoint, model)
    with TextDataset(job.data.train or job.data.validation or job.data.test, job.data.sequence) as dataset:
        return model.eval(), dataset.vocabulary_tokens()
