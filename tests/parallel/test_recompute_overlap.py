"""Recomputation beside messages under computation: weights gathered ahead, gradients reduced early, the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import functional as F
from hpcpar import nn
from hpcpar.parallel import GradientSync
from hpcpar.parallel.grids import FourD, Grid, Summa
from hpcpar.testing import collective_assert

RANKS = MPI.COMM_WORLD.Get_size()
SAMPLES, WIDTH, HIDDEN = 12, 24, 48
ALL = ("reduce", "scatter", "gather")
GRIDS: list[Grid] = [FourD(y=RANKS), FourD(z=RANKS), FourD(x=RANKS)]
GRIDS += [FourD(1, 2, 2), Summa(2)] if RANKS == 4 else []


class Mlp(nn.Module):
    """Two layers beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: hp.Tensor) -> hp.Tensor:
        return x + self.down(F.gelu(self.up(F.tanh(x))))


def trained(grid: Grid, mesh: hp.Mesh, keep: str, again: bool) -> list[bytes]:
    """Loss and gradients of the last of three steps, as bits; from the second step on the order of weights is known."""
    hp.manual_seed(5)
    with mesh, nn.default_dtype("float64"):
        model = nn.Sequential(Mlp(), Mlp(), Mlp())
        hp.parallelize(model, grid.plan({"*.up": "first", "*.down": "second"}, 2, keep=keep, overlap=ALL))
        if again:
            nn.recompute(model, "[02]")
        sync = GradientSync(model)
        for step in range(3):
            model.zero_grad()
            x = hp.tensor(np.random.default_rng(step).standard_normal((SAMPLES, WIDTH)), requires_grad=True)
            loss = (model(x) ** 2).sum().resolve()
            sync.backward(loss)
        return [loss.shard.tobytes(), *(p.grad.shard.tobytes() for p in model.parameters()), x.grad.numpy().tobytes()]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@pytest.mark.parametrize("keep", ["source", "moved"])
def test_bits_are_those_of_the_plain_run(grid: Grid, keep: str) -> None:
    with grid.mesh() as mesh:
        plain, again = (trained(grid, mesh, keep, how) for how in (False, True))
        collective_assert(mesh.world, plain == again, "bits differ")
    mesh.free()
