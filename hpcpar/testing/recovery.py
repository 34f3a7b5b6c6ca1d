"""How long it takes to be back after a rank was killed: ``python -m hpcpar.testing.recovery [RANKS]``.

A small training saves every 20 steps; one rank gets SIGKILL after step 45. Printed are the seconds until the job has
ended, from the restart to the choice of a checkpoint (with the start of Python and MPI), and to the end of the first
step; the steps between checkpoint and kill are computed again.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from hpcpar.testing.launch import mpi_run
from hpcpar.testing.small_job import train_words, write_small_job

SETTINGS = ("run.steps=60", "checkpoint.every=20", "run.validate_every=0")


def killed(words: list[str], stamp: str) -> None:
    """Train; the last rank writes the time and kills itself after step 45."""
    from mpi4py import MPI

    from hpcpar.cli.main import main
    from hpcpar.train.trainer import Trainer

    train_step = Trainer.train_step

    def step(self: Trainer, batches: list) -> float:
        if self.step == 45 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
            Path(stamp).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, batches)

    Trainer.train_step = step
    sys.exit(main(words))


def resumed(words: list[str], stamp: str) -> None:
    """Train; rank 0 writes when it began its first step and when that was done."""
    from mpi4py import MPI

    from hpcpar.cli.main import main
    from hpcpar.train.trainer import Trainer

    train_step, marks = Trainer.train_step, []

    def step(self: Trainer, batches: list) -> float:
        marks.append(time.time())
        value = train_step(self, batches)
        if len(marks) == 1 and MPI.COMM_WORLD.rank == 0:
            Path(stamp).write_text(f"{self.step} {marks[0]} {time.time()}")
        return value

    Trainer.train_step = step
    sys.exit(main([*words, "--resume", "auto"]))


def main() -> None:
    """Kill, restart, print."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        job, stamp = write_small_job(Path(folder)), str(Path(folder, "stamp"))
        words = train_words(job, *SETTINGS)
        run = mpi_run(ranks, killed, words, stamp, timeout=300)
        ended = time.time() - float(Path(stamp).read_text())
        restart = time.time()
        mpi_run(ranks, resumed, words, stamp, timeout=300).check()
        step, begin, done = map(float, Path(stamp).read_text().split())
    print(
        f"{ranks} ranks: job ended {ended:.1f} s after the kill (status {run.returncode}); after the restart the first "
        f"step began at {begin - restart:.1f} s and step {step:.0f} was done at {done - restart:.1f} s"
    )


if __name__ == "__main__":
    main()
