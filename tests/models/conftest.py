"""Networks of volumes on many meshes, and the same network on one rank to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import functional as F
from hpcpar import nn, optim
from hpcpar.mesh import Mesh
from hpcpar.models import Spread, place
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


@pytest.fixture
def volume_network() -> type[VolumeNetwork]:
    """``volume_network(make, x, target)``."""
    return VolumeNetwork


@pytest.fixture
def volumes() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """``volumes(count, size, classes)``: volumes, and labels that follow from them."""

    def made(count: int, size: tuple[int, int, int], classes: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(6).standard_normal((count, 1, *size))
        return x, np.digitize(x[:, 0], np.linspace(-0.6, 0.6, classes - 1))

    return made
