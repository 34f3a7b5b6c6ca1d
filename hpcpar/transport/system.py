"""What this job runs on, as MPI and the operating system tell it: library, ranks by node, cores and thread counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import mpi4py
from mpi4py import MPI

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


@dataclass(frozen=True)
class RankFacts:
    """What one rank says of itself.

    Attributes
    ----------
    host : str
        Name of the node as MPI knows it.
    cores : tuple of int
        Numbers of the cores the operating system lets this rank run on.
    threads : dict
        The thread variables that are set, with their values.
    devices : str or None
        ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """

    host: str
    cores: tuple[int, ...]
    threads: dict[str, str]
    devices: str | None


def world() -> tuple[int, int]:
    """Return rank and number of ranks of the whole job, for what is done before there is a mesh."""
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def mpi_facts() -> dict[str, Any]:
    """Return the MPI library and what it offers: ``library``, ``standard``, ``threads``, ``mpi4py``, ``size``."""
    words = MPI.Get_library_version().replace("\0", "").split("\n")[0].split(",")[0].replace("Version:", "").split()
    return {
        "library": " ".join(words),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": _THREAD_LEVELS[MPI.Query_thread()],
        "mpi4py": mpi4py.__version__,
        "size": MPI.COMM_WORLD.Get_size(),
    }


def gather_rank_facts() -> list[RankFacts]:
    """Return the facts of all ranks, in rank order, on every rank. Collective over all ranks of the job."""
    mine = RankFacts(
        host=MPI.Get_processor_name(),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    return gather(mine)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the job, in rank order, on every rank. Collective over all of them."""
    comm = MPI.COMM_WORLD.Dup()
    values = comm.allgather(value)
    comm.Free()
    return values
