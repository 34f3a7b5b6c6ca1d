"""What the launcher says of this process, read from its environment: no MPI is started.

Launchers put rank and size into variables of their own. The process manager that started a process directly is looked
at first, since a launcher inside an allocation inherits the variables of the batch system around it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

# rank, size, rank in the node, size of the node; Open MPI (prterun, mpirun), Hydra (MPICH, Intel MPI), HPE Cray PALS,
# Flux. Hydra also serves others with PMI_RANK alone, and srun --mpi=pmi2 sets it too.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    ("PMIX_RANK", "", "", ""),
)


@dataclass(frozen=True)
class Process:
    """Rank and size as the launcher gave them; `node_rank` and `node_size` are None where it does not say.

    `variable` names where `size` comes from; "" for a process that no launcher started.
    """

    rank: int = 0
    size: int = 1
    node_rank: int | None = None
    node_size: int | None = None
    variable: str = ""


def this_process(env: Mapping[str, str] | None = None) -> Process:
    """Return what the innermost launcher says of the process with environment `env` (its own by default).

    A shell of a batch job is no task of it: without a step of its own, a process inside an allocation is alone.
    """
    env = os.environ if env is None else env
    step = _slurm_step(env)
    for rank, size, node_rank, node_size in _VARIABLES:
        if (number := _integer(env, rank)) is None:
            continue
        count = _integer(env, size)
        inside = (_integer(env, node_rank), _integer(env, node_size))
        if step.rank == number and count in (None, step.size):  # srun set these variables, and knows the rest
            size, count = (size, count) if count else (step.variable, step.size)
            inside = (step.node_rank, step.node_size) if None in inside else inside
        return Process(number, count, *inside, variable=size) if count else Process(number, number + 1, *inside)
    return step


def _slurm_step(env: Mapping[str, str]) -> Process:
    """What srun says. A batch script has SLURM_PROCID too, but no number of tasks of its step."""
    size, rank = _integer(env, "SLURM_STEP_NUM_TASKS"), _integer(env, "SLURM_PROCID")
    if size is None or rank is None or rank >= size:
        return Process()
    counts = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _integer(env, "SLURM_NODEID")
    here = counts[node] if node is not None and node < len(counts) else None
    return Process(rank, size, _integer(env, "SLURM_LOCALID"), here, "SLURM_STEP_NUM_TASKS")


def expand_counts(text: str) -> list[int]:
    """Return one number a node from Slurm's short form: ``"4(x2),3"`` is ``[4, 4, 3]``; [] for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def lost_ranks(world: int, env: Mapping[str, str] | None = None) -> str:
    """Say what is wrong where a launcher started several processes that MPI takes for jobs of one rank each; else "".

    Parameters
    ----------
    world : int
        Number of ranks that MPI sees.
    env : mapping, optional
        Environment of this process; its own by default.

    Notes
    -----
    What counts is the step that this process belongs to. A job of one task, a step of one task in a larger allocation,
    and a shell on an allocated node (``salloc``, a batch script) are in order.
    """
    process = this_process(env)
    if world > 1 or process.size <= 1 or not process.variable:
        return ""
    return (
        f"the launcher started {process.size} processes ({process.variable}), but MPI sees one: launcher and MPI "
        "library do not belong together. Use the mpiexec that came with the library, or another srun --mpi=... "
        "(srun --mpi=list shows them: pmi2 for MPICH, pmix for Open MPI)"
    )
