"""How ranks share the making of a data set: whose file is whose, and what is said and written when all are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcpar.data.files import write_json

__all__ = ["ALONE", "Gather", "Sharing", "by_folder"]

Gather = Callable[[Any], list[Any]]
"""From this rank's value to those of all ranks, in rank order; collective."""

T = TypeVar("T")


def _silent(line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Sharing:
    """One of several ranks that make a data set together.

    Parameters
    ----------
    rank, size : int
        This rank and how many there are: file i of the set is made by rank ``i % size``.
    report : callable
        Gets lines of text that say what was done.
    gather : callable, optional
        Brings the values of all ranks together. With it makers are collective: counts that are reported are those of
        all ranks; without it they are this rank's.
    """

    rank: int = 0
    size: int = 1
    report: Callable[[str], None] = _silent
    gather: Gather | None = None

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Return those of the items, one for each file of the set, that this rank makes."""
        return items[self.rank :: self.size]

    def finish(self, what: str, out: Path, names: Sequence[str], written: int, contents: Mapping) -> list[Path]:
        """Say how many files were made, and write what the set consists of.

        Parameters
        ----------
        what : str
            Name of the set.
        out : Path
            Its folder; rank 0 writes ``dataset.json`` there.
        names : sequence of str
            All files of the set, relative to `out`.
        written : int
            How many files this rank wrote; its others were there already.
        contents : mapping
            What ``dataset.json`` holds.

        Returns
        -------
        list of Path
            All files of the set.
        """
        kept, whose = len(self.own(names)) - written, ""
        if self.gather is not None:
            written, kept = map(sum, zip(*self.gather((written, kept)), strict=True))
        elif self.size > 1:
            whose = f" (rank {self.rank} of {self.size})"
        self.report(f"{what}: {written} files written, {kept} already there, in {out}{whose}")
        if self.rank == 0:
            write_json(out / "dataset.json", contents)
        return [out / name for name in names]


ALONE = Sharing()
"""One process makes all files and says nothing."""


def by_folder(names: Sequence[str]) -> dict[str, list[str]]:
    """Group names of files ``set/file`` by their sets."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split("/")[0], []).append(name)
    return found
