"""Transformers of volumes on every mesh: results, gradients and what they learn are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import functional as F
from hpcpar import nn, optim
from hpcpar.mesh import Mesh
from hpcpar.models import Spread, Swin3d, ViT3d, place
from hpcpar.nn import Module
from hpcpar.parallel import GradientSync
from hpcpar.testing import assert_close_everywhere, collective_assert

MESHES = {
    1: [{"batch": 1}],
    2: [{"depth": 2}, {"height": 2}, {"model": 2}],
    3: [{"depth": 3}],
    4: [{"depth": 2, "height": 2}, {"depth": 2, "model": 2}, {"batch": 2, "depth": 2}],
}
SEED = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``axes`` runs on every mesh of as many ranks as there are."""
    if "axes" in metafunc.fixturenames:
        shapes = MESHES.get(MPI.COMM_WORLD.Get_size(), [])
        metafunc.parametrize("axes", shapes, ids=["x".join(f"{a}{n}" for a, n in s.items()) for s in shapes])


@dataclass
class VolumeNetwork:
    """A network of volumes with one batch, in float64: what it computes on a mesh, and what it learns.

    Attributes
    ----------
    make : callable
        Makes the network on the current mesh.
    x, target : array
        Of the whole batch; targets are labels (N, D, H, W) or numbers (N, outputs).
    """

    make: Callable[[], Module]
    x: np.ndarray
    target: np.ndarray

    def on(self, mesh: Mesh) -> tuple[Module, hp.Tensor, hp.Tensor]:
        """Return the network, placed by its own plan, and the batch."""
        hp.random.manual_seed(SEED)
        with mesh, nn.default_dtype(np.float64):
            model = self.make()
        place(model, mesh)
        spread = Spread().on(mesh)
        labels = spread.labels if self.target.ndim == 4 else spread.samples
        return model, hp.tensor(self.x, mesh, spread.volume), hp.tensor(self.target, mesh, labels)

    def loss(self, y: hp.Tensor, target: hp.Tensor) -> hp.Tensor:
        """Cross-entropy of labels, mean squares of numbers."""
        return F.cross_entropy(y, target) if self.target.ndim == 4 else F.mse_loss(y, target)

    def pass_through(self, mesh: Mesh) -> dict[str, np.ndarray]:
        """Return result, gradient of the input, and gradients of all parameters by name, whole on every rank."""
        model, x, target = self.on(mesh)
        x.requires_grad_()
        y = model(x)
        self.loss(y, target).backward()
        found = {"result": y.numpy(), "input": x.grad.numpy()}
        for name, p in model.named_parameters():
            collective_assert(mesh.world, p.grad is not None, f"no gradient of {name}")
            found[name] = p.grad.numpy()
        return found

    def train(self, mesh: Mesh, steps: int) -> list[float]:
        """Return the losses of AdamW steps on the one batch."""
        model, x, target = self.on(mesh)
        optimizer, sync, losses = optim.AdamW(model, 3e-3), GradientSync(model), []
        for _ in range(steps):
            loss = self.loss(model(x), target)
            losses.append(loss.item())
            sync.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def compare(self, axes: dict[str, int], tolerance: float = 1e-12) -> None:
        """Compare a pass on a mesh of all ranks with the pass on one. Collective."""
        alone, mesh = Mesh(MPI.COMM_SELF, batch=1), Mesh(**axes)
        expected, got = self.pass_through(alone), self.pass_through(mesh)
        largest = max(np.abs(g).max() for name, g in expected.items() if name != "result")
        for name, array in expected.items():
            # gradients that vanish but for rounding (of the bias of keys) are held to the scale of the others
            scale = np.append(array, largest) if np.abs(array).max() < 1e-10 * largest else array
            mine = np.append(got[name], largest) if scale is not array else got[name]
            assert_close_everywhere(mesh.world, mine, scale, tolerance, name)
        alone.free()
        mesh.free()

    def compare_training(self, axes: dict[str, int], steps: int = 20, tolerance: float = 1e-10) -> None:
        """Compare the losses on a mesh of all ranks with those on one. Collective."""
        alone, mesh = Mesh(MPI.COMM_SELF, batch=1), Mesh(**axes)
        expected, got = self.train(alone, steps), self.train(mesh, steps)
        worst = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
        collective_assert(mesh.world, worst < tolerance, f"losses differ by {worst:.2g}: {got} and {expected}")
        assert expected[-1] < 0.9 * expected[0], "nothing was learnt, so that little was shown"
        alone.free()
        mesh.free()


SIZE = (9, 10, 7)
VIT = {"width": 12, "depth": 2, "patch": (2, 4, 4), "mlp_ratio": 1.5}
VITS = {
    "voxels": {"classes": 3, "heads": 2},
    "refined": {"classes": 3, "heads": 3, "refine": 4},
    "learned": {"classes": 3, "heads": 4, "positions": "learned", "size": SIZE},
    "numbers": {"outputs": 2, "heads": 4},
}
SWIN = {"width": 4, "depths": (2, 1), "heads": (2, 2), "mlp_ratio": 1.5, "base": 3}
SWINS = {
    "even windows": ((8, 8, 8), {"patch": 2, "window": 2}),
    "uneven windows": (SIZE, {"patch": (1, 2, 2), "window": 3}),
    "few windows": ((6, 7, 5), {"patch": 2, "window": 4}),
}


def network(name: str, count: int = 3) -> VolumeNetwork:
    """A network by its name, with volumes and what it is to say of them: three labels, or mean and deviation."""
    if name in SWINS:
        size, options = SWINS[name]
        make = partial(Swin3d, 1, 3, **SWIN, **options)
    else:
        size, make = SIZE, partial(ViT3d, 1, **VIT, **VITS[name])
    x = np.random.default_rng(6).standard_normal((count, 1, *size))
    if name == "numbers":
        return VolumeNetwork(make, x, np.stack([x.mean((1, 2, 3, 4)), x.std((1, 2, 3, 4))], axis=1))
    return VolumeNetwork(make, x, np.digitize(x[:, 0], (-0.6, 0.6)))


@pytest.mark.parametrize("name", [*VITS, *SWINS])
def test_result_and_gradients_are_those_of_one_rank(name, axes):
    network(name).compare(axes)


@pytest.mark.parametrize(("name", "count"), [("refined", 3), ("numbers", 3), ("uneven windows", 2)])
def test_twenty_steps_are_those_of_one_rank(name, count, axes):
    network(name, count).compare_training(axes)


def test_a_sample_that_some_ranks_have_nothing_of(axes):
    network("voxels", count=1).compare(axes)


@pytest.mark.parametrize(("name", "operations"), [("refined", 100), ("uneven windows", 150)])
def test_the_checked_mode_finds_nothing_to_object_to(name, operations, axes):
    mesh = Mesh(**axes)
    with hp.checked() as check:
        network(name).pass_through(mesh)
    assert len(check.log) > operations
    mesh.free()
