"""The command as users start it: one message for a mistake, a traceback for a crash, the right exit status."""

import json
import re
import sys

import pytest

from hpcpar.cli.main import main
from hpcpar.testing import mpi_run

COMMAND = ["-m", "hpcpar"]

JOB = """
[model]
name = "unet3d"
[loss]
name = "cross_entropy"
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def raise_in_two_ways():
    """What main does with an error on one rank only; rank 0 stays in a collective call."""
    from mpi4py import MPI

    from hpcpar.cli import ending

    if MPI.COMM_WORLD.rank == 1:
        sys.exit(ending.user_error(ValueError("block 1 is missing"), parallel=True))
    MPI.COMM_WORLD.barrier()


def different_messages():
    from mpi4py import MPI

    from hpcpar.cli import ending

    rank = MPI.COMM_WORLD.rank
    return ending.user_error(ValueError("no space" if rank == 2 else "no file"), parallel=True)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "JOB", "--set", "run.setps=3"], "--set run.setps=3: unknown key run.setps; did you mean run.steps?"),
        (["train", "missing.toml"], "missing.toml: no such file or directory"),
        (["trian", "JOB"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: JOB.toml"),
        (["data", "brian"], "invalid choice: 'brian'"),
        (["plot", "no-such-run"], "no-such-run/metrics.jsonl: no such file or directory"),
        (["data", "cosmology", "--universes", "0", "--out", "OUT"], "0 universes"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_is_one_message_and_status_2(job, tmp_path, capsys, words, message):
    words = [{"JOB": str(job), "OUT": str(tmp_path / "out")}.get(w, w) for w in words]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("hpcpar: error: ") and message in shown.err
    assert shown.out == "" and "Traceback" not in shown.err


@pytest.mark.serial
def test_an_error_from_a_library_names_its_place(capsys, monkeypatch, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.setattr("hpcpar.train.plot.read_metrics", lambda path: int("seven"))
    assert main(["plot", str(tmp_path)]) == 2
    assert re.search(r"'seven' \(ValueError at .*test_command.py:\d+; HPCPAR_TRACEBACK=1", capsys.readouterr().err)


@pytest.mark.serial
def test_the_traceback_is_shown_on_request(job, capsys, monkeypatch):
    monkeypatch.setenv("HPCPAR_TRACEBACK", "1")
    assert main(["train", str(job), "--set", "run.steps=0"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.rstrip().endswith("run.steps must be at least 1, got 0 (an integer)")


@pytest.mark.serial
def test_processes_that_do_not_find_each_other_are_refused_but_info_explains(job, capsys, monkeypatch):
    for name, value in (("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    assert main(["train", str(job)]) == 2
    assert "launcher started 4 processes" in capsys.readouterr().err
    assert main(["info"]) == 0
    assert "WARNING     the launcher started 4 processes" in capsys.readouterr().out


@pytest.mark.serial
def test_version_and_help(capsys):
    from hpcpar.version import __version__

    for words, text in ((["--version"], f"hpcpar {__version__}"), (["data", "brain", "--help"], "--spacing")):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0 and text in capsys.readouterr().out


@pytest.mark.spawns_mpi
def test_info_knows_all_ranks():
    facts = json.loads(mpi_run(3, [*COMMAND, "info", "--json"]).check().stdout)
    assert facts["mpi"]["size"] == 3 and len(facts["threads"]) == 3
    assert [row["ranks"] for row in facts["nodes"]] == [[0, 1, 2]]
    assert all(row["OMP_NUM_THREADS"] == "1" for row in facts["threads"])
    assert facts["hdf5"]["h5py"] == facts["packages"]["h5py"]
    assert {row["family"] for row in facts["kernels"]} >= {"conv", "pool", "norm"}


@pytest.mark.spawns_mpi
def test_a_mistake_on_all_ranks_is_told_once(job):
    run = mpi_run(3, [*COMMAND, "train", str(job), "--set", "run.seed=x"])
    assert run.returncode == 2
    assert run.stderr.count("hpcpar: error") == 1 and "run.seed must be an integer" in run.stderr
    assert run.seconds < 20


@pytest.mark.spawns_mpi
def test_a_mistake_on_one_rank_ends_the_job_with_its_message():
    run = mpi_run(2, raise_in_two_ways)
    assert run.returncode != 0 and run.seconds < 20
    assert "rank 1 of 2: hpcpar: error: block 1 is missing" in run.stderr


@pytest.mark.spawns_mpi
def test_mistakes_that_differ_are_all_told():
    run = mpi_run(4, different_messages).check()
    assert run.results == dict.fromkeys(range(4), 2)
    assert run.stderr.count("hpcpar: error: no file") == 1
    assert run.stderr.count("rank 2 of 4: hpcpar: error: no space") == 1


@pytest.mark.spawns_mpi
def test_ranks_share_the_making_of_data(tmp_path):
    out = tmp_path / "universes"
    words = ["data", "cosmology", "--universes", "3", "--width", "8", "--out", str(out)]
    run = mpi_run(2, [*COMMAND, *words]).check()
    assert len(list(out.rglob("*.h5"))) == 3
    assert f"cosmology: 3 files written, 0 already there, in {out}\n" in run.stdout
    assert "cosmology: 3 files in" in run.stdout and "2 rank(s)" in run.stdout
    again = mpi_run(1, [*COMMAND, *words]).check()
    assert "0 files written, 3 already there" in again.stdout


@pytest.mark.spawns_mpi
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["summary", "JOB", "--set", "model.levels=1", "--shape", "8"], 0, ""),
        (["summary", "missing.toml"], 2, "missing.toml: no such file or directory"),
        (["checkpoint", "show", "missing"], 2, "missing"),
        (["plot", "missing"], 2, "metrics.jsonl: no such file or directory"),
    ],
)
def test_what_rank_0_does_alone_waits_for_no_other_rank(job, words, status, message):
    run = mpi_run(2, [*COMMAND, *(str(job) if w == "JOB" else w for w in words)], timeout=30)
    assert run.returncode == status
    assert run.stderr.count("hpcpar: error: ") == bool(status) and message in run.stderr
