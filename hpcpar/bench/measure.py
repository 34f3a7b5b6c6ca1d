"""Measured figures: medians with spread, ratios of what was measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measure:
    """One figure.

    Attributes
    ----------
    group, name : str
        Together they are unique in a run.
    value : float or None
        Median; None where it could not be measured, `note` then says why.
    unit : str
        ``ratio``, ``share``, ``s``, ``ms``, ``us``, ``GFLOP/s``, ``GB/s``, ``MiB``, or ``relative`` (a difference).
    low, high : float or None
        Smallest and largest of the repeats; of a ratio its quartiles over the rounds.
    note : str
    """

    group: str
    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the figure as plain values."""
        return asdict(self)


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Let each contestant run once a round and return the seconds each took, without those of the warm-up.

    Parameters
    ----------
    contestants : mapping of str to callable
        Each returns the seconds it took.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, run in contestants.items():
            took = run()
            if turn >= warm_up:
                seconds[name].append(took)
    return seconds


def stopwatch(function: Callable[[], Any], least: float = 0.0) -> Callable[[], float]:
    """Return a contestant that calls `function` until `least` seconds are filled, and tells the seconds of one call."""
    calls = 1

    def run() -> float:
        nonlocal calls
        while True:
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            took = time.perf_counter() - begin
            if took >= least:
                return took / calls
            calls = max(2 * calls, int(1.2 * calls * least / max(took, 1e-9)))

    return run


def spread(group: str, name: str, samples: Sequence[float], unit: str, scale: float = 1.0, note: str = "") -> Measure:
    """Return the median of samples, times `scale`, with the smallest and the largest."""
    values = [sample * scale for sample in samples]
    return Measure(group, name, statistics.median(values), unit, min(values), max(values), note)


def rate(group: str, name: str, samples: Sequence[float], amount: float, unit: str, note: str = "") -> Measure:
    """Return `amount` (10^9 operations or bytes) a second, from seconds."""
    return spread(group, name, [amount / seconds for seconds in samples], unit, 1.0, note)


def ratio(group: str, name: str, ours: Sequence[float], theirs: Sequence[float], note: str = "") -> Measure:
    """Return the ratio of two medians that were measured in turns, with the quartiles of the ratios of the rounds."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, high = each[len(each) // 4], each[len(each) - 1 - len(each) // 4]
    return Measure(group, name, statistics.median(ours) / statistics.median(theirs), "ratio", low, high, note)


def missing(group: str, name: str, unit: str, why: str) -> Measure:
    """Return a figure that could not be measured."""
    return Measure(group, name, None, unit, note=why)
