"""Logs of fingerprints: written, read and compared; the mode turned on from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcpar.checks import Log, Record, first_difference
from hpcpar.testing import mpi_run


def log_of(*values: float, what: str = "add", dtype: str = "float64") -> Log:
    log = Log()
    for value in values:
        log.add(Record(what, (2, 3), dtype, value, 10.0))
    return log


@pytest.mark.serial
def test_equal_runs_agree_up_to_rounding_in_their_dtype() -> None:
    assert first_difference(log_of(1, 2), log_of(1, 2 + 1e-12)) is None
    assert first_difference(log_of(1, 2, dtype="float32"), log_of(1, 2 + 1e-5, dtype="float32")) is None
    assert first_difference(log_of(float("nan")), log_of(float("nan"))) is None
    assert first_difference(log_of(1, 2), log_of(1, 2 + 1e-12), within=0) is not None


@pytest.mark.serial
def test_the_first_difference_is_named_with_its_factor() -> None:
    found = first_difference(log_of(1, 2, 3), log_of(1, 4, 9))
    assert found is not None and found.startswith("record 1: add (2, 3) float64 = 2") and found.endswith("factor of 2")


@pytest.mark.serial
def test_runs_that_do_different_things_or_end_early_are_named() -> None:
    assert "different things" in (first_difference(log_of(1), log_of(1, what="mul")) or "")
    assert "only the second run goes on, with add" in (first_difference(log_of(1), log_of(1, 2)) or "")
    assert "only the first run" in (first_difference(log_of(1, 2), log_of(1)) or "")


@pytest.mark.serial
def test_a_log_on_disk_is_there_before_the_run_ends(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add(Record("add", (2, 3), "float64", 1 / 3, 2.0))
    assert list(Log.read(tmp_path / "log")) == list(log), "every digit survives"
    log.close()


def small_program(width: int) -> float:
    """A rank's part of a run; the checked mode is turned on by the environment."""
    import hpcpar as hp
    from hpcpar.ops import core

    mesh = hp.Mesh(batch=-1)
    x = hp.tensor(np.arange(12.0 * width).reshape(12, width), mesh, hp.Layout("batch"), requires_grad=True)
    loss = (hp.functional.tanh(x * 0.01) * x).mean().resolve()
    loss.backward()
    return float(loss.item()) if core.observers else float("nan")


@pytest.mark.spawns_mpi
def test_logs_written_from_the_environment_are_compared_by_the_command(tmp_path: Path) -> None:
    logs = {}
    for name, ranks, width in (("serial", 1, 3), ("parallel", 2, 3), ("other", 2, 4)):
        logs[name] = str(tmp_path / name)
        run = mpi_run(ranks, small_program, width, env={"HPCPAR_CHECK": "1", "HPCPAR_CHECK_LOG": logs[name]}).check()
        assert not np.isnan(list(run.results.values())).any(), "the mode was off"

    def compare(first: str, second: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcpar.checks", logs[first], logs[second]]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    same, different = compare("serial", "parallel"), compare("serial", "other")
    assert same.returncode == 0 and "the runs agree in all 10 records" in same.stdout, same.stdout + same.stderr
    assert different.returncode == 1 and "record 0" in different.stdout
