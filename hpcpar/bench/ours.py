"""The training step of this package, as a contestant: ``python -m mpi4py -m hpcpar.bench.ours CASE AXIS``.

AXIS is the mesh axis that all ranks of the job form: ``batch`` or ``depth``.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpcpar as hp
from hpcpar import functional as F
from hpcpar import kernels, nn
from hpcpar.bench import cases, process
from hpcpar.bench.cases import Case
from hpcpar.models import CosmoFlow, Spread, UNet3d, place
from hpcpar.nn.state import entries
from hpcpar.optim import AdamW
from hpcpar.parallel import GradientSync
from hpcpar.tensors import Tensor
from hpcpar.trace.instruments import instruments
from hpcpar.trace.recorder import MESSAGES, Recorder
from hpcpar.transport import yardstick


def make_model(case: Case) -> nn.Module:
    """Return the network on the current mesh."""
    if case.network == "cosmoflow":
        model: nn.Module = CosmoFlow(case.edge, dropout=0.0, base=case.base)
    else:
        scope = "rank" if case.local_norm else "all"
        model = UNet3d(1, cases.CLASSES, case.base, case.levels, norm_scope=scope)
    if case.half:
        nn.set_compute_dtype(model, "bfloat16")
    return model


def make_optimizer(model: nn.Module) -> AdamW:
    """Return the optimizer that all contestants use."""
    return AdamW(model, cases.LR, weight_decay=cases.WEIGHT_DECAY)


def loss_of(case: Case, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a case."""
    return F.mse_loss(output, target) if case.network == "cosmoflow" else F.cross_entropy(output, target)


class Step:
    """Network, data and optimizer of one case on a mesh; what is asked of it is collective."""

    def __init__(self, case: Case, mesh: hp.Mesh) -> None:
        self.case, self.mesh = case, mesh
        hp.manual_seed(0)
        spread = Spread().on(mesh)
        with mesh, nn.default_dtype("float64" if case.double else "float32"):
            self.model = make_model(case)
            place(self.model, mesh, spread)
            x, y = cases.data(case)
            self.x = hp.tensor(kernels.to_channels_last(x), layout=spread.volume)
            self.y = hp.tensor(y, layout=spread.samples if case.network == "cosmoflow" else spread.labels)
        self.optimizer = make_optimizer(self.model)
        self.sync = GradientSync(self.model)

    def weights(self, path: str) -> bool:
        """Write the weights for the other contestants."""
        self._write(path, self.model.state_dict(numpy=True))
        return True

    def load(self, path: str) -> bool:
        """Take the weights that a contestant wrote."""
        self.model.load_state_dict(dict(np.load(path)))
        return True

    def gradients(self, path: str) -> float:
        """Write the gradients at the present weights; returns the loss."""
        loss = self._backward()
        shown = entries(self.model)  # a weight that is kept unflattened has another shape outside
        grads = {n: p.grad.numpy().reshape(shown[n].shape) for n, p in self.model.named_parameters()}
        self.optimizer.zero_grad()
        self._write(path, grads)
        return loss

    def step(self) -> float:
        """Take one step; returns seconds, from the first rank's start to the last one's end."""
        yardstick.barrier()
        begin = time.perf_counter()
        self._step()
        yardstick.barrier()
        return time.perf_counter() - begin

    def share(self) -> dict[str, float]:
        """Take one step; returns seconds in all, in kernels, in messages, and outside of both."""
        recorder = Recorder()
        with instruments(recorder):
            seconds = self.step()
        parts = {"kernels": recorder.seconds("compute"), "messages": recorder.seconds(*MESSAGES)}
        return {"step": seconds, **parts, "outside": seconds - sum(parts.values())}

    def _step(self) -> None:
        self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self) -> float:
        loss = loss_of(self.case, self.model(self.x), self.y)
        self.sync.backward(loss)
        return loss.item()

    def _write(self, path: str, arrays: dict[str, np.ndarray]) -> None:
        if self.mesh.rank == 0:
            np.savez(path, **arrays)


def peak(case: Case, mesh: hp.Mesh) -> dict[str, int]:
    """Return the most bytes a step takes: by the system's account, by the formula of ``hpcpar summary``; and before.

    Libraries and compiled kernels are loaded by a small step first: they are no part of the formula.
    """
    from dataclasses import replace

    from hpcpar.plan.dry import Task, dry_run

    small = Step(replace(case, edge=16), mesh)
    for _ in range(2):
        small._step()
    del small
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    step = Step(case, mesh)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    for _ in range(3):
        step._step()
    taken = _status("VmHWM") - before
    task = Task(
        model=lambda: make_model(case),
        loss=lambda output, target: loss_of(case, output, target),
        input=step.x.shape,
        target=step.y.shape,
        optimizer=make_optimizer,
    )
    return {"taken": taken, "formula": dry_run(task, mesh.shape, mesh.rank).memory["peak"], "before": before}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main(case: Case, axis: str) -> None:
    """Serve, on all ranks together."""
    mesh = hp.Mesh(**{axis: -1})
    made: list[Step] = []

    def step() -> Step:
        if not made:  # the memory of a step is measured before there is another one
            made.append(Step(case, mesh))
        return made[0]

    def receive() -> dict[str, Any] | None:
        return yardstick.turn(process.read() if mesh.rank == 0 else None)

    names = ("weights", "load", "gradients", "step", "share")
    handlers = {name: lambda name=name, **given: getattr(step(), name)(**given) for name in names}
    handlers["peak"] = lambda: peak(case, mesh)
    process.serve(handlers, receive, process.answer if mesh.rank == 0 else lambda value: None)
    mesh.free()


if __name__ == "__main__":
    main(cases.parse(sys.argv[1]), sys.argv[2])
