"""A signal to any one rank: all ranks save the same step, leave with status 75, and go on exactly."""

import os
import signal
import sys

import pytest

from hpcpar.checkpoint import Checkpoint, Folder
from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import assert_same_run, train_words
from hpcpar.train.signals import EXIT_REQUEUE, StopSignals

pytestmark = pytest.mark.spawns_mpi


def command(job_file):
    return train_words(job_file, "mesh.batch=1", "mesh.depth=-1", "checkpoint.every=0")


def signalled(words, place, rank, number):
    """The command on one rank; rank `rank` gets a signal at a place in its work."""
    from mpi4py import MPI

    from hpcpar.cli.main import main
    from hpcpar.data.hdf5 import HDF5Dataset
    from hpcpar.train import scores
    from hpcpar.train.trainer import Trainer

    sent = []

    def before(owner, name, call_number):
        """Send the signal to this process in the given call of a method."""
        original, calls = getattr(owner, name), []

        def calling(*args, **kwargs):
            calls.append(None)
            if len(calls) == call_number and MPI.COMM_WORLD.rank == rank:
                sent.append(os.kill(os.getpid(), number))
            return original(*args, **kwargs)

        setattr(owner, name, calling)

    if place == "train":
        before(Trainer, "train_step", 3)
    elif place == "validation":
        before(scores.Confusion, "add", 2)  # the second batch of the validation at step 4
    elif place == "data":
        before(HDF5Dataset, "read", 15)  # in the thread that reads ahead, while the main thread works or waits
    elif place == "start":
        before(Trainer, "_introduce", 1)
    code = main(words)
    assert bool(sent) == (MPI.COMM_WORLD.rank == rank)
    sys.exit(code)


@pytest.mark.parametrize(
    ("place", "rank", "number", "step"),
    [
        ("train", 1, signal.SIGUSR1, 3),
        ("validation", 0, signal.SIGTERM, 4),
        ("data", 1, signal.SIGUSR1, None),
        ("start", 1, signal.SIGTERM, 1),
    ],
    ids=["train", "validation", "data", "start"],
)
def test_all_ranks_save_the_same_step_and_go_on_exactly(job_file, whole, place, rank, number, step):
    run = mpi_run(2, signalled, command(job_file), place, rank, number)
    assert run.returncode == EXIT_REQUEUE, run.transcript()
    assert run.stdout.count("asked to stop: saved") == 1 and "Traceback" not in run.stderr
    folder = Folder(job_file.parent / "run" / "checkpoints")
    (saved,) = folder.steps()
    assert saved == (step or saved) and saved < 7
    Checkpoint(folder.at(saved)).verify()

    resumed = mpi_run(2, ["-m", "hpcpar", *command(job_file), "--resume", "auto"]).check()
    assert f"step-{saved:08d}" in resumed.stdout
    assert_same_run(job_file.parent / "run", whole)


def test_signals_have_their_old_meaning_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    signals = StopSignals()
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.asked
    signals.remove()
    assert signal.getsignal(signal.SIGTERM) is before
