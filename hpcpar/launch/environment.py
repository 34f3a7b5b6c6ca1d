"""Threads of a rank, set before NumPy and the kernels are loaded: their thread pools are made once, when they load."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from hpcpar.launch.process import Process, this_process

# OMP_NUM_THREADS comes first: where the user set it, the others follow it. OpenBLAS of NumPy's wheels, MKL and Numba
# have pools of their own.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def set_threads(env: MutableMapping[str, str] | None = None, cores: int | None = None) -> int:
    """Set the thread variables that are unset and return the number of threads; call it before NumPy is imported.

    Parameters
    ----------
    env : mutable mapping, optional
        Environment to read and to change; the one of this process by default.
    cores : int, optional
        Cores this process may run on; asked of the operating system by default.
    """
    env = os.environ if env is None else env
    threads = threads_of_rank(env, this_process(env), cores or _cores_of_process(), os.cpu_count() or 1)
    for name in THREAD_VARIABLES:
        if not env.get(name, "").strip():
            env[name] = str(threads)
    return threads


def threads_of_rank(env: Mapping[str, str], process: Process, cores: int, machine: int) -> int:
    """Return how many threads a rank should have.

    Parameters
    ----------
    env : mapping
        Environment of the rank. In order: ``OMP_NUM_THREADS`` (its first level), what the batch system gave each task
        (``SLURM_CPUS_PER_TASK``), else the node's cores in this allocation (``SLURM_CPUS_ON_NODE``, ``NCPUS`` of PBS,
        or `machine`) divided by the ranks on the node.
    process : Process
        What the launcher says of the rank; several ranks on an unknown number of nodes count as on one.
    cores : int
        Cores the rank may run on. Never more threads than these, unless ``OMP_NUM_THREADS`` says so: a launcher may
        have bound each rank to cores of its own, or all ranks of a socket to that socket.
    machine : int
        Cores of the node.
    """
    wanted = _positive(env.get("OMP_NUM_THREADS", "").split(",")[0])
    if wanted:
        return wanted
    given = _positive(env.get("SLURM_CPUS_PER_TASK", ""))
    if given:
        return min(given, cores)
    node = _positive(env.get("SLURM_CPUS_ON_NODE", "")) or _positive(env.get("NCPUS", "")) or machine
    ranks = process.node_size or process.size
    return max(1, min(cores, node // ranks))


def _positive(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def _cores_of_process() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
