"""A training that takes a second, and what it gives when nothing happens to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import train_words, write_small_job


@pytest.fixture
def job_file(shared_path, comm) -> Path:
    """The configuration of a small job, the same file on all ranks."""
    if comm.rank == 0:
        write_small_job(shared_path)
    comm.barrier()
    return shared_path / "job.toml"


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """The results of a small job that nothing happened to, its volumes split over two ranks."""
    job_file = write_small_job(tmp_path_factory.mktemp("whole"))
    mpi_run(2, ["-m", "hpcpar", *train_words(job_file, "mesh.batch=1", "mesh.depth=-1")]).check()
    return job_file.parent / "run"
