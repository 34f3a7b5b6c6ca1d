"""The groups of measurements, and a run of some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from hpcpar.bench import resources, training
from hpcpar.bench.measure import Measure
from hpcpar.bench.options import Options
from hpcpar.bench.process import Worker

GROUPS = {
    "kernels": "convolutions, pooling, norms, activations, optimizers: shares of the machine's own rates",
    "attention": "attention beside torch, and products of matrices in float32 and in two bytes",
    "ops": "what one small operation costs above NumPy",
    "steps": "training steps of CosmoFlow and the U-Net on one rank, beside torch",
    "ranks": "the same split in depth and in samples; sums of gradients and halo exchanges beside plain MPI",
    "memory": "peak of a step beside the formula; seconds of importing",
    "share": "time of a step outside of kernels and messages",
}


def run(groups: Sequence[str], options: Options, say: Callable[[str], None] | None = None) -> list[Measure]:
    """Measure some groups, behind the machine itself, and return everything.

    Parameters
    ----------
    groups : sequence of str
        Keys of `GROUPS`; their order is that of `GROUPS`.
    say : callable, optional
        Is told what begins.

    Raises
    ------
    ValueError
        For an unknown group.
    BenchError
        When a contestant fails, or computes other gradients than the first.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ValueError(f"there is no group {unknown[0]!r}; the groups are {', '.join(GROUPS)}")
    say = say or (lambda text: None)
    say("machine")
    found = alone("machine", options)
    gemm, copy = (m.value for m in found)
    if "ranks" in groups:
        found += with_ranks(["machine"], options)
    for group in [group for group in GROUPS if group in groups]:
        say(group)
        if group == "kernels":
            found += alone(group, options, gemm=gemm, copy=copy)
        elif group in ("attention", "ops"):
            found += alone(group, options)
        elif group == "steps":
            found += training.steps(options)
        elif group == "ranks":
            found += with_ranks(["reductions", "halos", "progress"], options)
            found += training.split_depth(options) + training.split_batch(options)
        elif group == "memory":
            found += resources.memory(options) + resources.imports(options)
        else:
            found += resources.outside(options)
    return found


def alone(what: str, options: Options, **more: float) -> list[Measure]:
    """Return what a process of its own measures, with one thread."""
    with Worker(["-m", "hpcpar.bench.alone"]) as worker:
        return [Measure(**plain) for plain in worker.ask(what, **asdict(options), **more)]


def with_ranks(what: Sequence[str], options: Options) -> list[Measure]:
    """Return what a job of several ranks measures."""
    with Worker(["-m", "mpi4py", "-m", "hpcpar.bench.messages"], options.ranks) as worker:
        return [Measure(**plain) for name in what for plain in worker.ask(name, **asdict(options))]
