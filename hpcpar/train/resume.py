"""Going on from a checkpoint: what a run stores beside arrays, and how a run, perhaps of another shape, takes it up."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcpar import random
from hpcpar.checkpoint.choosing import choose
from hpcpar.checkpoint.manifest import CheckpointError
from hpcpar.checkpoint.reading import Checkpoint
from hpcpar.checkpoint.training import restore_model, restore_optimizer
from hpcpar.data.sampler import Position
from hpcpar.together import on_root
from hpcpar.train import toml
from hpcpar.train.config import dump_job
from hpcpar.transport.system import mpi_facts
from hpcpar.version import __version__

if TYPE_CHECKING:
    from hpcpar.train.trainer import Trainer

AUTO = "auto"

# where a run may differ from the one it continues without a word
_FREE = ("run.dir", "run.log_every", "run.validate_every", "run.watchdog", "mesh.", "checkpoint.", "data.prefetch")


def training_state(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint stores beside arrays, optimizer numbers and random state: the same on all ranks."""
    sampler = trainer.train_batches.loader.sampler
    return {
        "step": trainer.step,
        "samples": trainer.train_batches.samples_seen,
        "position": trainer.train_batches.position.state_dict(),
        "data": {"samples": sampler.samples, "batch": sampler.batch, "seed": sampler.seed},
        "accumulate": trainer.job.optim.accumulate,
        "recent": trainer.recent,
        "lr": trainer.last_lr,
        "outstanding": trainer.outstanding,
        "scaler": trainer.scaler.state_dict(),
        "skipped": trainer.skipped,
        "record": trainer.history[-1] if trainer.history else {},
        "seconds": trainer.seconds(),
        "mesh": dict(trainer.mesh.shape),
        "configuration": dump_job(trainer.job),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what computed a checkpoint."""
    return {
        "hpcpar": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "mpi": mpi_facts()["library"],
    }


def resume(trainer: Trainer, where: str, say: Callable[[str], None]) -> bool:
    """Bring a trainer to the newest whole checkpoint. Collective.

    Parameters
    ----------
    where : str
        ``auto``: the run's own directory, where having none yet is fine; or a checkpoint, a folder of checkpoints, or
        a run directory.
    say : function
        Prints on rank 0.

    Returns
    -------
    bool
        Whether there was one; False only for ``auto``.

    Raises
    ------
    CheckpointError
        On all ranks: there is none, none is whole, or it does not fit.
    """
    comm, own = trainer.mesh.world, trainer.folder
    path = own.path if where == AUTO else Path(where)
    choice = choose(path, comm, say)
    if choice.checkpoint is None:
        if where != AUTO:
            raise CheckpointError(f"--resume {where}: there is no checkpoint in it")
        say(f"WARNING: no checkpoint in {path}: starting from scratch")
        return False
    checkpoint = choice.checkpoint
    say(f"resuming from {checkpoint.path}, step {checkpoint.step}")
    restore(trainer, checkpoint, say)
    for line in on_root(comm, lambda: _clear_the_way(trainer, checkpoint, choice.passed_over)):
        say(line)
    return True


def restore(trainer: Trainer, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
    """Load everything; says what is not as it was. No message."""
    state = checkpoint.state
    restore_model(checkpoint, trainer.model)
    if "position" not in state:
        say("  it holds weights alone: optimizer, schedule and data begin anew")
        return
    restore_optimizer(checkpoint, trainer.optimizer)
    random.set_state(state["random"])
    for line in differences(state["configuration"], dump_job(trainer.job)):
        say(f"  {line}")
    trainer.step, trainer.recent = state["step"], list(state["recent"])
    trainer.last_lr, trainer.outstanding = state["lr"], state["outstanding"]
    trainer.history = [state["record"]] if state["record"] else []
    trainer.skipped = state.get("skipped", 0)
    if state.get("scaler"):  # else the loss was not scaled before, and begins with the usual scale
        trainer.scaler.load_state_dict(state["scaler"])
    trainer.seconds_before, trainer.records_until = state["seconds"], state["step"] - state["outstanding"]
    _place(trainer, state, say)


def _place(trainer: Trainer, state: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Set data position, and the step where a step means another number of samples than before."""
    sampler = trainer.train_batches.loader.sampler
    position = Position(**state["position"])
    before, now = state["data"], {"samples": sampler.samples, "batch": sampler.batch, "seed": sampler.seed}
    if (before["samples"], before["seed"]) != (now["samples"], now["seed"]):
        say(
            f"  WARNING: the order of samples is another ({before['samples']} samples with seed {before['seed']}, now "
            f"{now['samples']} with {now['seed']}): epoch {position.epoch} begins anew"
        )
        position = Position(position.epoch)
    trainer.train_batches.position = position
    if before == now and state["accumulate"] == trainer.job.optim.accumulate:
        return
    step = equivalent_step(position, now["samples"], now["batch"], trainer.job.optim.accumulate)
    say(
        f"  WARNING: a step was {state['accumulate']} x {before['batch']} samples and is {trainer.job.optim.accumulate}"
        f" x {now['batch']}: {trainer.train_batches.samples_seen} samples seen are {step} steps (were {trainer.step}); "
        "the schedule goes on there"
    )
    trainer.step = trainer.optimizer.steps = step
    trainer.outstanding = False


def equivalent_step(position: Position, samples: int, batch: int, accumulate: int) -> int:
    """Return how many steps of `accumulate` batches lead to a position; remainder batches count as batches."""
    batches = position.epoch * math.ceil(samples / batch) + position.sample / batch
    return round(batches / accumulate)


def differences(before: str, now: str) -> list[str]:
    """Return a line for each key in which two configurations (TOML) differ, but for those that may."""
    old, new = _flat(toml.loads(before)), _flat(toml.loads(now))
    return [
        f"{key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(_FREE)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _clear_the_way(trainer: Trainer, checkpoint: Checkpoint, passed_over: Mapping[Path, str]) -> list[str]:
    """Rename, in the run's own folder, what a later ``--resume auto`` must not take: damaged ones and later steps."""
    own = trainer.folder
    if not own.path.exists():
        return []
    own.clear_leftovers()
    lines = []
    for path in passed_over:
        if os.path.samefile(path.parent, own.path):
            lines.append(f"  {path} is now {own.set_aside(int(path.name.partition('-')[2]), 'damaged').name}")
    if os.path.samefile(checkpoint.path.parent, own.path):
        for step in own.steps():
            if step > checkpoint.step:
                lines.append(f"  {own.at(step)} is now {own.set_aside(step, 'abandoned').name}")
    elif own.steps():
        lines.append(f"  earlier checkpoints are now in {own.retire()}")
    return lines
