"""How fast checkpoints are here, against a plain write of the same bytes to the same disk.

    mpiexec -n 2 python -m hpcpar.checkpoint.measure /scratch/me --megabytes 512

Each way of writing is taken in turn, several times; medians are printed, with the spread. Bytes are counted over all
ranks, a write ends when it is on the disk (fsync), and the caches of the operating system are as training leaves them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcpar.checkpoint.folder import Folder
from hpcpar.checkpoint.reading import Checkpoint
from hpcpar.checkpoint.saver import Saver
from hpcpar.creation import from_shard, tensor
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.tensors import Tensor

CHUNK_BYTES = 8 << 20
ARRAYS = 16
PASS_SECONDS = 0.05
"""A step of the training: forward and backward pass, while which the weights are not changed."""


def main() -> None:
    """Measure and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="on the disk to be measured")
    parser.add_argument("--megabytes", type=int, default=256, help="of one checkpoint, over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    mesh = Mesh(batch=-1)
    folder = Path(args.folder, "hpcpar-measure")
    if mesh.rank == 0:
        folder.mkdir(parents=True)
    mesh.world.barrier()
    tensors = make_tensors(mesh, args.megabytes << 20)
    try:
        times = measure(mesh, folder, tensors, args.rounds)
    finally:
        mesh.world.barrier()
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if mesh.rank == 0:
        print("\n".join(table(times, sum(t.numel() * t.dtype.itemsize for t in tensors.values()), mesh.size)))


def make_tensors(mesh: Mesh, nbytes: int) -> dict[str, Tensor]:
    """Return convolution weights, kernel first in memory: half of the bytes replicated, half split over the ranks."""
    channels = max(8, int((nbytes / ARRAYS / 4 / 27) ** 0.5))
    made: dict[str, Tensor] = {}
    for i in range(ARRAYS):
        shape = (channels, channels, 3, 3, 3)
        if i % 2:
            made[f"model/replicated{i}"] = tensor(_kernel_first(shape), mesh)
        else:
            low, high = mesh.rank * channels // mesh.size, (mesh.rank + 1) * channels // mesh.size
            shard = _kernel_first((high - low, *shape[1:]))
            made[f"model/split{i}"] = from_shard(shard, shape, mesh, Layout("batch"))
    return made


def measure(mesh: Mesh, folder: Path, tensors: dict[str, Tensor], rounds: int) -> dict[str, list[float]]:
    """Return seconds of each kind: plain, blocking, pause (of training, in the background), load, verify.

    Parameters
    ----------
    mesh : Mesh
        Over all ranks. Collective.
    folder : path
        Where files are written and removed again.
    tensors : dict of str to Tensor
        What a checkpoint holds.
    rounds : int
        How often each kind is measured; they take turns.
    """
    world, saver = mesh.world, Saver(Folder(folder / "c"), mesh.world, keep=1)
    mine = sum(t.numel() * t.dtype.itemsize for t in tensors.values()) // mesh.size
    data = np.random.default_rng(mesh.rank).integers(0, 255, mine, np.uint8)
    times: dict[str, list[float]] = {kind: [] for kind in ("plain", "blocking", "pause", "background", "verify")}

    def timed(kind: str, call: Callable[[], object]) -> None:
        world.barrier()
        begin = time.perf_counter()
        call()
        world.barrier()
        times[kind].append(time.perf_counter() - begin)

    saver.save(0, tensors, {})  # memory for the copy is taken once
    for step in range(1, 2 * rounds + 1, 2):
        timed("plain", lambda: _plain(folder / f"plain-{mesh.rank}", data))
        timed("blocking", lambda step=step: saver.save(step, tensors, {}))
        pause, whole = _in_background(saver, step + 1, tensors)
        times["pause"].append(pause)
        times["background"].append(whole)
        path = saver.folder.at(step + 1)
        timed("verify", lambda path=path: Checkpoint(path).verify(mesh.rank, mesh.size))
    return times


def table(times: dict[str, list[float]], nbytes: int, ranks: int) -> list[str]:
    """Return lines: medians with least and most, and the two ratios that matter."""
    middle = {kind: float(np.median(values)) for kind, values in times.items()}
    lines = [f"{nbytes / 1e6:.0f} MB on {ranks} rank(s), {len(times['plain'])} rounds: median (least to most)"]
    for kind, values in times.items():
        speed = "" if kind == "pause" else f"  {nbytes / 1e6 / middle[kind]:8.0f} MB/s"
        lines.append(f"  {kind:<11}{middle[kind]:8.3f} s ({min(values):.3f} to {max(values):.3f}){speed}")
    ratios = [a / b for a, b in zip(times["plain"], times["blocking"], strict=True)]
    lines.append(f"  blocking save: {np.median(ratios):.2f} of the bandwidth of a plain write")
    lines.append(f"  pause in the background: {100 * middle['pause'] / middle['blocking']:.1f} % of a blocking save")
    return lines


def _kernel_first(shape: tuple[int, ...]) -> np.ndarray:
    memory = np.random.default_rng(0).random((*shape[2:], shape[1], shape[0]), np.float32)
    return memory.transpose(4, 3, 0, 1, 2)


def _plain(path: Path, data: np.ndarray) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for start in range(0, data.size, CHUNK_BYTES):
            os.write(number, data[start : start + CHUNK_BYTES])
        os.fsync(number)
    finally:
        os.close(number)
    path.unlink()


def _in_background(saver: Saver, step: int, tensors: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds that the main thread spends on a checkpoint, and seconds until it is published."""
    comm = saver.comm
    comm.barrier()
    begin = time.perf_counter()
    saver.start(step, tensors, {}, steady=tensors)
    pause = time.perf_counter() - begin
    while saver.active:
        time.sleep(PASS_SECONDS)
        turn = time.perf_counter()
        saver.settle()  # the optimizer's step would come now
        saver.advance(int(comm.all_reduce(np.array([saver.status()]), "max")[0]))
        pause += time.perf_counter() - turn
    return pause, time.perf_counter() - begin


if __name__ == "__main__":
    main()
