"""What goes wrong on one rank ends the job on all of them, quickly, with one explanation; no checkpoint is lost."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hpcpar.checkpoint import Checkpoint, Folder
from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import assert_same_run, train_words
from hpcpar.train.watchdog import EXIT_STALLED

pytestmark = pytest.mark.spawns_mpi
SETTINGS = ("mesh.batch=1", "mesh.depth=-1", "checkpoint.every=2")


def command(job_file, run="run", *more):
    return train_words(job_file, f"run.dir={job_file.parent / run}", *SETTINGS, *more)


def checkpoints(job_file, run="run"):
    return Folder(job_file.parent / run / "checkpoints")


def go_on(job_file, whole):
    """Resume and compare with a run that was never stopped."""
    resumed = mpi_run(2, ["-m", "hpcpar", *command(job_file), "--resume", "auto"]).check()
    assert "resuming from" in resumed.stdout
    assert_same_run(job_file.parent / "run", whole)


def failing(words, place, kind, rank=1):
    """The command on one rank, where rank `rank` raises `kind` (or does what it says) in step 5."""
    import sys

    from mpi4py import MPI

    from hpcpar import autograd
    from hpcpar.checkpoint import saver
    from hpcpar.cli.main import main
    from hpcpar.data.hdf5 import HDF5Dataset
    from hpcpar.train.trainer import Trainer

    step = {"now": 0}
    train_step = Trainer.train_step

    def counting(self, batches):
        step["now"] = self.step + 1
        return train_step(self, batches)

    Trainer.train_step = counting

    def fault():
        Path(words[1]).with_name("broken-at").write_text(str(time.time()))
        if kind == "sleep":
            time.sleep(1000)
        elif kind in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, kind))
        raise {"RuntimeError": RuntimeError, "OSError": OSError, "ValueError": ValueError}[kind]("broken on purpose")

    def break_(owner, name):
        original = getattr(owner, name)

        def breaking(*args, **kwargs):
            if step["now"] >= 5 and MPI.COMM_WORLD.rank == rank:
                fault()
            return original(*args, **kwargs)

        setattr(owner, name, breaking)

    if place == "loader":
        break_(HDF5Dataset, "read")
    elif place == "forward":
        from hpcpar.models import UNet3d

        break_(UNet3d, "forward")
    elif place == "backward":
        break_(autograd, "backward")
    elif place == "save":
        break_(saver, "write_shard")
    sys.exit(main(words))


@pytest.mark.parametrize(
    ("place", "kind", "background"),
    [
        ("loader", "OSError", True),
        ("forward", "RuntimeError", True),
        ("backward", "ValueError", False),
        ("save", "OSError", False),
        ("save", "OSError", True),
    ],
    ids=["loader", "forward", "backward", "save", "save-async"],
)
def test_an_error_on_one_rank_ends_all(job_file, place, kind, background):
    words = command(job_file, "run", f"checkpoint.async={str(background).lower()}")
    run = mpi_run(2, failing, words, place, kind)
    assert time.time() - float(job_file.with_name("broken-at").read_text()) < 20
    assert run.returncode not in (0, 75)
    assert run.stderr.count("broken on purpose\n") >= 1 and "rank 1" in run.stderr, run.transcript()
    # what one rank met is shown with its traceback; a save fails on all ranks, with a message
    assert run.stderr.count("Traceback (most recent call last)") == (place != "save"), run.transcript()
    steps = checkpoints(job_file).steps()
    assert steps and steps[0] <= 4
    Checkpoint(checkpoints(job_file).at(steps[0])).verify()


def test_a_killed_rank_loses_nothing_that_was_saved(job_file, whole):
    run = mpi_run(2, failing, command(job_file), "backward", "SIGKILL")
    assert run.returncode != 0
    assert checkpoints(job_file).steps() == [4, 2]
    go_on(job_file, whole)


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(job_file, whole):
    run = mpi_run(2, failing, command(job_file), "save", "SIGKILL")
    assert run.returncode != 0
    assert checkpoints(job_file).steps() == [4, 2]
    assert list(checkpoints(job_file).path.glob(".step-*.part"))
    go_on(job_file, whole)
    assert not list(checkpoints(job_file).path.glob(".step-*.part"))


@pytest.mark.parametrize("kind", ["sleep", "SIGSTOP"])
def test_the_watchdog_names_who_did_not_arrive(job_file, kind):
    run = mpi_run(3, failing, command(job_file, "run", "run.watchdog=4"), "forward", kind, timeout=120)
    assert run.returncode == EXIT_STALLED or run.returncode != 0
    assert run.stderr.count("hpcpar: no progress for") == 1, run.transcript()
    assert "ranks 0, 2 wait in " in run.stderr
    if kind == "sleep":
        assert "rank 1 did not arrive, module UNet3d: " in run.stderr and "time.sleep(1000)" in run.stderr
    else:
        assert "rank 1 did not arrive and left no report" in run.stderr


def poison(words):
    """Rank 1 reads a NaN in its own block at step 3."""
    import sys

    import numpy as np
    from mpi4py import MPI

    from hpcpar.cli.main import main
    from hpcpar.train.trainer import Trainer

    original = Trainer.train_step

    def train_step(self, batches):
        if self.step == 2 and MPI.COMM_WORLD.rank == 1:
            batches[0][0].shard[0, 0, 0, 0, 0] = np.nan
        return original(self, batches)

    Trainer.train_step = train_step
    sys.exit(main(words))


def test_a_nan_on_one_rank_stops_all_together(job_file):
    run = mpi_run(2, poison, command(job_file, "run", "checkpoint.async=true"))
    assert run.returncode == 2, run.transcript()
    assert run.stderr.count("step 3: the loss is nan") == 1 and "the input is not finite" in run.stderr
    assert checkpoints(job_file).steps() == [2]


def limited(words, nbytes):
    """Rank 1 may not write files larger than a limit, as on a full disk or with a quota."""
    import resource
    import sys

    from mpi4py import MPI

    from hpcpar.cli.main import main

    if MPI.COMM_WORLD.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    sys.exit(main(words))


def test_a_limit_on_one_rank_is_told_with_file_and_rank(job_file):
    run = mpi_run(2, limited, command(job_file), 5000)
    assert run.returncode == 2, run.transcript()
    assert "checkpoint of step 2 could not be written: rank 1: " in run.stderr
    assert "shard-00001.h5" in run.stderr and "file too large" in run.stderr.lower()
    assert run.stderr.count("hpcpar: error") == 1 and checkpoints(job_file).steps() == []


def mounted(folder, *options):
    """Mount something there; skip where this is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_leaves_the_checkpoints_before(job_file):
    folder = job_file.parent / "run" / "checkpoints"
    folder.parent.mkdir()
    mounted(folder, "-t", "tmpfs", "-o", "size=500k", "tmpfs")
    try:
        run = mpi_run(2, ["-m", "hpcpar", *command(job_file, "run", "checkpoint.keep=9", "run.steps=40")])
        assert run.returncode == 2, run.transcript()
        assert run.stderr.count("hpcpar: error") == 1
        assert "could not be written" in run.stderr and "no space left" in run.stderr.lower()
        steps = checkpoints(job_file).steps()
        assert steps and not list(folder.glob(".step-*"))
        for step in steps:
            Checkpoint(checkpoints(job_file).at(step)).verify()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_folder_is_told_before_the_first_step(job_file):
    folder = job_file.parent / "run"
    folder.mkdir()
    mounted(folder, "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs")
    try:
        run = mpi_run(2, ["-m", "hpcpar", *command(job_file)])
        assert run.returncode == 2 and run.stderr.count("hpcpar: error") == 1, run.transcript()
        assert "read-only file system" in run.stderr
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def powerless(words):
    """The command, without the right of root to write everywhere."""
    import ctypes
    import sys

    from hpcpar.cli.main import main

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of capabilities, this process
    granted = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, granted) == 0
    for word in range(3):
        granted[word] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, granted) == 0
    sys.exit(main(words))


