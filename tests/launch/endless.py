"""A training for tests that stop it: it has no end before it is told one, beyond the step at which it was stopped."""

from __future__ import annotations

import re
from pathlib import Path

from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import assert_same_run, write_small_job

CHANGES = {
    "steps = 7": "steps = 1000000",
    "every = 2": "every = 1000",  # checkpoints
    "validate_every = 4": "validate_every = 0",
    'name = "cosine"': 'name = "constant"',  # a schedule that does not depend on the end
}


class EndlessJob:
    """Configuration, data and results in `folder`; `logs` is the pattern of the job's own logs there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.logs = folder, write_small_job(folder), "run/*.log"
        text = self.path.read_text()
        for old, new in CHANGES.items():
            assert old in text
            text = text.replace(old, new)
        self.path.write_text(text)

    def end_after(self, step: int) -> None:
        """Let the next start end after `step`."""
        self.path.write_text(re.sub(r"^steps = \d+", f"steps = {step}", self.path.read_text(), flags=re.M))

    def log(self) -> str:
        """Return what all starts wrote."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(self.logs)))

    def steps(self) -> list[int]:
        """Return the steps that the log reports."""
        return [int(step) for step in re.findall(r"^step (\d+)/", self.log(), flags=re.M)]

    def trains(self, starts: int = 1) -> bool:
        """Whether start number `starts` has come to its first reported step."""
        said = self.log().split("parameters;")
        return len(said) > starts and "\nstep " in said[starts]

    def stopped_at(self) -> int:
        """Return the step of the newest checkpoint that a request to stop has led to."""
        saved = re.findall(r"asked to stop: saved \S*step-(\d+)", self.log())
        assert saved, self.log()
        return int(saved[-1])

    def assert_equals_unbroken_run(self, *overrides: str, ranks: int, starts: int) -> None:
        """Records and weights are those of a run that nobody stopped, bit by bit."""
        log = self.log()
        assert log.count("resuming from") == starts - 1 and log.count("done: ") == 1, log
        words = ["-m", "hpcpar", "train", str(self.path)]
        for override in ("run.dir=whole", *overrides):
            words += ["--set", override]
        mpi_run(ranks, words, cwd=self.folder, timeout=200).check()
        assert_same_run(self.folder / "run", self.folder / "whole")
