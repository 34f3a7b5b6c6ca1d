"""What one thread of this machine does at best: products, copies. Everything else is measured against these."""

from __future__ import annotations

import numpy as np

from hpcpar.bench.measure import Measure, in_turns, rate, stopwatch
from hpcpar.bench.options import Options

GEMM = "product of float32 matrices, NumPy"
COPY = "copy, from memory"


def measure(options: Options) -> list[Measure]:
    """Return the rates of matrix products, and of copies that fit into no cache: read and written both count."""
    sizes = (64, 128) if options.quick else (1024, 2048)
    copied = 1 << 20 if options.quick else 1 << 28  # bytes
    random = np.random.default_rng(0)
    contestants, work = {}, {}
    for n in sizes:
        a, b = (random.standard_normal((n, n), np.float32) for _ in range(2))
        out = np.empty_like(a)
        contestants[n] = stopwatch(lambda a=a, b=b, out=out: np.matmul(a, b, out=out), options.least)
        work[n] = 2e-9 * n**3
    source = np.ones(copied // 4, np.float32)
    target = np.zeros_like(source)
    contestants["copy"] = stopwatch(lambda: np.copyto(target, source), options.least)
    seconds = in_turns(contestants, options.rounds(7))
    n = min(sizes, key=lambda n: sorted(seconds[n])[len(seconds[n]) // 2] / work[n])  # the faster of them
    return [
        rate("machine", GEMM, seconds[n], work[n], "GFLOP/s", f"{n} x {n}"),
        rate("machine", COPY, seconds["copy"], 2e-9 * source.nbytes, "GB/s", f"{source.nbytes >> 20} MiB"),
    ]
