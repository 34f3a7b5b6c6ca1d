"""What the measured figures are to reach at most, on two cores with float32 and the full sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcpar.bench.measure import Measure


@dataclass(frozen=True)
class Target:
    """A limit for all figures of a group whose names match a pattern."""

    what: str
    limit: float
    group: str
    pattern: str


TARGETS = (
    Target("CosmoFlow step / torch at its best", 0.85, "steps", r"CosmoFlow: hpcpar / torch at its best"),
    Target("same / torch as users get it, channels_last_3d", 0.60, "steps", r"CosmoFlow: hpcpar / .*channels_last_3d$"),
    Target("same / torch as users get it, NCDHW", 0.40, "steps", r"CosmoFlow: hpcpar / .*, NCDHW"),
    Target("U-Net step / torch at its best", 0.85, "steps", r"U-Net: hpcpar / torch at its best"),
    Target("both in bfloat16 / torch autocast at its best", 0.85, "steps", r".*, bfloat16: hpcpar / torch autocast"),
    Target("CosmoFlow, depth split over the ranks / 1 rank", 0.55, "ranks", r"CosmoFlow: depth split .* / 1 rank"),
    Target("U-Net, depth split over the ranks / 1 rank", 0.55, "ranks", r"U-Net: depth split .* / 1 rank"),
    Target("batch split over the ranks / torch DDP at its best", 0.80, "ranks", r".*: batch split .* / torch DDP"),
    Target("attention, forward and backward / torch", 1.0, "attention", r".*: forward and backward, hpcpar / torch"),
    Target("gradient all-reduce / best of plain MPI", 1.2, "ranks", r"gradient all-reduce .* / best"),
    Target("halo exchange / one MPI sendrecv of the same bytes", 1.3, "ranks", r"halo exchange .* / MPI sendrecv"),
    Target("one small operation above NumPy, forward (us)", 3, "ops", r".*: forward, above"),
    Target("one small operation above NumPy, with backward (us)", 10, "ops", r".*: forward and backward, above"),
    Target("time of a CosmoFlow step outside of kernels and messages", 0.03, "share", r"CosmoFlow: time outside"),
    Target("peak memory of a step / the formula", 1.15, "memory", r".*: peak of a step / formula"),
    Target("import hpcpar (s)", 0.3, "memory", r"import hpcpar$"),
)


def verdicts(measures: Iterable[Measure]) -> list[dict[str, Any]]:
    """Return one row a target: ``what``, ``limit``, ``value`` (the largest), ``met`` (None: not measured), ``note``."""
    held = list(measures)
    rows = []
    for target in TARGETS:
        those = [m for m in held if m.group == target.group and re.match(target.pattern, m.name)]
        values = [m.value for m in those if m.value is not None]
        known = bool(values) and len(values) == len(those)
        value = max(values) if known else None
        note = next((m.note for m in those if m.value is None), "") if those else "not run"
        met = value <= target.limit if known else None
        rows.append({"what": target.what, "limit": target.limit, "value": value, "met": met, "note": note})
    return rows
