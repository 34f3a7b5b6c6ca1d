"""Which checkpoint all ranks go on from: the newest that every rank finds whole. Everybody or nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcpar.checkpoint.folder import candidates
from hpcpar.checkpoint.manifest import CheckpointError
from hpcpar.checkpoint.reading import Checkpoint
from hpcpar.together import on_root
from hpcpar.transport import Comm


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, or None where there is none at all; steps that were passed over, and why."""

    checkpoint: Checkpoint | None
    passed_over: dict[Path, str]


def choose(path: str | Path, comm: Comm, say: Callable[[str], None]) -> Choice:
    """Find the newest whole checkpoint. Collective; ranks share the reading, and all get the same answer.

    Parameters
    ----------
    path : path
        One checkpoint, a folder of them, or a run directory with such a folder.
    say : function
        Told on rank 0 of every checkpoint that is passed over.

    Raises
    ------
    CheckpointError
        On all ranks: there are checkpoints, and none of them is whole. Names each and what is wrong with it.
    OSError
        On all ranks: the path is a file, or a folder that may not be read.
    """
    found = on_root(comm, lambda: candidates(Path(path)))
    passed_over: dict[Path, str] = {}
    for candidate in found:
        checkpoint, fault = _open(candidate, comm)
        faults = comm.gather_objects(fault)
        told = {text: rank for rank, text in reversed(list(enumerate(faults))) if text is not None}
        if not told:
            return Choice(checkpoint, passed_over)
        text = "; ".join(f"{text} (rank {rank})" for text, rank in told.items())
        passed_over[candidate] = text
        if comm.rank == 0:
            say(f"WARNING: {candidate} cannot be used: {text}")
    if passed_over:
        lines = "".join(f"\n  {candidate.name}: {text}" for candidate, text in passed_over.items())
        raise CheckpointError(f"no checkpoint in {path} is whole:{lines}")
    return Choice(None, {})


def _open(path: Path, comm: Comm) -> tuple[Checkpoint | None, str | None]:
    try:
        checkpoint = Checkpoint(path)
        checkpoint.verify(comm.rank, comm.size)
    except (CheckpointError, OSError) as error:
        return None, str(error)
    return checkpoint, None
