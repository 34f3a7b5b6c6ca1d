"""Whether messages move while something is computed: by looks at them between pieces of work, or by a thread.

MPI moves bytes inside its calls alone. The package looks at what is under way between layers; the alternative is a
thread that looks all the time, and takes its share of the core and of the interpreter lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcpar as hp
from hpcpar.bench.measure import Measure, in_turns, spread
from hpcpar.bench.options import Options
from hpcpar.transport import yardstick
from hpcpar.transport.nonblocking import Reduction

NAP = 5e-4
"""Seconds between two looks of the thread."""
LAYERS = 12


def together(function: Callable[[], Any], calls: int = 1) -> Callable[[], float]:
    """Return a contestant that all ranks run at once; seconds a call, from the first's start to the last's end."""

    def run() -> float:
        yardstick.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        yardstick.barrier()
        return (time.perf_counter() - begin) / calls

    return run


def progress(options: Options) -> list[Measure]:
    """Return how long layers of products take while 16 MiB are summed over the ranks, by how the sum gets on."""
    mesh = hp.Mesh(batch=-1)
    n = 64 if options.quick else 1024
    matrix, out = np.ones((n, n), np.float32), np.empty((n, n), np.float32)
    buffer = np.zeros((1 << 16 if options.quick else 16 << 20) // 4, np.float32)

    def layers(between: Callable[[], Any]) -> None:
        for _ in range(LAYERS):
            np.matmul(matrix, matrix, out=out)
            between()

    def nothing() -> None:
        pass

    def looks() -> None:
        total = Reduction(mesh.world, buffer)
        layers(total.test)
        total.wait()

    def thread() -> None:
        total, ended = Reduction(mesh.world, buffer), threading.Event()

        def look() -> None:
            while not ended.is_set() and not total.test():
                time.sleep(NAP)

        looker = threading.Thread(target=look)
        looker.start()
        layers(nothing)
        ended.set()
        looker.join()
        total.wait()

    def late() -> None:
        total = Reduction(mesh.world, buffer)
        layers(nothing)
        total.wait()

    def first() -> None:
        Reduction(mesh.world, buffer).wait()
        layers(nothing)

    ways = {
        "layers alone": lambda: layers(nothing),
        "the sum first": first,
        "the sum waited for behind the layers": late,
        "a look at the sum after each layer": looks,
        "a thread looks at the sum": thread,
    }
    seconds = in_turns({name: together(way) for name, way in ways.items()}, options.rounds(9), warm_up=2)
    mesh.free()
    words = f"{LAYERS} products of {n} x {n}, {buffer.nbytes / (1 << 20):g} MiB summed"
    return [spread("ranks", f"{words}: {name}", took, "ms", 1e3) for name, took in seconds.items()]
