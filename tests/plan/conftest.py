"""Two small tasks, and the training step of any task for real: what it sends and holds, to compare dry runs with."""

from __future__ import annotations

import gc
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from hpcpar import functional as F
from hpcpar import optim
from hpcpar.kernels import arena
from hpcpar.mesh import Mesh
from hpcpar.models import CosmoFlow, UNet3d, place
from hpcpar.nn import Module, default_dtype
from hpcpar.optim import Optimizer
from hpcpar.parallel import GradientSync
from hpcpar.plan.dry import Messages, Task
from hpcpar.signature import signature
from hpcpar.tensors import Tensor
from hpcpar.transport import counter


def cosmoflow(width: int = 32, batch: int = 3, batch_norm: bool = False) -> Task:
    """CosmoFlow with clipping."""
    return Task(
        lambda: CosmoFlow(width, batch_norm=batch_norm),
        F.mse_loss,
        (batch, 4, width, width, width),
        (batch, 4),
        optimizer=lambda model: optim.AdamW(model, 1e-3),
        clip=1.0,
    )


def unet(width: int = 16, batch: int = 3, base: int = 4, batch_norm: bool = True, dice: bool = True) -> Task:
    """U-Net of two levels with dropout at the bottom, for three classes."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        total = F.cross_entropy(output, target)
        return total + F.dice_loss(F.softmax(output, 1), target) if dice else total

    return Task(
        lambda: UNet3d(1, 3, base, 2, batch_norm=batch_norm, dropout=0.1),
        loss,
        (batch, 1, width, width, width),
        (batch, width, width, width),
        optimizer=lambda model: optim.SGD(model, 1e-3, momentum=0.9),
    )


class RealStep:
    """A task on a real mesh: made once, run any number of times."""

    def __init__(self, task: Task, mesh: Mesh) -> None:
        self.task, self.mesh = task, mesh
        with mesh, default_dtype(task.dtype):
            self.model: Module = task.model()
        if hasattr(self.model, "placements"):
            place(self.model, mesh, task.spread)
        self.optimizer: Optimizer = task.optimizer(self.model)
        self.sync = GradientSync(self.model)

    def __call__(self) -> None:
        task, mesh = self.task, self.mesh
        x_layout, y_layout = task.layouts(mesh)
        x = signature(mesh, task.input, x_layout)
        y = signature(mesh, task.target, y_layout)
        input_dtype, target_dtype = task.dtypes
        memory = np.ones((x.local_shape[0], *x.local_shape[2:], x.local_shape[1]), input_dtype)
        target = np.zeros(y.local_shape, target_dtype)
        loss = task.loss(self.model(Tensor(np.moveaxis(memory, -1, 1), x)), Tensor(target, y))
        self.sync.backward(loss)
        if task.clip:
            optim.clip_grad_norm_(self.model, task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def messages_of_step(task: Task, mesh: Mesh) -> Messages:
    """What this rank sends in a real step."""
    step = RealStep(task, mesh)
    with counter.counting() as sent:
        step()
    return sent


def peak_of_step(task: Task, mesh: Mesh) -> int:
    """The most bytes of arrays at any time during a real step that finds the optimizer's state."""
    RealStep(task, mesh)()  # kernels and message buffers that live as long as the program
    gc.collect()
    arena.trim()  # else the step finds memory that was taken before it is watched
    tracemalloc.start()
    try:
        step = RealStep(task, mesh)
        step()
        tracemalloc.reset_peak()
        step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="session")
def tasks() -> SimpleNamespace:
    """Makers of tasks: ``cosmoflow(width, batch, ...)`` and ``unet(width, batch, ...)``."""
    return SimpleNamespace(cosmoflow=cosmoflow, unet=unet)


@pytest.fixture(scope="session")
def real() -> SimpleNamespace:
    """Of a real step: ``real.messages(task, mesh)`` and ``real.peak(task, mesh)`` on this rank."""
    return SimpleNamespace(messages=messages_of_step, peak=peak_of_step)
