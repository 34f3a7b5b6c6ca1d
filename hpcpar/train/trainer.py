"""The training loop: the same on one process and on any mesh."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar import nn, random
from hpcpar.checkpoint import Folder, Saver
from hpcpar.checkpoint.training import collect
from hpcpar.data import DataError, TensorBatches
from hpcpar.mesh import Mesh
from hpcpar.models import place
from hpcpar.optim import GradScaler, clip_grad_norm_
from hpcpar.parallel import GradientSync
from hpcpar.plan.memory import require_memory
from hpcpar.tensors import Tensor
from hpcpar.together import on_root
from hpcpar.trace import span
from hpcpar.train import build
from hpcpar.train.config import ConfigError, Job, dump_job
from hpcpar.train.evaluate import evaluate
from hpcpar.train.nonfinite import NotFinite, first_nonfinite
from hpcpar.train.ranks import write_ranks
from hpcpar.train.record import Progress, RunDirectory
from hpcpar.train.resume import resume, training_state
from hpcpar.train.signals import Interrupted, StopSignals
from hpcpar.train.tasks import make_task
from hpcpar.train.tracing import Tracer
from hpcpar.train.watchdog import Watchdog

Pair = tuple[Any, Tensor]
"""A batch: inputs, whatever the task takes them for, and the target."""

LEAST_SCALE = 2.0**-14
"""Of losses: where gradients overflow at this too, the weights are to blame."""


class Trainer:
    """Everything a run needs, made from its configuration. Collective over all ranks.

    Parameters
    ----------
    job : Job
    mesh : Mesh, optional
        By default one over all ranks, with the axes of the configuration.

    Attributes
    ----------
    task : Task
        What the kind of model needs.
    step : int
        Steps made, those among them that loss scaling passed over.
    skipped : int
        How many it passed over.
    scaler : GradScaler
        Scales losses where ``run.compute`` is float16.
    history : list of dict
        The records of ``metrics.jsonl``, on every rank; after a resume from the last one before.
    recent : list of float
        Losses of the steps since the last record.
    outstanding : bool
        The record of the last step is still to be written.
    estimate : Estimate or None
        Of the memory that a step takes on this rank.
    """

    def __init__(self, job: Job, mesh: Mesh | None = None) -> None:
        self.job, self.task = job, make_task(job)
        self.signals = StopSignals()
        self.signals.install()
        self.mesh = mesh or Mesh(**job.mesh)
        build.use_device(job.run.device, self.mesh)
        build.require_compute(job.run.compute, self.mesh)
        random.manual_seed(job.run.seed)
        self.spread = build.make_spread(job, self.mesh)
        with self.mesh:
            self.train_batches = self.task.make_batches("train", self.mesh, self.spread)
            if self.train_batches is None:
                raise ConfigError("data.train names no files to train on")
            self.validation = self.task.make_batches("validation", self.mesh, self.spread)
            self.test = self.task.make_batches("test", self.mesh, self.spread)
            self.steps = self._count_steps()
            dataset = self.train_batches.loader.dataset
            self.estimate = require_memory(self.mesh, job, dataset.shape(dataset.input))
            with nn.default_dtype(job.run.dtype), nn.init.deferred():
                self.model = build.recomputed(job, self.task.make_model())
                self.decisions = place(self.model, self.mesh, self.spread)
        if job.run.device == "gpu":
            self.model.to(device="gpu")
        self.optimizer = build.make_optimizer(job, self.model, self.steps)
        self.sync = GradientSync(self.model)
        self.scaler = GradScaler(enabled=job.run.compute == "float16", mesh=self.mesh)
        self.step, self.skipped = 0, 0
        self.history: list[dict[str, Any]] = []
        self.recent: list[float] = []
        self.last_lr, self.outstanding, self.records_until = 0.0, False, None
        self.seconds_before, self._start = 0.0, time.perf_counter()
        self.folder = Folder(Path(job.run.dir, "checkpoints"))
        self.saver = Saver(self.folder, self.mesh.world, job.checkpoint.keep, job.checkpoint.one_file)
        watched = Path(job.run.dir, ".watchdog")
        self.tracer = Tracer(job.run, self.mesh)
        self.watchdog = Watchdog(watched, self.mesh.world.rank, self.mesh.world.size, job.run.watchdog)

    def _count_steps(self) -> int:
        run, per_epoch = self.job.run, len(self.train_batches)
        if not per_epoch:
            raise DataError("data.train holds no samples")
        if run.steps is None and run.epochs is None:
            raise ConfigError("run.steps or run.epochs says how long to train; neither is given")
        return run.steps or ceil(run.epochs * per_epoch / self.job.optim.accumulate)

    # ---- one step

    def train_step(self, batches: list[Pair]) -> float:
        """Take one optimizer step on one or several batches and return the loss, a mean over all that counts in them.

        Raises
        ------
        NotFinite
            On all ranks: the loss is not finite; names the step and the first module with such a result.
        """
        parts = self._weighted(batches)
        counted, total = sum(count for _, _, count in parts), 0.0
        for i, (inputs, target, count) in enumerate(parts):
            state = random.get_state()
            with span("forward"):
                loss = self.task.loss(self.task.forward(self.model, inputs), target)
                value = loss.item()
            if not isfinite(value) and not self.scaler.is_enabled():
                self._stop_nonfinite(value, inputs, state)
            total += value * (count / counted)
            with span("backward"):
                loss = self.scaler.scale(loss)
                if len(parts) == 1:
                    self.sync.backward(loss)
                else:
                    with nullcontext() if i + 1 == len(parts) else self.sync.accumulate():
                        self.sync.backward(loss, weight=count)
        with span("optimizer"):
            self._update()
        self.step += 1
        return total

    def _update(self) -> None:
        """Change the weights, on all ranks or on none."""
        if self.job.optim.clip and self.scaler.unscale_(self.optimizer):
            norm = clip_grad_norm_(self.model, self.job.optim.clip)
            if not isfinite(norm):
                raise NotFinite(f"step {self.step + 1}: the norm of the gradient is {norm}")
        self.saver.settle()  # a checkpoint may still be copying what the step changes
        taken = self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.skipped += not taken
        if self.scaler.get_scale() < LEAST_SCALE:
            raise NotFinite(f"step {self.step + 1}: gradients are not finite, whatever the loss is multiplied by")

    def _weighted(self, batches: list[Pair]) -> list[tuple[Any, Tensor, float]]:
        """Each batch with its weight; of several, those in which nothing counts are left out."""
        if len(batches) == 1:
            return [(*batches[0], 1.0)]
        weighted = [(*batch, self.task.count(*batch)) for batch in batches]
        return [part for part in weighted if part[2]] or [(*batches[0], 1.0)]

    def _stop_nonfinite(self, value: float, inputs: Any, state: dict[str, int]) -> None:
        random.set_state(state)
        operands = self.task.operands(inputs)
        where = first_nonfinite(self.model, operands, lambda: self.task.forward(self.model, inputs))
        raise NotFinite(f"step {self.step + 1}: the loss is {value}; {where}")

    # ---- the whole run

    def fit(self, resume_from: str | None = None) -> dict[str, Any]:
        """Train to the last step, validate as configured, write the run directory, and return the last figures.

        Parameters
        ----------
        resume_from : str, optional
            ``auto`` or a path, see `hpcpar.train.resume.resume`. Without it checkpoints of an earlier run are kept
            under another name.

        Raises
        ------
        Interrupted
            On all ranks, after a signal to any of them and a checkpoint.
        """
        progress = Progress(self.mesh.world, self.steps)
        if not resume_from or not resume(self, resume_from, progress.say):
            retired = on_root(self.mesh.world, self.folder.retire)
            if retired:
                progress.say(f"checkpoints of an earlier run are now in {retired}")
        run = self.job.run
        out = RunDirectory(run.dir, self.mesh.world, self.records_until, run.tensorboard)
        out.write_text("config.toml", dump_job(self.job))
        self._introduce(progress)
        self._start = time.perf_counter()
        with self.watchdog, self.tracer:
            try:
                self._run(out, progress)
                return self._finish(out, progress)
            except Interrupted:
                path = self._leave()
                progress.say(f"asked to stop: saved {path}; go on with --resume auto")
                raise Interrupted(self.step) from None
            except NotFinite:
                self.saver.finish()  # a checkpoint from before is a good one
                raise

    def _run(self, out: RunDirectory, progress: Progress) -> None:
        stream = self.train_batches.stream()
        while True:
            if self.outstanding:
                self._report(out, progress)
                self._save_if_due()
            if self.step >= self.steps:
                return
            self._advance(stream, progress)
            self._between()

    def _advance(self, stream: Iterator[Pair], progress: Progress) -> None:
        """Take one step."""
        with self.tracer.step(self.step + 1):
            before = self.train_batches.samples_seen
            with span("read batch", "io"):
                batches = [next(stream) for _ in range(self.job.optim.accumulate)]
            self.last_lr = self.optimizer.lr()
            self.recent.append(self.train_step(batches))
        self.outstanding = True
        progress.count(self.train_batches.samples_seen - before)

    def _report(self, out: RunDirectory, progress: Progress) -> None:
        """Validate and write a record, if this step is to have one."""
        run, last = self.job.run, self.step == self.steps
        validate = self.validation is not None and (
            last or (run.validate_every and self.step % run.validate_every == 0)
        )
        if last or validate or self.step % run.log_every == 0:
            figures = {
                "loss": self.recent[-1],
                "loss_mean": float(np.mean(self.recent)),
                "lr": self.last_lr,
                **({"scale": self.scaler.get_scale(), "skipped": self.skipped} if self.scaler.is_enabled() else {}),
                **self.task.rates(progress.lap()),
            }
            if validate:
                with span("validation"):
                    figures.update(self.evaluate(self.validation, "val_"))
            record = {"step": self.step, **figures, "samples": self.train_batches.samples_seen}
            record["seconds"] = round(self.seconds(), 3)
            self.history.append(record)
            out.record(record)
            progress.line(self.step, figures)
            self.recent = []
        self.outstanding = False

    def seconds(self) -> float:
        """Return for how long this run has trained, in all its parts."""
        return self.seconds_before + time.perf_counter() - self._start

    # ---- checkpoints and leaving

    def _between(self) -> None:
        """Between two steps or batches: whether somebody was asked to stop, how far the checkpoint is. Collective."""
        self.watchdog.beat()
        mine = np.array([self.signals.asked, self.saver.status()], np.int64)
        asked, status = self.mesh.world.all_reduce(mine, "max")
        self.saver.advance(int(status))
        if asked:
            raise Interrupted

    def _save_if_due(self) -> None:
        every = self.job.checkpoint.every
        if every and (self.step % every == 0 or self.step == self.steps):
            with span("checkpoint"):
                self._start_saving()
                if not self.job.checkpoint.async_:
                    self.saver.finish()

    def _start_saving(self) -> None:
        tensors, shown, numbers = collect(self.model, self.optimizer)
        # what the optimizer changes, and nobody else; running statistics change in the next forward pass
        steady = {name for name, t in tensors.items() if t.is_parameter or name.startswith("optimizer/")}
        self.saver.start(self.step, tensors, {**training_state(self), **numbers}, shown, steady)

    def _leave(self) -> Path:
        """Save where we are, unless that has just been done; returns the checkpoint's path."""
        self.saver.finish()
        if self.outstanding or self.saver.published != self.step:
            self._start_saving()
            self.saver.finish()
        return self.folder.at(self.step)

    def _introduce(self, progress: Progress) -> None:
        mesh = self.mesh.describe()
        if self.mesh.size <= 16:
            progress.say(mesh)
        count = sum(p.numel() for p in self.model.parameters())
        progress.say(f"{type(self.model).__name__}: {count:,} parameters; {len(self.train_batches)} batches an epoch")
        for line in self.decisions:
            progress.say(f"  layout {line}")

    def evaluate(self, batches: TensorBatches, prefix: str) -> dict[str, float]:
        """Return loss and scores over all samples of `batches`."""
        batches.position = type(batches.position)()
        return evaluate(self.task, self.model, batches, prefix, self._between)

    def _finish(self, out: RunDirectory, progress: Progress) -> dict[str, Any]:
        result: dict[str, Any] = {k: v for k, v in self.history[-1].items() if k != "seconds"} if self.history else {}
        if self.test is not None:
            result.update(self.evaluate(self.test, "test_"))
        state = self.model.state_dict()
        out.write_tensors("weights.h5", state, {"format": "hpcpar weights 1", "step": self.step})
        source = self.test or self.validation or self.train_batches
        for name, tensors in self.task.examples(self.model, source).items():
            out.write_tensors(name, tensors)
        out.write_text("result.json", json.dumps(result, indent=2) + "\n")
        write_ranks(out, self.mesh, self.step, self.seconds())
        self.saver.finish()
        for line in nn.relayouts(self.model):
            progress.say(f"  moved {line}")
        shown = "  ".join(f"{k} {v:.4f}" for k, v in result.items() if k.startswith(("val_", "test_")))
        progress.say(f"done: {shown or 'no validation or test data'}; results in {out.path}")
        return result

    def close(self) -> None:
        """Stop reading ahead, and give signals back. No message: a rank that failed does so too."""
        self.signals.remove()
        for batches in (self.train_batches, self.validation, self.test):
            if batches is not None:
                batches.close()


def train(job: Job, resume_from: str | None = None) -> dict[str, Any]:
    """Run a configuration from start to end on all ranks; see `Trainer.fit`."""
    trainer = Trainer(job)
    try:
        return trainer.fit(resume_from)
    finally:
        trainer.close()
