"""``hpcpar check``: the table, the oracles, the exit status."""

import argparse

import pytest
from mpi4py import MPI

from hpcpar.cli import check
from hpcpar.cli.ending import UsageError
from hpcpar.testing import twins

RANKS, RANK = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()


def run(words):
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return check.run(parser.parse_args(words))


def test_the_serial_oracle_needs_no_torch_and_finds_no_difference(capsys):
    assert run(["--cases", "30", "--oracle", "serial"]) == 0
    text = capsys.readouterr().out
    assert RANK or ("worst error" in text and "plain kernels" in text and " 0 failed" in text)


def test_a_mesh_and_families_may_be_chosen(capsys):
    words = ["--cases", "10", "--oracle", "serial", "--only", "flip", "roll", "--mesh", f"depth={RANKS}", "batch=1"]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert RANK or [line.split()[0] for line in lines[1:3]] == ["flip", "roll"]


def test_the_table_as_markdown(capsys):
    assert run(["--cases", "6", "--oracle", "serial", "--only", "pad", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert RANK or (text.startswith("# Operations and layouts") and "| pad |" in text)


def test_a_difference_ends_in_status_one_and_a_command(monkeypatch, capsys):
    wanted = twins.ORACLES["serial"]
    monkeypatch.setitem(twins.ORACLES, "serial", lambda case, values: _doubled(wanted(case, values)))
    assert run(["--cases", "2", "--oracle", "serial", "--only", "roll"]) == 1
    shown = capsys.readouterr()
    assert RANK or ("FAIL" in shown.out and "Case('roll'" in shown.err)


def _doubled(expected):
    return expected._replace(results=[2 * y + 1 for y in expected.results])


@pytest.mark.parametrize(
    ("words", "match"),
    [(["--only", "nothing"], "families"), (["--mesh", "depth"], "AXIS=LENGTH"), (["--mesh", "depth=7"], "multiply")],
)
def test_mistakes_in_the_arguments_are_named(words, match):
    with pytest.raises(UsageError, match=match):
        run(words)
