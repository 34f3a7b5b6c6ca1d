"""The folder of a run's checkpoints: names, `latest`, publishing by one rename, keeping the last few.

::

    checkpoints/
      latest               one line: the name of the newest checkpoint that is on the disk
      step-00000120/       manifest.json, index.h5, shard-00000.h5, shard-00001.h5, ...
      .step-00000140.part/ being written, or left by a crash

One rank alone calls what changes the folder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hpcpar.checkpoint import manifest
from hpcpar.checkpoint.shard import sync_folder
from hpcpar.data.files import make_folder, replaced

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")


class Folder:
    """Checkpoints of one run.

    Parameters
    ----------
    path : path
        Made by `prepare`, not here.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)

    def at(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self.path / f"step-{step:08d}"

    def aside(self, step: int) -> Path:
        """Return where the checkpoint of a step is written."""
        return self.path / f".step-{step:08d}.part"

    def steps(self) -> list[int]:
        """Return the steps of all published checkpoints, the newest first; whether they are whole is not looked at."""
        try:
            found = [_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def latest(self) -> str | None:
        """Return the name that `latest` holds."""
        try:
            return (self.path / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def prepare(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint into."""
        make_folder(self.path)
        aside = self.aside(step)
        self.discard(step)
        aside.mkdir()
        return aside

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that will not be finished."""
        shutil.rmtree(self.aside(step), ignore_errors=True)

    def publish(self, step: int, keep: int) -> Path:
        """Give a finished checkpoint its name, move `latest` to it, and remove older ones but the last `keep`.

        Everything in it is on the disk already. Each change is one rename, so that a crash at any moment leaves the
        checkpoint before, or this one.
        """
        aside, target = self.aside(step), self.at(step)
        sync_folder(aside)
        if target.exists():  # of an earlier attempt, damaged or passed over
            self.set_aside(step, "replaced")
        os.rename(aside, target)
        sync_folder(self.path)
        with replaced(self.path / LATEST) as path:
            path.write_text(target.name + "\n", encoding="utf-8")
        sync_folder(self.path)
        self.prune(step, keep)
        return target

    def prune(self, newest: int, keep: int) -> None:
        """Remove checkpoints of steps before `newest` but the last `keep - 1` of them, and leftovers of publishing."""
        older = [step for step in self.steps() if step < newest]
        for step in older[max(keep - 1, 0) :]:
            doomed = self.path / f".step-{step:08d}.old"
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(self.at(step), doomed)  # at once: a checkpoint half removed must not look like a damaged one
        for leftover in (*self.path.glob(".step-*.old"), *self.path.glob("step-*.replaced*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def set_aside(self, step: int, why: str) -> Path:
        """Rename a checkpoint so that nobody resumes from it: ``step-00000120.damaged``."""
        target = self.path / f"{self.at(step).name}.{why}"
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{self.at(step).name}.{why}{number}")
        os.rename(self.at(step), target)
        return target

    def clear_leftovers(self) -> None:
        """Remove what runs that were ended while saving have left."""
        for leftover in (*self.path.glob(".step-*.part"), *self.path.glob(".step-*.old")):
            shutil.rmtree(leftover, ignore_errors=True)

    def retire(self) -> Path | None:
        """Rename the folder, if it holds checkpoints, to the first free ``checkpoints.N``: a new run begins here."""
        if not self.steps():
            self.clear_leftovers()
            return None
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        os.rename(self.path, target)
        return target


def candidates(path: Path) -> list[Path]:
    """Return the checkpoints that a path means, the newest first: itself, those in it, or in ``checkpoints`` in it."""
    if _NAME.fullmatch(path.name) or (path / manifest.NAME).exists():
        return [path]
    inside = path / "checkpoints"
    folder = Folder(path)
    if not folder.steps() and inside.is_dir():
        folder = Folder(inside)
    return [folder.at(step) for step in folder.steps()]
