"""Programs started under the mpiexec of this interpreter, with whatever MPI it has."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcpar.testing import MpiTimeout, launch_environment, mpi_run
from hpcpar.testing.launch import is_open_mpi

pytestmark = pytest.mark.spawns_mpi


def sum_of_ranks(offset):
    from mpi4py import MPI

    total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + offset)
    return {"total": total, "size": MPI.COMM_WORLD.size, "threads": os.environ["OMP_NUM_THREADS"]}


def raise_on_rank_one():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise RuntimeError("rank one has had enough")
    MPI.COMM_WORLD.barrier()


def sleep_for_ever():
    print("going to sleep", flush=True)
    time.sleep(600)


def test_a_function_runs_on_every_rank_and_its_values_come_back():
    run = mpi_run(3, sum_of_ranks, 10).check()
    assert run.results == {rank: {"total": 33, "size": 3, "threads": "1"} for rank in range(3)}


def test_a_script_gets_its_arguments(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nsys.stdout.write(f'{MPI.COMM_WORLD.size} {sys.argv[1:]}\\n')\n"
    )
    run = mpi_run(2, script, "--set", "a=1", cwd=tmp_path).check()
    assert run.stdout.count("2 ['--set', 'a=1']") == 2


def test_interpreter_arguments_and_variables_are_passed_on():
    text = "import os, sys, hpcpar.testing; sys.stdout.write('got {WORD} {OMP_NUM_THREADS}\\n'.format(**os.environ))"
    words = ["-c", text]
    run = mpi_run(2, words, env={"WORD": "this", "OMP_NUM_THREADS": "2"}).check()
    assert run.stdout.count("got this 2") == 2


def test_an_exception_on_one_rank_ends_the_job_and_is_shown():
    run = mpi_run(2, raise_on_rank_one)
    assert run.returncode != 0
    assert "rank one has had enough" in run.stderr
    assert run.results == {}
    with pytest.raises(AssertionError, match="rank one has had enough"):
        run.check()


def test_a_job_that_hangs_is_ended_and_shows_what_it_wrote():
    begin = time.monotonic()
    with pytest.raises(MpiTimeout, match="going to sleep"):
        mpi_run(2, sleep_for_ever, timeout=5)
    assert time.monotonic() - begin < 30


def test_only_functions_that_another_process_can_find_are_accepted():
    with pytest.raises(ValueError, match="top level"):
        mpi_run(2, lambda: None)


def leave_as_killed(process, folder):
    """What Open MPI's launcher of this process number leaves in `folder` when it is killed."""
    left = folder / f"ompi.{process}"
    left.mkdir()
    Path(left, f"pmix.{socket.gethostname()}.tool").touch()


def test_files_of_a_killed_launcher_of_the_same_number_do_no_harm(tmp_path, monkeypatch):
    if not is_open_mpi():
        pytest.skip("only Open MPI's launcher names its files by its process number")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for later in range(1, 200):  # the launcher is a child of this process: one of the next numbers
        leave_as_killed(os.getpid() + later, tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert mpi_run(2, sum_of_ranks, 0).check().results[0]["total"] == 1


def test_a_shell_starts_a_job_beside_files_of_a_killed_launcher(tmp_path):
    if not is_open_mpi():
        pytest.skip("only Open MPI's launcher names its files by its process number")
    left = f"ompi.$$/pmix.{socket.gethostname()}.tool"
    line = f"mkdir ompi.$$ && touch {left} && exec {sys.executable} -m hpcpar.testing.launch 2 -c 'print(1 + 1)'"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]


def test_environment_names_no_rank_of_this_process(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    env = launch_environment({"MORE": "1"})
    assert "PMI_RANK" not in env and "OMPI_COMM_WORLD_RANK" not in env
    assert env["MORE"] == "1" and env["PATH"] == os.environ["PATH"]


def test_large_values_come_back_whole():
    run = mpi_run(2, large_block).check()
    assert all(np.array_equal(run.results[r], np.full(100_000, r)) for r in range(2))


def large_block():
    from mpi4py import MPI

    return np.full(100_000, MPI.COMM_WORLD.rank)
