"""What a task says of a batch: how much of it counts, so that parts of a batch and parts of an evaluation add up."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcpar.data import DataError
from hpcpar.mesh import Mesh
from hpcpar.train.config import make_job
from hpcpar.train.trainer import Trainer

EXTENT = (6, 4, 4)
IGNORED = 255


@pytest.fixture
def volumes(shared_path: Path, comm) -> Path:
    """Four volumes, of whose voxels none, a quarter, nearly all and all are ignored."""
    folder = shared_path / "volumes"
    if comm.rank == 0:
        folder.mkdir()
        rng = np.random.default_rng(1)
        for i, ignored in enumerate((0, 24, 90, 96)):
            labels = rng.integers(0, 3, EXTENT).astype(np.uint8)
            labels.reshape(96)[:ignored] = IGNORED
            with h5py.File(folder / f"{i}.h5", "w") as file:
                file["volume"], file["segmentation"] = rng.random((1, *EXTENT), np.float32), labels
    comm.barrier()
    return folder


def trainer_on(
    mesh: Mesh, folder: Path, batch: int, accumulate: int, loss: dict, names: dict[str, str] | None = None
) -> Trainer:
    return Trainer(
        make_job({
            "run": {"steps": 4, "dtype": "float64", "dir": str(folder.parent / "run")},
            "model": {"name": "unet3d", "classes": 3, "base": 2, "levels": 1, "batch_norm": False},
            "data": {"train": str(folder), "validation": str(folder), "batch": batch, **(names or {})},
            "optim": {"name": "sgd", "lr": 0.1, "accumulate": accumulate},
            "loss": loss,
            "mesh": {"batch": 1, "depth": -1},
        }),
        mesh,
    )  # fmt: skip


@pytest.mark.parametrize("weights", [[], [1.0, 2.5, 0.5]], ids=["equal classes", "weighted classes"])
def test_parts_of_a_batch_weigh_the_voxels_that_count(weights, volumes):
    mesh = Mesh(batch=1, depth=-1)
    loss = {"name": "cross_entropy", "ignore_index": IGNORED, "weights": weights}
    curves, validation = [], []
    for batch, accumulate in ((4, 1), (1, 4), (2, 2)):
        trainer = trainer_on(mesh, volumes, batch, accumulate, loss)
        validation.append(trainer.evaluate(trainer.validation, "")["loss"])
        stream = trainer.train_batches.stream()
        curves.append([trainer.train_step([next(stream) for _ in range(accumulate)]) for _ in range(4)])
        trainer.close()
    np.testing.assert_allclose(validation, validation[0], rtol=1e-12)
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=1e-10)
    mesh.free()


def test_a_batch_counts_by_what_its_mean_divides_by(volumes):
    expected = []
    for i in range(4):
        with h5py.File(volumes / f"{i}.h5", locking=False) as file:
            labels = file["segmentation"][()]
        expected.append(float(np.array([1.0, 2.5, 0.5])[labels[labels != IGNORED]].sum()))
    mesh = Mesh(batch=1, depth=-1)
    loss = {"name": "cross_entropy", "ignore_index": IGNORED, "weights": [1.0, 2.5, 0.5]}
    trainer = trainer_on(mesh, volumes, 1, 1, loss)
    counts = [trainer.task.count(x, y) for x, y in trainer.validation]
    assert counts == expected and counts[3] == 0
    trainer.close()
    mesh.free()


def test_files_may_hold_their_datasets_under_any_names(volumes, shared_path, comm):
    renamed = shared_path / "renamed"
    if comm.rank == 0:
        renamed.mkdir()
        for path in sorted(volumes.iterdir()):
            with h5py.File(path, locking=False) as old, h5py.File(renamed / path.name, "w") as new:
                new["scan/image"], new["mask"] = old["volume"][()], old["segmentation"][()]
    comm.barrier()
    mesh, loss = Mesh(batch=1, depth=-1), {"name": "cross_entropy", "ignore_index": IGNORED}
    losses = []
    for folder, names in ((volumes, {}), (renamed, {"input": "scan/image", "target": "mask"})):
        trainer = trainer_on(mesh, folder, 2, 1, loss, names)
        assert trainer.task.sample() == (1, *EXTENT)
        losses.append(trainer.train_step([next(trainer.train_batches.stream())]))
        trainer.close()
    assert losses[0] == losses[1]
    with pytest.raises(DataError, match="dataset 'volume' is missing"):
        trainer_on(mesh, renamed, 2, 1, loss, {"format": "volume"})
    mesh.free()
