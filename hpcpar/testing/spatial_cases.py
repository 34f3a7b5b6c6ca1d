"""Random cases of every operation: arguments, shapes, meshes and layouts from the whole space, seeded.

`draw_case` makes one `Case` of a family; `run_spatial_cases` checks many, shrinks what fails to one line, and counts
what happened by operation and kind of layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.testing.cases import Array, Case
from hpcpar.testing.layouts import draw_layout, draw_mesh_shape
from hpcpar.testing.spatial_draws import FAMILIES

AXES = ("a", "b", "c")


def draw_case(
    rng: np.random.Generator, ranks: int, family: str | None = None, mesh: Mapping[str, int] | None = None
) -> Case:
    """Return a random case for `ranks` ranks; one in five is in float32.

    Parameters
    ----------
    family : str, optional
        A key of `FAMILIES`; drawn by default, those with many arguments more often.
    mesh : mapping, optional
        Lengths of the axes; drawn by default.
    """
    if family is None:
        names = list(FAMILIES)
        weights = np.array([FAMILIES[name].weight for name in names], float)
        family = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    chosen = FAMILIES[family]
    op, arrays, arguments = chosen.draw(rng)
    mesh = dict(mesh or draw_mesh_shape(rng, ranks, AXES))
    if callable(chosen.follow):
        placed, arguments = list(arrays), dict(arguments)
        chosen.follow(rng, placed, arguments, mesh)
    else:
        first = draw_layout(rng, arrays[0].shape, mesh, partial=bool(rng.random() < 0.1))
        placed = [_placed(rng, a, i, first, mesh, chosen.follow) for i, a in enumerate(arrays)]
    dtype = "float32" if rng.random() < 0.2 else "float64"
    return Case(op, placed, arguments, mesh, dtype, int(rng.integers(1 << 20)))


def _placed(rng: np.random.Generator, a: Array, i: int, first: Layout, mesh: dict[str, int], follow: str) -> Array:
    """Give an operand a layout: the first any, weights a split of their first two dims, twins that of the first."""
    if i == 0:
        layout = first
    elif follow == "same":
        layout = first.resolved() if rng.random() < 0.8 else Layout()
    elif follow == "voxels":  # (N, C, *spatial) without C
        entries = [first.entry(d) for d in range(len(a.shape) + 1)]
        layout = Layout(entries[0], *entries[2:]) if rng.random() < 0.8 else Layout()
    else:
        layout = draw_layout(rng, a.shape[:2], mesh) if rng.random() < 0.4 else Layout()
    return Array(a.shape, layout, a.values, a.parameter)


KINDS = ("replicated", "samples", "channels", "positions", "2-3 dims", "mixed", "stacked", "partial")
"""What `layout_kind` returns: the columns of the table of operations and layouts."""


def layout_kind(case: Case) -> str:
    """Return in a word what splits the first operand.

    Samples are dim 0, channels dim 1, positions any further dim; "2-3 dims" are of positions. "mixed" is a split of
    several of them at once, "stacked" one dim split by several axes, "partial" a value that is a sum over an axis.
    """
    layout = case.arrays[0].layout
    dims = [[a for a in layout.entry(d) if case.mesh[a] > 1] for d in range(len(case.arrays[0].shape))]
    if any(case.mesh[a] > 1 for a in layout.partial):
        return "partial"
    if any(len(entry) > 1 for entry in dims):
        return "stacked"
    parts = [name for name, entry in zip(("samples", "channels"), dims, strict=False) if entry]
    spatial = sum(bool(entry) for entry in dims[2:])
    if spatial:
        parts.append("positions" if spatial == 1 else "2-3 dims")
    return parts[0] if len(parts) == 1 else "mixed" if parts else "replicated"


@dataclass
class Tally:
    """Counts of outcomes, and the worst error, by (operation, kind of layout)."""

    counts: dict[tuple[str, str], Counter] = field(default_factory=dict)
    worst: dict[tuple[str, str], float] = field(default_factory=dict)
    failures: list[tuple[Case, str]] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    def add(self, case: Case, outcome: str, text: str, error: float) -> None:
        """Count one verdict."""
        key = (case.op, layout_kind(case))
        self.counts.setdefault(key, Counter())[outcome] += 1
        self.worst[key] = max(self.worst.get(key, 0.0), error)
        if outcome == "FAIL":
            self.failures.append((case, text))
        elif outcome == "refused":
            self.refusals.setdefault(case.op, text)

    def total(self, outcome: str) -> int:
        """Return the number of cases with this outcome."""
        return sum(c[outcome] for c in self.counts.values())

    def operations(self, outcome: str) -> dict[str, int]:
        """Return for each operation the number of cases with this outcome."""
        found: Counter = Counter()
        for (op, _), c in self.counts.items():
            found[op] += c[outcome]
        return dict(found)


def run_spatial_cases(
    count: int,
    seed: int = 0,
    families: Sequence[str] | None = None,
    oracle: str | None = None,
    report: Callable[[str], Any] | None = None,
    shrink: bool = True,
    most_failures: int = 5,
    mesh: Mapping[str, int] | None = None,
) -> Tally:
    """Check `count` random cases on all ranks. Collective.

    Parameters
    ----------
    families : sequence of str, optional
        Draw from these in turn; from all, at random, by default.
    report : callable, optional
        Called on rank 0 with a text for each failure: the shrunk case as a command, and the difference.
    most_failures : int
        Stop after as many.
    mesh : mapping, optional
        Lengths of the axes for all cases.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    tally = Tally()
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        family = families[number % len(families)] if families else None
        case = draw_case(rng, world.Get_size(), family, mesh)
        try:
            outcome, text, error = case.verdict(oracle)
        except Exception:  # on this rank alone, maybe: the line that repeats it must be out before the job ends
            print(f"case {number} of seed {seed} ended in an error: {case.command}", flush=True)
            raise
        tally.add(case, outcome, text, error)
        if outcome == "FAIL":
            small = case.shrunk() if shrink else case
            if report and world.Get_rank() == 0:
                report(f"{small.command}\n{text}")
            if len(tally.failures) >= most_failures:
                break
    return tally
