"""The promise of the package: loss curves of whole networks are the same on one process and on every mesh."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from hpcpar import kernels
from hpcpar.mesh import Mesh
from hpcpar.train.config import make_job
from hpcpar.train.trainer import Trainer

MESHES = {
    1: [{"batch": 1}],
    2: [{"batch": 2}, {"depth": 2}, {"model": 2}],
    3: [{"depth": 3}, {"batch": 3}],
    4: [{"height": 2, "width": 2}, {"batch": 2, "depth": 2}, {"model": 2, "depth": 2}],
}
CASES = [
    pytest.param(mesh, id="x".join(f"{a}{n}" for a, n in mesh.items())) for mesh in MESHES.get(MPI.COMM_WORLD.size, [])
]
STEPS = 20


def write_volumes(folder: Path, count: int, shape: tuple[int, ...]) -> None:
    """Volumes whose labels follow from the input, so that there is something to learn."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for i in range(count):
        volume = rng.standard_normal((1, *shape)).astype(np.float32)
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["volume"] = volume
            file["segmentation"] = np.digitize(volume[0], [-0.5, 0.5]).astype(np.uint8)


def write_universes(folder: Path, count: int, width: int) -> None:
    """Cubes with a known mean, which is what the targets are."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    for i in range(count):
        target = rng.uniform(-1, 1, 4).astype(np.float32)
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["full"] = rng.random((4, width, width, width), np.float32) + target.reshape(4, 1, 1, 1)
            file["unitPar"] = target


def unet_job(folder: Path, dtype: str) -> dict:
    return {
        "run": {"steps": STEPS, "dtype": dtype, "seed": 3},
        "model": {"name": "unet3d", "channels": 1, "classes": 3, "base": 2, "levels": 2, "dropout": 0.2},
        "data": {"train": str(folder), "batch": 2, "augment": {"flip": [0, 2], "noise": 0.05, "bias": 0.1}},
        "optim": {"name": "adamw", "lr": 0.01, "clip": 1.0},
        "schedule": {"name": "cosine", "warmup": 4},
        "loss": {"name": "cross_entropy+dice"},
    }


def cosmoflow_job(folder: Path, dtype: str) -> dict:
    return {
        "run": {"steps": STEPS, "dtype": dtype, "seed": 4},
        "model": {"name": "cosmoflow", "width": 32, "base": 2, "batch_norm": True},
        "data": {"train": str(folder), "batch": 3},
        "optim": {"name": "sgd", "lr": 0.003, "momentum": 0.9, "nesterov": True, "accumulate": 2},
        "loss": {"name": "mse"},
    }


@pytest.fixture
def unet_data(shared_path: Path, comm: MPI.Comm) -> Path:
    """Five volumes: batches of two leave a remainder of one, which some ranks then have nothing of."""
    folder = shared_path / "volumes"
    if comm.rank == 0:
        write_volumes(folder, 5, (9, 8, 10))
    comm.barrier()
    return folder


@pytest.fixture
def cosmoflow_data(shared_path: Path, comm: MPI.Comm) -> Path:
    folder = shared_path / "universes"
    if comm.rank == 0:
        write_universes(folder, 5, 32)
    comm.barrier()
    return folder


def losses(table: dict, mesh: Mesh) -> np.ndarray:
    """The loss of each step, and at the end the norm of all weights."""
    trainer = Trainer(make_job(table), mesh)
    stream = trainer.train_batches.stream()
    accumulate = trainer.job.optim.accumulate
    curve = [trainer.train_step([next(stream) for _ in range(accumulate)]) for _ in range(STEPS)]
    weights = sum(float(np.square(w, dtype=np.float64).sum()) for w in trainer.model.state_dict(numpy=True).values())
    trainer.close()
    return np.array([*curve, weights])


def compare(table: dict, axes: dict[str, int], tolerance: float) -> None:
    full = {"batch": 1, **axes}
    mesh, alone = Mesh(**full), Mesh(MPI.COMM_SELF, batch=1)
    # one process first: every rank computes it and compares for itself
    expected = losses({**table, "mesh": {"batch": 1}}, alone)
    got = losses({**table, "mesh": full}, mesh)
    worst = float(np.max(np.abs(got - expected) / np.abs(expected)))
    alone.free()
    mesh.free()
    assert worst < tolerance, f"loss curves differ by {worst:.2g}: {got} and {expected}"
    assert expected[STEPS - 1] < expected[0], "nothing was learnt, so that little was shown"


@pytest.mark.watchdog(300)
@pytest.mark.parametrize("axes", CASES)
def test_the_unet_trains_alike_on_every_mesh_in_float64(axes, unet_data):
    compare(unet_job(unet_data, "float64"), axes, 1e-10)


@pytest.mark.watchdog(300)
@pytest.mark.parametrize("axes", CASES)
def test_cosmoflow_trains_alike_on_every_mesh_in_float64(axes, cosmoflow_data):
    compare(cosmoflow_job(cosmoflow_data, "float64"), axes, 1e-10)


@pytest.mark.watchdog(300)
@pytest.mark.parametrize("axes", CASES)
def test_the_unet_trains_alike_on_every_mesh_in_float32(axes, unet_data):
    compare(unet_job(unet_data, "float32"), axes, 1e-4)


@pytest.mark.watchdog(300)
@pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning")  # how a processor multiplies such numbers
@pytest.mark.skipif(bool(kernels.bfloat16_missing()), reason=kernels.bfloat16_missing())
@pytest.mark.parametrize("axes", CASES[:1])
def test_cosmoflow_begins_alike_with_convolutions_in_bfloat16_and_learns(axes, cosmoflow_data):
    """Later losses differ: where a sum lies between two numbers of bfloat16, its last bit decides about 2^-8 of it."""
    job = cosmoflow_job(cosmoflow_data, "float32")
    alone, mesh = Mesh(MPI.COMM_SELF, batch=1), Mesh(**{"batch": 1, **axes})
    exact = losses(job, alone)
    job["run"]["compute"] = "bfloat16"
    whole, split = losses(job, alone), losses({**job, "mesh": {"batch": 1, **axes}}, mesh)
    alone.free()
    mesh.free()
    np.testing.assert_allclose(split[0], whole[0], rtol=1e-5)
    np.testing.assert_allclose(split[:3], whole[:3], rtol=1e-2)
    np.testing.assert_allclose(whole[0], exact[0], rtol=1e-2)
    assert whole[0] != exact[0] and split[STEPS - 1] < 0.5 * split[0]


@pytest.mark.watchdog(300)
@pytest.mark.parametrize("axes", CASES)
def test_cosmoflow_trains_alike_on_every_mesh_in_float32(axes, cosmoflow_data):
    compare(cosmoflow_job(cosmoflow_data, "float32"), axes, 1e-4)
