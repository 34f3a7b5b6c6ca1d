"""The memory of a rank: what it may take, and the refusal of a step that does not fit, on all ranks alike."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hpcpar.mesh import Mesh
from hpcpar.plan.memory import NotEnoughMemory, estimate, host_limit, prefetched, require_memory
from hpcpar.plan.table import amount
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.testing import mpi_run
from hpcpar.train.config import Job, make_job

SAMPLE = (1, 128, 128, 128)
ALLOWED = 500 << 20


def job(mesh: dict[str, int], **more) -> Job:
    return make_job(
        {
            "mesh": mesh,
            "model": {"name": "unet3d", "base": 4, "levels": 2},
            "loss": {"name": "cross_entropy"},
            "optim": {"name": "sgd", "lr": 1e-3},
            "data": {"prefetch": 1},
            **more,
        }
    )


def data_bytes() -> int:
    """What the limit of data segments counts of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmData")) * 1024


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Allow `more` bytes than the process has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="sizes of a process are read from /proc"
)


@needs_proc
def test_a_step_that_fits_is_estimated(comm) -> None:
    mesh = Mesh(depth=comm.size)
    found = require_memory(mesh, job({"depth": comm.size}), (1, 32, 32, 32))
    assert found.need == found.peak + found.prefetched
    assert found.prefetched == 32**3 // comm.size * (4 + 8) or comm.size == 3
    assert found.memory["activations"] < found.peak < 60 << 20
    mesh.free()


@needs_proc
def test_all_ranks_refuse_a_step_for_which_one_has_no_room(comm) -> None:
    mesh = Mesh(depth=comm.size)
    room = ALLOWED // comm.size if comm.rank == comm.size - 1 else 64 << 30
    with limited(room), pytest.raises(NotEnoughMemory) as caught:
        require_memory(mesh, job({"depth": comm.size}), SAMPLE)
    text = str(caught.value)
    need = estimate_of({"depth": comm.size}, comm.size - 1)
    assert f"on rank {comm.size - 1}, which may use" in text and "ulimit -d" in text
    assert f"needs about {amount(need)}" in text
    assert f"1 of {comm.size} ranks" in text and "With mesh.depth=" in text
    assert isinstance(caught.value, MemoryError)
    mesh.free()


def estimate_of(shape: dict[str, int], rank: int = 0) -> int:
    from hpcpar.plan.jobs import task_of

    settings = job(shape)
    return estimate(task_of(settings, SAMPLE), shape, rank, settings.data.prefetch).need


@pytest.mark.serial
def test_batches_read_ahead_count_with_their_labels() -> None:
    from hpcpar.plan.jobs import task_of

    settings = job({"batch": 2, "depth": 2}, data={"batch": 4})
    task = task_of(settings, (1, 8, 8, 8))
    mesh = VirtualMesh({"batch": 2, "depth": 2})
    assert prefetched(task, mesh, 3) == 3 * (2 * 4 * 8 * 8) * (4 + 8)


@pytest.mark.serial
def test_ranks_on_a_node_share_its_memory() -> None:
    whole, half = host_limit(1), host_limit(2)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < half.nbytes < whole.nbytes <= installed
    assert "1 ranks" in whole.source or "ulimit" in whole.source


@pytest.mark.serial
@needs_proc
def test_the_least_limit_counts() -> None:
    with limited(100 << 20):
        limit = host_limit(1)
        assert limit.nbytes == pytest.approx(100 << 20, rel=0.1) and "ulimit -d" in limit.source
    assert "ulimit -d" not in host_limit(1).source or resource.getrlimit(resource.RLIMIT_DATA)[0] > 0


def train_within(folder: str, parts: int) -> str:
    """Train two steps on one sample with ALLOWED bytes more than the program has; returns how that ended."""
    from hpcpar.train.trainer import train

    settings = job(
        {"depth": parts},
        run={"steps": 2, "dir": f"{folder}/run"},
        data={"train": f"{folder}/sample.h5", "prefetch": 1},
    )
    with limited(ALLOWED):
        try:
            train(settings)
        except NotEnoughMemory as error:
            return str(error)
    return "trained"


@pytest.mark.spawns_mpi
@pytest.mark.watchdog(300)
@needs_proc
def test_a_sample_too_large_for_one_rank_trains_on_four(tmp_path) -> None:
    h5py = pytest.importorskip("h5py")
    need, quarter = estimate_of({"depth": 1}), max(estimate_of({"depth": 4}, r) for r in range(4))
    assert need > 1.5 * ALLOWED and quarter < 0.6 * ALLOWED
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "sample.h5", "w") as file:
        file["volume"] = rng.standard_normal(SAMPLE).astype(np.float32)
        file["segmentation"] = rng.integers(0, 2, SAMPLE[1:]).astype(np.uint8)
    alone = mpi_run(1, train_within, str(tmp_path), 1, timeout=120).check()
    assert f"needs about {amount(need)}" in alone.results[0] and "mesh.depth=" in alone.results[0]
    together = mpi_run(4, train_within, str(tmp_path), 4, timeout=280).check()
    assert together.results == dict.fromkeys(range(4), "trained")
