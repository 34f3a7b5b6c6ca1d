"""Learning rates as pure functions of the step, counted from 0: nothing to save, nothing to get out of step.

Each function returns a schedule, ``schedule(step) -> lr``, that an optimizer takes as its ``lr``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import cos, pi

Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """Return the same rate at every step."""
    return lambda step: lr


def step(lr: float, every: int | Sequence[int], factor: float = 0.1) -> Schedule:
    """Multiply the rate by `factor` after each `every` steps, or at each of the given steps."""
    if isinstance(every, int):
        if every < 1:
            raise ValueError(f"step: the rate changes after 1 step or more, got {every}")
        return lambda at: lr * factor ** (at // every)
    marks = sorted(every)
    return lambda at: lr * factor ** bisect_right(marks, at)


def cosine(lr: float, total: int, final: float = 0.0) -> Schedule:
    """Go from `lr` to `final` along half a cosine in `total` steps, and stay there (Loshchilov and Hutter 2017)."""
    _check_total("cosine", total)
    return lambda at: final + (lr - final) * (1 + cos(pi * min(at, total) / total)) / 2


def polynomial(lr: float, total: int, power: float = 1.0, final: float = 0.0) -> Schedule:
    """Go from `lr` to `final` as ``(1 - step / total) ** power``, and stay there; power 1 is a straight line."""
    _check_total("polynomial", total)
    return lambda at: final + (lr - final) * (1 - min(at, total) / total) ** power


def exponential(lr: float, factor: float) -> Schedule:
    """Multiply the rate by `factor` at every step."""
    return lambda at: lr * factor**at


def warm_up(schedule: Schedule, steps: int, start: float = 0.0) -> Schedule:
    """Go straight from ``start * schedule(0)`` to ``schedule(0)`` in `steps` steps; the schedule begins there.

    Parameters
    ----------
    start : float
        A fraction of the first rate. With 0 the very first step does not move.
    """
    if steps < 0:
        raise ValueError(f"warm_up: takes 0 steps or more, got {steps}")

    def warmed(at: int) -> float:
        if at < steps:
            return schedule(0) * (start + (1 - start) * at / steps)
        return schedule(at - steps)

    return warmed


def _check_total(name: str, total: int) -> None:
    if total < 1:
        raise ValueError(f"{name}: the total is 1 step or more, got {total}")
