"""The training loop: the same on one process and on any mesh."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from math import ceil, isfinite
from typing import Any

import numpy as np

from hpcpar import functional as F
from hpcpar import nn, random
from hpcpar.autograd import no_grad
from hpcpar.data import DataError
from hpcpar.data.batches import Batches
from hpcpar.mesh import Mesh
from hpcpar.models import place
from hpcpar.optim import clip_grad_norm_
from hpcpar.parallel import GradientSync
from hpcpar.tensors import Tensor
from hpcpar.train import build, config
from hpcpar.train.config import ConfigError, Job, dump_job
from hpcpar.train.evaluate import Regression, Segmentation, evaluate
from hpcpar.train.nonfinite import first_nonfinite
from hpcpar.train.record import Progress, RunDirectory


class Trainer:
    """Everything a run needs, made from its configuration. Collective over all ranks.

    Parameters
    ----------
    job : Job
    mesh : Mesh, optional
        By default one over all ranks, with the axes of the configuration.

    Attributes
    ----------
    step : int
        Optimizer steps taken.
    history : list of dict
        The records of ``metrics.jsonl``, on every rank.
    """

    def __init__(self, job: Job, mesh: Mesh | None = None) -> None:
        self.job = job
        self.mesh = mesh or Mesh(**job.mesh)
        build.use_device(job.run.device, self.mesh)
        random.manual_seed(job.run.seed)
        self.spread = build.make_spread(job, self.mesh)
        with self.mesh:
            self.train_batches = build.make_batches(job, "train", self.mesh, self.spread)
            if self.train_batches is None:
                raise ConfigError("data.train names no files to train on")
            self.validation = build.make_batches(job, "validation", self.mesh, self.spread)
            self.test = build.make_batches(job, "test", self.mesh, self.spread)
            self.steps = self._count_steps()
            with nn.default_dtype(job.run.dtype):
                self.model = build.make_model(job.model)
            self.decisions = place(self.model, self.mesh, self.spread)
        if job.run.device == "gpu":
            self.model.to(device="gpu")
        self.loss = build.make_loss(job.loss)
        self.optimizer = build.make_optimizer(job, self.model, self.steps)
        self.sync = GradientSync(self.model)
        self.step = 0
        self.history: list[dict[str, Any]] = []

    def _count_steps(self) -> int:
        run, per_epoch = self.job.run, len(self.train_batches)
        if not per_epoch:
            raise DataError("data.train holds no samples")
        if run.steps is None and run.epochs is None:
            raise ConfigError("run.steps or run.epochs says how long to train; neither is given")
        return run.steps or ceil(run.epochs * per_epoch / self.job.optim.accumulate)

    # ---- one step

    def train_step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Take one optimizer step on one or several batches and return the loss, a mean over all their samples.

        Raises
        ------
        FloatingPointError
            On all ranks: the loss is not finite; names the step and the first module with such a result.
        """
        samples = sum(x.shape[0] for x, _ in batches)
        total = 0.0
        for i, (x, y) in enumerate(batches):
            state = random.get_state()
            loss = self.loss(self.model(x), y)
            value = loss.item()
            if not isfinite(value):
                self._stop_nonfinite(value, x, state)
            total += value * (x.shape[0] / samples)
            if len(batches) == 1:
                self.sync.backward(loss)
            else:
                with nullcontext() if i + 1 == len(batches) else self.sync.accumulate():
                    self.sync.backward(loss, weight=x.shape[0])
        if self.job.optim.clip:
            norm = clip_grad_norm_(self.model, self.job.optim.clip)
            if not isfinite(norm):
                raise FloatingPointError(f"step {self.step + 1}: the norm of the gradient is {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    def _stop_nonfinite(self, value: float, x: Tensor, state: dict[str, int]) -> None:
        random.set_state(state)
        where = first_nonfinite(self.model, x)
        raise FloatingPointError(f"step {self.step + 1}: the loss is {value}; {where}")

    # ---- the whole run

    def fit(self) -> dict[str, Any]:
        """Train to the last step, validate as configured, write the run directory, and return the last figures."""
        job, world = self.job, self.mesh.world
        out = RunDirectory(job.run.dir, world)
        out.write_text("config.toml", dump_job(job))
        progress = Progress(world, self.steps)
        self._introduce(progress)
        stream = self.train_batches.stream()
        start, recent = time.perf_counter(), []
        while self.step < self.steps:
            batches = [next(stream) for _ in range(job.optim.accumulate)]
            lr = self.optimizer.lr()
            recent.append(self.train_step(batches))
            progress.count(sum(x.shape[0] for x, _ in batches))
            last = self.step == self.steps
            validate = self.validation is not None and (
                last or (job.run.validate_every and self.step % job.run.validate_every == 0)
            )
            if last or validate or self.step % job.run.log_every == 0:
                figures = {
                    "loss": recent[-1],
                    "loss_mean": float(np.mean(recent)),
                    "lr": lr,
                    "samples_per_s": progress.lap(),
                }
                recent = []
                if validate:
                    figures.update(self.evaluate(self.validation, "val_"))
                record = {"step": self.step, **figures, "samples": self.train_batches.samples_seen}
                record["seconds"] = round(time.perf_counter() - start, 3)
                self.history.append(record)
                out.record(record)
                progress.line(self.step, figures)
        return self._finish(out, progress)

    def _introduce(self, progress: Progress) -> None:
        mesh = self.mesh.describe()
        if self.mesh.size <= 16:
            progress.say(mesh)
        count = sum(p.numel() for p in self.model.parameters())
        progress.say(f"{type(self.model).__name__}: {count:,} parameters; {len(self.train_batches)} batches an epoch")
        for line in self.decisions:
            progress.say(f"  layout {line}")

    def evaluate(self, batches: Batches, prefix: str) -> dict[str, float]:
        """Return loss and scores over all samples of `batches`."""
        batches.position = type(batches.position)()
        return evaluate(self.model, batches, self.loss, self._score(), prefix)

    def _score(self) -> Segmentation | Regression:
        if isinstance(self.job.model, config.UNet3d):
            return Segmentation(self.job.model.classes, getattr(self.job.loss, "ignore_index", -100))
        return Regression()

    def _finish(self, out: RunDirectory, progress: Progress) -> dict[str, Any]:
        result: dict[str, Any] = {k: v for k, v in self.history[-1].items() if k != "seconds"} if self.history else {}
        if self.test is not None:
            result.update(self.evaluate(self.test, "test_"))
        state = self.model.state_dict()
        out.write_tensors("weights.h5", state, {"format": "hpcpar weights 1", "step": self.step})
        if isinstance(self.job.model, config.UNet3d):
            self._write_prediction(out)
        out.write_text("result.json", json.dumps(result, indent=2) + "\n")
        for line in nn.relayouts(self.model):
            progress.say(f"  moved {line}")
        shown = "  ".join(f"{k} {v:.4f}" for k, v in result.items() if k.startswith(("val_", "test_")))
        progress.say(f"done: {shown or 'no validation or test data'}; results in {out.path}")
        return result

    def _write_prediction(self, out: RunDirectory) -> None:
        """Write input, label and prediction of the first sample that was not trained on, block by block."""
        source = self.test or self.validation or self.train_batches
        source.position = type(source.position)()
        x, y = next(iter(source))
        self.model.eval()
        with no_grad():
            predicted = F.argmax(self.model(x), 1)
        self.model.train()
        chosen = {"input": _first(x), "label": _first(y), "prediction": _first(predicted)}
        out.write_tensors("prediction.h5", chosen)

    def close(self) -> None:
        """Stop reading ahead, and free communicators. Collective."""
        for batches in (self.train_batches, self.validation, self.test):
            if batches is not None:
                batches.close()


def _first(x: Tensor) -> Tensor:
    """The first sample of a batch whose samples may be split: its owner's block, others none."""
    from hpcpar.layout.layout import Layout

    rest = Layout(None, *[x.sig.dims[d] for d in range(1, x.ndim)])
    return F.repartition(x, rest)[0]


def train(job: Job) -> dict[str, Any]:
    """Run a configuration from start to end on all ranks; see `Trainer`."""
    trainer = Trainer(job)
    try:
        return trainer.fit()
    finally:
        trainer.close()
