"""A rank that holds half of each volume needs about half of the memory, and reads half of the bytes."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from hpcpar.testing import mpi_run
from hpcpar.train.config import make_job

SHAPE = (96, 48, 48)


def grow(folder: str, depth: int) -> tuple[float, int]:
    """Train two steps; return how far this rank's resident memory rose above the start, and the bytes it read."""
    import resource

    import numpy as np  # noqa: F401 - what is loaded before does not count
    from mpi4py import MPI

    import hpcpar.kernels  # noqa: F401
    from hpcpar.mesh import Mesh
    from hpcpar.train.trainer import Trainer

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def train(path: str) -> Trainer:
        job = make_job(
            {
                "run": {"steps": 2},
                "mesh": {"batch": 1, "depth": depth},
                "model": {"name": "unet3d", "classes": 2, "base": 4, "levels": 1},
                "data": {"train": path, "batch": 1, "prefetch": 0},
                "loss": {"name": "cross_entropy"},
            }
        )
        trainer = Trainer(job, Mesh(batch=1, depth=depth))
        stream = trainer.train_batches.stream()
        for _ in range(2):
            trainer.train_step([next(stream)])
        return trainer

    train(f"{folder}/small")  # loads libraries and compiles kernels
    before = peak()
    trainer = train(f"{folder}/large")
    MPI.COMM_WORLD.barrier()
    return peak() - before, trainer.train_batches.loader.dataset.bytes_read


@pytest.mark.spawns_mpi
@pytest.mark.watchdog(300)
def test_two_ranks_hold_little_more_than_half_of_a_volume_each_and_read_half(tmp_path):
    rng = np.random.default_rng(0)
    for name, shape in (("small", (8, 8, 8)), ("large", SHAPE)):
        (tmp_path / name).mkdir()
        with h5py.File(tmp_path / name / "0.h5", "w") as file:
            file["volume"] = rng.random((1, *shape), np.float32)
            file["segmentation"] = rng.integers(0, 2, shape).astype(np.uint8)
    alone, bytes_alone = mpi_run(1, grow, str(tmp_path), 1, timeout=200).check().results[0]
    both = mpi_run(2, grow, str(tmp_path), 2, timeout=200).check().results
    assert alone > 50, f"the test is too small to show anything: {alone:.0f} MiB"
    for rank, (growth, read) in both.items():
        assert growth <= 0.6 * alone, f"rank {rank} grew by {growth:.0f} MiB, one process by {alone:.0f} MiB"
        assert read * 2 == bytes_alone
