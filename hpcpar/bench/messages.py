"""Messages between ranks: what MPI does on this machine, and what the package's reductions and halos take beside it.

A job of its own: ``python -m mpi4py -m hpcpar.bench.messages``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

import hpcpar as hp
from hpcpar.bench import process
from hpcpar.bench.measure import Measure, in_turns, rate, ratio, spread
from hpcpar.bench.options import Options
from hpcpar.bench.progress import progress, together
from hpcpar.layout.layout import Layout
from hpcpar.layout.maps import window_map
from hpcpar.layout.plan import block_plan
from hpcpar.parallel import GradientSync
from hpcpar.primitives.halo import HaloExchange
from hpcpar.primitives.stencil import split_halo
from hpcpar.signature import signature
from hpcpar.tensors import Parameter, Tensor
from hpcpar.transport import yardstick

PIECES = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Sizes in which plain MPI is tried."""

PLACES = 9
"""In how many places of memory the arrays of a small message lie in turn."""


def machine(options: Options) -> list[Measure]:
    """Return the rates of plain MPI: a send and receive between neighbours, the sum of one large array."""
    found, calls = [], 2 if options.quick else 50
    for nbytes in (1 << 10, 512 << 10) if options.quick else (1 << 10, 512 << 10, 8 << 20):
        out = np.ones(nbytes // 4, np.float32)
        into = np.empty_like(out)
        run = together(lambda out=out, into=into: yardstick.send_receive(out, into), calls)
        seconds = in_turns({"": run}, options.rounds(9))[""]
        name = f"MPI sendrecv, {nbytes >> 10} KiB each way"
        if nbytes < 64 << 10:
            found.append(spread("machine", name, seconds, "us", 1e6))
        else:
            found.append(rate("machine", name, seconds, 2e-9 * nbytes, "GB/s", "sent and received"))
    return found


def reductions(options: Options) -> list[Measure]:
    """Return how long the sum of 64 MiB of gradients takes, beside plain MPI in one piece and in many.

    Both sum float32 values where they lie and leave the result there. Of the gradients 60 MiB are large ones, 4 MiB
    are of 64 KiB each and travel packed.
    """
    mesh = hp.Mesh(batch=-1)
    large = 1 << 12 if options.quick else 1 << 20
    sizes = [large] * 15 + [large // 64] * 64
    array = np.ones(sum(sizes), np.float32)
    edges = np.cumsum([0, *sizes])
    gradients = [array[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    sigs = [signature(mesh, (size,), Layout()) for size in sizes]
    parameters = [Parameter(np.zeros(sig.shape, np.float32), sig) for sig in sigs]
    sync = GradientSync([(f"p{i}", p) for i, p in enumerate(parameters)])

    partial = [Tensor(g, sig.with_partial(("batch",))) for g, sig in zip(gradients, sigs, strict=True)]

    def sum_gradients() -> None:
        for parameter, gradient in zip(parameters, partial, strict=True):
            parameter.grad = gradient
        sync.finish()

    def timed(function: Callable[[], Any]) -> Callable[[], float]:
        contestant = together(function)

        def run() -> float:
            array.fill(0.5)
            return contestant()

        return run

    contestants = {"in one piece": timed(lambda: yardstick.all_reduce(array, array.nbytes))}
    for piece in PIECES:
        for at_once in (False, True):
            key = f"in pieces of {piece >> 10} KiB{', all at once' if at_once else ''}"
            contestants[key] = timed(lambda size=piece, at_once=at_once: yardstick.all_reduce(array, size, at_once))
    plain = list(contestants)
    contestants["ours"] = timed(sum_gradients)
    seconds = in_turns(contestants, options.rounds(9), warm_up=2)
    assert all(np.all(p.grad.shard == 0.5 * mesh.size) for p in parameters), "the sum of gradients is wrong"
    best = min(plain, key=lambda key: statistics.median(seconds[key]))
    words = f"{array.nbytes / (1 << 20):g} MiB, {mesh.size} ranks"
    found = [spread("ranks", f"MPI all-reduce of {words}, {key}", seconds[key], "ms", 1e3) for key in plain]
    note = "packing of the small ones included"
    found.append(spread("ranks", f"gradient all-reduce of {words}", seconds["ours"], "ms", 1e3, note))
    name = f"gradient all-reduce of {words} / best of plain MPI"
    found.append(ratio("ranks", name, seconds["ours"], seconds[best], f"best {best}"))
    mesh.free()
    return found


def halos(options: Options) -> list[Measure]:
    """Return how long the halo exchange of a block of 32 channels takes that is split in depth, beside one sendrecv."""
    mesh = hp.Mesh(depth=-1)
    edge = 8 if options.quick else 64
    halo = _depth_halo(mesh, edge)
    calls, count = (2, 1) if options.quick else (50, PLACES)
    places = [_buffer(halo, mesh.rank) for _ in range(count)]
    planes = [_planes(mesh.rank, *place) for place in places]
    nbytes, (buffer, block) = planes[0][0].nbytes, places[0]
    apart = block.copy(order="K")
    contestants = {
        "sendrecv": in_places(yardstick.send_receive, planes, calls),
        "in place": in_places(lambda buffer, block: halo.start(block, out=buffer).wait(), places, calls),
        "new": together(lambda: halo(apart), max(2, calls // 10)),
        "copy": together(lambda: np.copyto(block, apart), max(2, calls // 10)),
    }
    seconds = in_turns(contestants, options.rounds(3) * count, warm_up=2)
    if mesh.size > 1:
        plane = buffer[:, :, -1 if mesh.rank == 0 else 0]
        assert np.all(plane == (2.0 if mesh.rank == 0 else mesh.rank)), "the halo holds something else"
    words = f"32 channels, {edge}^3"
    found = [
        spread("ranks", f"MPI sendrecv of {nbytes >> 10} KiB", seconds["sendrecv"], "us", 1e6),
        spread("ranks", f"halo exchange of {words}: in a buffer that holds the block", seconds["in place"], "us", 1e6),
        spread("ranks", f"halo exchange of {words}: into a new buffer, block copied", seconds["new"], "us", 1e6),
        spread("ranks", f"copy of {words} into that buffer", seconds["copy"], "us", 1e6),
        ratio("ranks", f"halo exchange of {words} / MPI sendrecv", seconds["in place"], seconds["sendrecv"]),
    ]
    halo.free()
    mesh.free()
    return found


def in_places(call: Callable[..., Any], places: Sequence[tuple], calls: int) -> Callable[[], float]:
    """Return a timed contestant that takes its arrays from another place each turn.

    Where arrays come to lie in the caches decides about a third of what small messages take, for as long as a process
    lives: a figure of one place is a draw.
    """
    turn = cycle(place for place in places for _ in range(calls))
    return together(lambda: call(*next(turn)), calls)


def _buffer(halo: HaloExchange, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A buffer of the halo, and the own block in it."""
    buffer = np.zeros((1, *halo.shape[2:], 32), np.float32).transpose(0, 4, 1, 2, 3)
    block = halo.core(buffer)
    block[...] = rank + 1.0
    return buffer, block


def _planes(rank: int, buffer: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The plane that one rank of two sends and the one that it receives, each one run of memory."""
    sent, received = (block[0, :, -1], buffer[0, :, -1]) if rank == 0 else (block[0, :, 0], buffer[0, :, 0])
    return sent.transpose(1, 2, 0), received.transpose(1, 2, 0)


def _depth_halo(mesh: hp.Mesh, edge: int) -> HaloExchange:
    """What a 3^3 convolution needs of a cube on every rank."""
    depth = edge * mesh.size
    plans = [block_plan(window_map, depth, mesh.size, mesh.rank, depth, 3, 1, 1, 1)]
    plans += [block_plan(window_map, edge, 1, 0, edge, 1, 1, 1, 0)] * 2
    return split_halo(mesh, [("depth",), (), ()], plans, (1, 32), np.float32, pads="kernel")


def main() -> None:
    """Serve, on all ranks together."""
    rank = hp.Mesh().rank

    def receive() -> dict[str, Any] | None:
        return yardstick.turn(process.read() if rank == 0 else None)

    handlers = {
        f.__name__: lambda f=f, **options: [m.plain() for m in f(Options(**options))]
        for f in (machine, reductions, halos, progress)
    }
    process.serve(handlers, receive, process.answer if rank == 0 else lambda value: None)


if __name__ == "__main__":
    main()
