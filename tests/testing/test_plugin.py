"""Whole pytest runs under mpiexec: one rank's failure is everybody's, and nothing hangs."""

import re
import textwrap

import pytest

from hpcpar.testing import mpi_run

pytestmark = pytest.mark.spawns_mpi


@pytest.fixture
def run(tmp_path):
    def under_mpiexec(ranks, text, **env):
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["hpcpar.testing.plugin"]\n')
        (tmp_path / "test_it.py").write_text("import time, pytest\n" + textwrap.dedent(text))
        words = ["-m", "mpi4py", "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
        return mpi_run(ranks, words, env=env, cwd=tmp_path, timeout=60)

    return under_mpiexec


def closing_line(done):
    return re.findall(r"=+ (.* in [\d.]+s.*) =+", done.stdout)


def test_rank_zero_alone_reports(run):
    done = run(3, "def test_a(comm): assert comm.allreduce(1) == 3").check()
    assert len(closing_line(done)) == 1 and closing_line(done)[0].startswith("1 passed")
    assert "rank 0 of 3" in done.stdout


def test_a_failure_on_the_last_rank_fails_the_run_with_its_traceback(run):
    done = run(
        3,
        """
        def test_a(comm):
            values = [1, 2, 3]
            assert comm.rank != 2, "only the last rank minds"
        def test_b(comm): comm.barrier()
        """,
    )
    assert done.returncode != 0
    assert closing_line(done)[0].startswith("1 failed, 1 passed")
    assert "call on rank 2 of 3" in done.stdout and "only the last rank minds" in done.stdout
    assert "test_it.py:5: AssertionError" in done.stdout


def test_a_failure_in_setup_on_one_rank_keeps_the_others_from_waiting(run):
    done = run(
        2,
        """
        @pytest.fixture
        def part(comm):
            if comm.rank == 1: raise OSError("no such block")
        def test_a(comm, part): comm.barrier()
        """,
    )
    assert done.returncode != 0 and closing_line(done)[0].startswith("1 error")
    assert "no such block" in done.stdout


def test_a_rank_left_alone_in_a_collective_call_shows_its_stack_and_ends(run):
    done = run(
        2,
        """
        def test_a(comm):
            assert comm.rank == 0, "left early"
            comm.barrier()
        """,
        HPCPAR_TEST_PATIENCE="1",
    )
    assert done.returncode != 0
    assert "left early" in done.stderr
    assert re.search(r'File ".*test_it.py", line 5 in test_a', done.stderr), "the stack of the waiting rank"


def test_a_deadlock_ends_with_the_stacks_of_all_ranks(run):
    done = run(
        2,
        """
        def test_a(comm):
            if comm.rank: comm.recv(source=0)
            else: comm.recv(source=1)
        """,
        HPCPAR_TEST_WATCHDOG="3",
    )
    assert done.returncode != 0
    assert "line 4 in test_a" in done.stderr and "line 5 in test_a" in done.stderr


def test_ranks_that_disagree_on_a_skip_fail(run):
    done = run(
        2,
        """
        def test_a(comm):
            if comm.rank: pytest.skip("not here")
        """,
    )
    assert done.returncode != 0 and "ranks [1] of 2 skipped the test" in done.stdout


def test_ranks_that_collect_different_tests_stop_before_the_first(run):
    done = run(
        2,
        """
        from mpi4py import MPI
        @pytest.mark.parametrize("n", range(1 + MPI.COMM_WORLD.rank))
        def test_a(n): assert n >= 0
        """,
    )
    assert done.returncode != 0 and "collected different tests" in done.stdout


def test_markers_choose_by_the_number_of_ranks(run):
    text = """
        @pytest.mark.ranks(exactly=2)
        def test_two(): pass
        @pytest.mark.ranks(min=3)
        def test_three_or_more(): pass
        @pytest.mark.ranks(max=2)
        def test_two_or_fewer(): pass
        @pytest.mark.ranks(exactly=(1, 3))
        def test_odd(): pass
        @pytest.mark.serial
        def test_alone(): pass
        @pytest.mark.spawns_mpi
        def test_spawns(): pass
        """
    assert closing_line(run(1, text).check())[0].startswith("4 passed, 2 skipped")
    assert closing_line(run(2, text).check())[0].startswith("2 passed, 4 skipped")
    assert closing_line(run(3, text).check())[0].startswith("2 passed, 4 skipped")


def test_other_ranks_write_their_output_and_place_to_files(run, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    run(2, "def test_a(comm): pass", HPCPAR_TEST_LOGS=str(logs)).check()
    assert "1 passed" in (logs / "rank-1.log").read_text()
    assert "rank 1 of 2: test_it.py::test_a" in (logs / "rank-1.test").read_text()


def test_communicators_over_the_first_ranks_and_a_folder_for_all(run):
    done = run(
        3,
        """
        def test_a(comm, comm_of, shared_path):
            part = comm_of(2)
            assert (part is None) == (comm.rank == 2)
            if part is not None: assert part.allreduce(1) == 2
            assert comm.allgather(str(shared_path)) == 3 * [str(shared_path)]
        """,
    )
    assert closing_line(done.check())[0].startswith("1 passed")
