"""Memory of a step beside the formula, time outside of kernels and messages, seconds until the package is imported."""

from __future__ import annotations

import subprocess
import sys

from hpcpar.bench import cases
from hpcpar.bench.measure import Measure, in_turns, spread
from hpcpar.bench.options import Options
from hpcpar.bench.training import LABELS, ours
from hpcpar.testing.launch import launch_environment

IMPORTS = {
    "import hpcpar": "import hpcpar",
    "import of what a training script needs": "from hpcpar import Tensor, models, nn, optim, parallel",
}


def memory(options: Options) -> list[Measure]:
    """Return the peak of a step of both networks, above what libraries take, and as a ratio to ``hpcpar summary``."""
    found = []
    for case in cases.networks(options.quick):
        label = LABELS[case.network]
        with ours(case) as worker:
            peak = worker.ask("peak")
        found.append(Measure("memory", f"{label}: peak of a step", peak["taken"] / 2**20, "MiB"))
        found.append(Measure("memory", f"{label}: formula", peak["formula"] / 2**20, "MiB"))
        found.append(Measure("memory", f"{label}: peak of a step / formula", peak["taken"] / peak["formula"], "ratio"))
    return found


def outside(options: Options) -> list[Measure]:
    """Return which share of a step of both networks is spent in kernels, in messages, and outside of both."""
    found = []
    for case in cases.networks(options.quick):
        label = LABELS[case.network]
        with ours(case) as worker:
            steps = [worker.ask("share") for _ in range(2 + options.rounds(7))][2:]
        for part in ("kernels", "messages", "outside"):
            words = "outside of kernels and messages" if part == "outside" else f"in {part}"
            shares = [step[part] / step["step"] for step in steps]
            found.append(spread("share", f"{label}: time {words}", shares, "share"))
    return found


def imports(options: Options) -> list[Measure]:
    """Return seconds that imports take in a fresh interpreter."""
    contestants = {name: lambda text=statement: _seconds(text) for name, statement in IMPORTS.items()}
    seconds = in_turns(contestants, options.rounds(7))
    return [spread("memory", name, took, "s") for name, took in seconds.items()]


def _seconds(statement: str) -> float:
    program = f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=launch_environment(), capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[-1])
