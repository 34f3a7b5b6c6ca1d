"""The run directory: configuration, metrics, weights and predictions, each written once, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from hpcpar.data.files import replaced
from hpcpar.optim.clip import counts_here
from hpcpar.tensors import Tensor
from hpcpar.together import on_all, on_root
from hpcpar.train.tensorboard import EventWriter
from hpcpar.transport import Comm


class RunDirectory:
    """A directory of results; rank 0 alone writes text, every rank calls.

    Parameters
    ----------
    path : str
        Made where it is missing. ``metrics.jsonl`` of an earlier run is kept under a number, and with it its trace.
    comm : Comm
        All ranks.
    records_until : int, optional
        The run goes on: records of ``metrics.jsonl`` up to this step stay, later ones will be made again.
    tensorboard : bool
        Write records to event files in the folder ``tensorboard`` too.
    """

    def __init__(self, path: str, comm: Comm, records_until: int | None = None, tensorboard: bool = False) -> None:
        self.path, self.comm, self._events = Path(path), comm, None
        on_root(comm, lambda: self._prepare(records_until))
        if tensorboard and comm.rank == 0:
            self._events = EventWriter(self.path / "tensorboard")

    def _prepare(self, records_until: int | None) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        metrics = self.path / "metrics.jsonl"
        if records_until is not None:
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
            with replaced(metrics) as aside:
                aside.write_text("".join(line for line in lines if _step_of(line) <= records_until), encoding="utf-8")
            return
        if metrics.exists() and metrics.stat().st_size:
            number = 1
            while (self.path / f"metrics.{number}.jsonl").exists():
                number += 1
            for name in ("trace.json", "ranks.json", "metrics.jsonl"):  # what belongs together keeps one number
                old = self.path / name
                if old.exists():
                    old.rename(old.with_suffix(f".{number}{old.suffix}"))
        metrics.touch()

    def write_text(self, name: str, text: str) -> None:
        """Write one file: aside first, then in its place."""

        def write() -> None:
            aside = self.path / f".{name}.part"
            aside.write_text(text, encoding="utf-8")
            aside.replace(self.path / name)

        on_root(self.comm, write)

    def record(self, figures: dict[str, Any]) -> None:
        """Append one object to ``metrics.jsonl``; on rank 0 only, and without a message."""
        if self.comm.rank == 0:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
            if self._events is not None:
                self._events.add(figures["step"], {name: v for name, v in figures.items() if name != "step"})

    def write_tensors(self, name: str, tensors: dict[str, Tensor], attributes: dict[str, Any] | None = None) -> Path:
        """Write tensors as whole datasets of one HDF5 file, every block by its owner. Collective.

        Ranks take turns, since several serial HDF5 libraries may not write one file at once; no rank ever holds more
        than its own shard. Replicas are written once.
        """
        target, aside = self.path / name, self.path / f".{name}.part"
        on_root(self.comm, lambda: _create(aside, tensors, attributes or {}))

        def write(turn: int) -> None:
            if turn == self.comm.rank:
                _write_blocks(aside, tensors)

        for turn in range(self.comm.size):
            on_all(self.comm, partial(write, turn))
        on_root(self.comm, lambda: os.replace(aside, target))
        return target


def _step_of(line: str) -> float:
    """Step of a line of ``metrics.jsonl``; infinite for one that a crash has cut."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def _create(path: Path, tensors: dict[str, Tensor], attributes: dict[str, Any]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, tensor in tensors.items():
            file.create_dataset(name, tensor.shape, tensor.dtype)
        file.attrs.update(attributes)


def _write_blocks(path: Path, tensors: dict[str, Tensor]) -> None:
    import h5py

    from hpcpar.transport.device import to_host

    mine = {n: t for n, t in tensors.items() if counts_here(t.sig) and t.sig.local_size}
    if not mine:
        return
    with h5py.File(path, "r+") as file:
        for name, tensor in mine.items():
            if tensor.sig.partial:
                raise ValueError(f"{name} is partial over {tensor.sig.partial}; resolve it before writing")
            file[name][tuple(slice(a, b) for a, b in tensor.sig.box)] = to_host(tensor.shard)


class Progress:
    """One line on rank 0 now and then: step, loss, samples a second, time left."""

    def __init__(self, comm: Comm, steps: int) -> None:
        self.quiet, self.steps = comm.rank != 0, steps
        self.start = self.last = time.perf_counter()
        self.samples = 0
        self.rate = 0.0

    def count(self, samples: int) -> None:
        """Enter the samples of one step."""
        self.samples += samples

    def lap(self) -> float:
        """Return samples a second since the last lap."""
        now = time.perf_counter()
        self.rate = self.samples / max(now - self.last, 1e-9)
        self.last, self.samples = now, 0
        return self.rate

    def line(self, step: int, figures: dict[str, Any]) -> None:
        """Print the figures of a step."""
        if self.quiet:
            return
        left = (time.perf_counter() - self.start) / max(step, 1) * (self.steps - step)
        shown = "  ".join(f"{name} {value:.5g}" for name, value in figures.items() if isinstance(value, float))
        self.say(f"step {step}/{self.steps}  {shown}  left {clock(left)}")

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if not self.quiet:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss, or m:ss."""
    whole = int(round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