def test_missing_permission_is_told_before_the_first_step(job_file):
    folder = job_file.parent / "run"
    folder.mkdir(mode=0o500)
    run = mpi_run(2, powerless, command(job_file))
    assert run.returncode == 2 and run.stderr.count("hpcpar: error") == 1, run.transcript()
    assert f"error: {folder}" in run.stderr and "permission denied" in run.stderr


def losing(words):
    """A file of the training data vanishes after step 2."""
    import glob
    import sys

    from mpi4py import MPI

    from hpcpar.cli.main import main
    from hpcpar.train.trainer import Trainer

    original = Trainer.train_step

    def train_step(self, batches):
        if self.step == 2:
            self.train_batches.loader.dataset.close()
            if MPI.COMM_WORLD.rank == 0:
                for path in glob.glob(self.job.data.train + "/*.h5"):
                    os.unlink(path)
            MPI.COMM_WORLD.barrier()
        return original(self, batches)

    Trainer.train_step = train_step
    sys.exit(main(words))


def test_a_file_that_vanishes_is_named(job_file):
    run = mpi_run(2, losing, command(job_file, "run", "data.prefetch=0"))
    assert run.returncode != 0 and run.seconds < 40
    assert "train" in run.stderr and "does not exist" in run.stderr, run.transcript()
    assert checkpoints(job_file).steps() == [2]


def out_of_step(words):
    """In step 2 rank 1 calls a collective that rank 0 does not."""
    import sys

    import numpy as np
    from mpi4py import MPI

    from hpcpar.cli.main import main
    from hpcpar.train.trainer import Trainer

    original = Trainer.train_step

    def train_step(self, batches):
        if self.step == 1 and MPI.COMM_WORLD.rank == 1:
            self.mesh.world.all_reduce(np.zeros(3))
        return original(self, batches)

    Trainer.train_step = train_step
    sys.exit(main(words))


def test_the_checked_mode_names_both_sides_of_the_first_mismatch(job_file):
    # of several batches a step first counts the voxels, with a collective of its own
    run = mpi_run(2, out_of_step, [*command(job_file, "run", "optim.accumulate=1"), "--checked"])
    assert run.returncode not in (0, 75) and run.seconds < 60
    line = next(line for line in run.stderr.splitlines() if "CheckError: " in line)
    assert "rank 0 applies down0.conv1.conv on " in line and "; rank 1 calls all_reduce of sum of (3,)" in line
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.transcript()


def test_the_checked_mode_changes_no_result(job_file, whole):
    run = mpi_run(2, ["-m", "hpcpar", *command(job_file), "--checked"], timeout=180)
    assert run.check().returncode == 0
    assert_same_run(job_file.parent / "run", whole)
