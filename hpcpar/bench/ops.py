"""What one small operation costs above NumPy: the layout rule and the tape, on one rank and arrays of 4 x 4."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcpar as hp
from hpcpar import functional as F
from hpcpar.bench.measure import Measure, in_turns, spread, stopwatch
from hpcpar.bench.options import Options
from hpcpar.tensors import Tensor

CALLS = 2000


def measure(options: Options) -> list[Measure]:
    """Return microseconds above NumPy of add, linear and ReLU, recorded by the tape: forward, and with backward."""
    random = np.random.default_rng(0)
    a, b, w, bias, g = (random.standard_normal(s, np.float32) for s in ((4, 4), (4, 4), (4, 4), (4,), (4, 4)))
    mesh = hp.Mesh()
    with mesh:
        ta, tb, tw, tbias = (hp.tensor(array, requires_grad=True) for array in (a, b, w, bias))
        tg = hp.tensor(g)
        pairs = {
            "add": (lambda: ta + tb, lambda: a + b, lambda: (g, g), (ta, tb)),
            "linear": (
                lambda: F.linear(ta, tw, tbias),
                lambda: a.dot(w.T) + bias,
                lambda: (g.dot(w), g.T.dot(a), g.sum(0)),
                (ta, tw, tbias),
            ),
            "relu": (lambda: F.relu(ta), lambda: np.maximum(a, 0), lambda: g * (a > 0), (ta,)),
        }
        found: list[Measure] = []
        for name, (call, forward, backward, leaves) in pairs.items():
            found += _pair(name, call, forward, backward, leaves, tg, options)
    mesh.free()
    return found


def _pair(
    name: str,
    call: Callable[[], Tensor],
    forward: Callable[[], Any],
    backward: Callable[[], Any],
    leaves: tuple[Tensor, ...],
    g: Tensor,
    options: Options,
) -> list[Measure]:
    """An operation and the same in NumPy, in turns."""

    def both_passes() -> None:
        call().backward(g)
        for leaf in leaves:
            leaf.grad = None

    def plain_passes() -> None:
        forward()
        backward()

    runs = {"f": call, "f numpy": forward, "fb": both_passes, "fb numpy": plain_passes}
    calls = 20 if options.quick else CALLS
    seconds = in_turns({key: stopwatch(_many(run, calls)) for key, run in runs.items()}, options.rounds(9), warm_up=2)
    found = []
    for key, words in (("f", "forward"), ("fb", "forward and backward")):
        above = [(ours - plain) / calls for ours, plain in zip(seconds[key], seconds[f"{key} numpy"], strict=True)]
        note = f"NumPy {statistics.median(seconds[f'{key} numpy']) / calls * 1e6:.2f} us"
        found.append(spread("ops", f"{name}: {words}, above NumPy", above, "us", 1e6, note))
    return found


def _many(function: Callable[[], Any], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            function()

    return run
