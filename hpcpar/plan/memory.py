"""Whether a step fits into the memory of a rank: found out before anything is allocated, said by all ranks alike."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcpar.kernels.outline.arrays import NotKnown
from hpcpar.plan.dry import Task, dry_run
from hpcpar.plan.table import amount
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.signature import signature

if TYPE_CHECKING:
    from hpcpar.mesh import Mesh
    from hpcpar.train.config import Job


class NotEnoughMemory(MemoryError):
    """A step needs more memory than a rank may use."""


class Limit(NamedTuple):
    """What one rank may still take, and who says so."""

    nbytes: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """What a step takes on this rank, in bytes.

    Attributes
    ----------
    peak : int
        Arrays of the step, parameters and optimizer state included.
    prefetched : int
        Batches that are read ahead.
    memory : dict of str to int
        The parts of the peak, as in `hpcpar.plan.dry.Bill`.
    """

    peak: int
    prefetched: int
    memory: dict[str, int]

    @property
    def need(self) -> int:
        """Bytes in all."""
        return self.peak + self.prefetched


def estimate(task: Task, shape: dict[str, int], rank: int, prefetch: int) -> Estimate:
    """Return what a step takes on one rank of a mesh, with `prefetch` batches read ahead."""
    bill = dry_run(task, shape, rank)
    return Estimate(bill.memory["peak"], prefetched(task, VirtualMesh(shape, rank), prefetch), dict(bill.memory))


def prefetched(task: Task, mesh: VirtualMesh, batches: int) -> int:
    """Return the bytes of this rank's share of batches that are read ahead."""
    (first, target), dtypes, spread = task.layouts(mesh), task.dtypes, task.spread.on(mesh)
    inputs = [(task.input, layout, dtypes[0]) for layout in (first, *(lay(spread) for lay in task.further))]
    return batches * sum(
        signature(mesh, shape, layout).local_size * np.dtype(dtype).itemsize
        for shape, layout, dtype in (*inputs, (task.target, target, dtypes[1]))
    )


def require_memory(mesh: Mesh, job: Job, sample: Sequence[int]) -> Estimate | None:
    """Estimate the step of a configuration, and stop on all ranks where one has not the memory for it. Collective.

    Parameters
    ----------
    mesh : Mesh
    job : Job
    sample : sequence of int
        Shape of one input sample: (C, D, H, W) of a volume, (S,) of a text.

    Returns
    -------
    Estimate or None
        Of this rank; None, with a warning, where a step cannot be estimated.

    Raises
    ------
    NotEnoughMemory
        On all ranks: names the estimated need, the limit, and a mesh on which a sample would fit.
    """
    from hpcpar.plan.jobs import task_of

    task = task_of(job, sample)
    try:
        found = estimate(task, mesh.shape, mesh.rank, job.data.prefetch)
    except NotKnown as error:
        warnings.warn(f"the memory of a step could not be estimated: {error}", RuntimeWarning, stacklevel=2)
        found = None
    limit = device_limit(mesh) if job.run.device == "gpu" else host_limit(mesh.node.size)
    lacking = found is not None and found.need > limit.nbytes
    verdicts = mesh.world.gather_objects((found.need, limit) if lacking else None)
    worst = max((v[0] / max(v[1].nbytes, 1), r) for r, v in enumerate(verdicts) if v) if any(verdicts) else None
    if worst is None:
        return found
    rank = worst[1]
    need, limit = verdicts[rank]
    short = sum(v is not None for v in verdicts)
    raise NotEnoughMemory(
        f"a step on {tuple(task.input)} needs about {amount(need)} on rank {rank}, which may use "
        f"{amount(limit.nbytes)} ({limit.source}); {short} of {mesh.size} ranks have too little. "
        f"{_advice(job, task, mesh.shape, limit)}"
    )


def _advice(job: Job, task: Task, shape: dict[str, int], limit: Limit) -> str:
    """The smallest split of a sample on which a step would fit."""
    usual, dim = task.split
    names = [axis for axis in job.layout.axes(usual) if axis in shape]
    axis = names[0] if names else usual
    others = "; a smaller data.batch helps too" if job.data.batch > 1 else ""
    for parts in (2 * shape.get(axis, 1) << i for i in range(8)):
        if parts > task.input[dim]:
            break
        wider = {**shape, axis: parts}
        need = estimate(task, wider, prod(wider.values()) // 2, job.data.prefetch).need
        if need <= limit.nbytes:
            return f"With mesh.{axis}={parts}, on {prod(wider.values())} ranks, it needs {amount(need)} a rank{others}"
    return f"Split samples or channels over more ranks{others}"


# ---- what a rank may use


def host_limit(ranks_on_node: int) -> Limit:
    """Return what this rank may still take: the least of resource limits, control group and memory of the node."""
    found = [*_resource_limits(), *_group_limits(ranks_on_node), *_node_limits(ranks_on_node)]
    return min(found, default=Limit(float("inf"), "no limit"))


def device_limit(mesh: Any) -> Limit:
    """Return what this rank may take of its GPU, which it may share with other ranks of its node."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    sharing = -(-mesh.node.size // cupy.cuda.runtime.getDeviceCount())
    return Limit(free / sharing, f"free memory of the GPU, {sharing} ranks on it")


def _resource_limits() -> list[Limit]:
    used = _status()
    found = []
    for kind, name, field in (
        (resource.RLIMIT_AS, "address space, ulimit -v", "VmSize"),
        (resource.RLIMIT_DATA, "data, ulimit -d", "VmData"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(Limit(soft - used.get(field, 0), f"{amount(soft)} of {name}, less what the program takes"))
    return found


def _group_limits(ranks: int) -> list[Limit]:
    """Limits of the control group and those above it, shared by the ranks on the node (Slurm makes one a job)."""
    found = []
    for folder, most, now in _groups():
        try:
            limit, used = (folder / most).read_text().strip(), int((folder / now).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            text = f"control group limit of {amount(int(limit))} for {ranks} ranks"
            found.append(Limit((int(limit) - used) / ranks, text))
    return found


def _groups() -> list[tuple[Path, str, str]]:
    root, found = Path("/sys/fs/cgroup"), []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        here = Path(path.lstrip("/"))
        found += [(base / part, *files) for part in (here, *here.parents)]
    return found


def _node_limits(ranks: int) -> list[Limit]:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return [Limit(pages * size / ranks, f"memory of the node, {amount(pages * size)}, for {ranks} ranks")]


def _status() -> dict[str, int]:
    """Sizes of this process in bytes, where the system tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith("Vm"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
