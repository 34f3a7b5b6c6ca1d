"""A pytest plugin that keeps the ranks of a test run in step.

Under ``mpiexec -n 4 python -m mpi4py -m pytest`` every rank runs the same tests. After set-up, call and tear-down of
each test the ranks exchange one byte: a failure on one rank fails the test on all, with that rank's traceback in the
report of rank 0, which alone writes to the terminal. A test that does not end, on one rank or on all, ends the run
after `agreement.WATCHDOG_SECONDS` with the stacks of every rank.

Markers
-------
ranks(exactly=, min=, max=)
    Skip where the number of ranks does not fit; `exactly` may be a tuple.
serial
    Nothing to do with MPI: runs where there is one rank, skipped under mpiexec.
spawns_mpi
    Starts mpiexec itself (`hpcpar.testing.mpi_run`): skipped under mpiexec, and where there is none.
watchdog(seconds)
    Another limit for a test that is long for good reason.

Fixtures
--------
comm
    A duplicate of the world communicator, for the whole session.
comm_of
    ``comm_of(n)``: a communicator over the first n ranks, None on the others; freed after the test. Collective.
shared_path
    A temporary folder that is the same on all ranks, where `tmp_path` is one for each.

With ``HPCPAR_TEST_LOGS`` set to a folder, the other ranks write their pytest output there, and every rank the name of
the test it is in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from hpcpar.testing.agreement import WATCHDOG_SECONDS, Ranks
from hpcpar.testing.launch import find_mpiexec

_KEY = pytest.StashKey[Ranks]()


def _ranks(config: pytest.Config) -> Ranks:
    return config.stash[_KEY]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name the markers; let rank 0 alone write to the terminal and to the cache."""
    for line in (
        "ranks(exactly, min, max): needs that many ranks",
        "serial: has nothing to do with MPI, runs on one rank only",
        "spawns_mpi: starts mpiexec itself, runs outside of it only",
        "watchdog(seconds): limit for one phase of a long test",
    ):
        config.addinivalue_line("markers", line)
    ranks = config.stash[_KEY] = Ranks()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if ranks.rank > 0 and reporter is not None:
        reporter._tw = type(reporter._tw)(file=ranks.log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave together."""
    if _KEY in config.stash:
        sys.stdout.flush()
        _ranks(config).close()


def pytest_report_header(config: pytest.Config) -> str:
    """Say which MPI runs the tests on how many ranks."""
    ranks = _ranks(config)
    library = " ".join(MPI.Get_library_version().split(",")[0].replace("Version:", "").split()[:3])
    hosts = len({name for name, _ in ranks.processes})
    return f"hpcpar: rank {ranks.rank} of {ranks.size} on {hosts} node(s), {library}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what does not fit this number of ranks, on all ranks alike."""
    size = _ranks(config).size
    for item in items:
        reason = _misfit(item, size)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _misfit(item: pytest.Item, size: int) -> str:
    marker = item.get_closest_marker("ranks")
    if marker:
        unknown = set(marker.kwargs) - {"exactly", "min", "max"}
        if unknown or marker.args:
            raise pytest.UsageError(f"{item.nodeid}: marker ranks takes exactly=, min=, max=")
        exactly = marker.kwargs.get("exactly", size)
        if size not in (exactly if isinstance(exactly, tuple) else (exactly,)):
            return f"needs {exactly} ranks"
        if size < marker.kwargs.get("min", size):
            return f"needs {marker.kwargs['min']} ranks or more"
        if size > marker.kwargs.get("max", size):
            return f"needs {marker.kwargs['max']} ranks or fewer"
    if size > 1 and item.get_closest_marker("serial"):
        return "has nothing to do with MPI, ran on one rank"
    if item.get_closest_marker("spawns_mpi"):
        if size > 1:
            return "starts mpiexec itself, runs outside of it"
        try:
            find_mpiexec()
        except FileNotFoundError as missing:
            return str(missing)
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Compare what the ranks collected before the first test runs."""
    _ranks(session.config).agree_on_collection(session)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Leave the test's name for an outer time limit."""
    _ranks(item.config).note(item.nodeid)
    return (yield)


def _agreeing(phase: str) -> Callable[[pytest.Item], Generator[None, Any, Any]]:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def hook(item: pytest.Item) -> Generator[None, Any, Any]:
        ranks = _ranks(item.config)
        limit = item.get_closest_marker("watchdog")
        ranks.watch(limit.args[0] if limit else WATCHDOG_SECONDS)
        value, error = None, None
        try:
            value = yield
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as raised:  # noqa: BLE001 - raised again
            error = raised
        ranks.settle(item, phase, error)
        if error is not None:
            raise error
        return value

    return hook


pytest_runtest_setup = _agreeing("set-up")
pytest_runtest_call = _agreeing("call")
pytest_runtest_teardown = _agreeing("tear-down")


# ---- fixtures


@pytest.fixture(scope="session")
def comm() -> Iterator[MPI.Comm]:
    """Give a duplicate of the world communicator."""
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def comm_of(comm: MPI.Comm) -> Iterator[Callable[[int], MPI.Comm | None]]:
    """Give a function from n to a communicator over the first n ranks, None on the others."""
    made: list[MPI.Comm] = []

    def first(n: int) -> MPI.Comm | None:
        if n > comm.Get_size():
            pytest.skip(f"needs {n} ranks or more")
        part = comm.Split(0 if comm.Get_rank() < n else MPI.UNDEFINED, comm.Get_rank())
        if part == MPI.COMM_NULL:
            return None
        made.append(part)
        return part

    yield first
    for part in made:
        part.Free()


@pytest.fixture
def shared_path(tmp_path: Path, comm: MPI.Comm) -> Path:
    """Give one temporary folder to all ranks."""
    return Path(comm.bcast(str(tmp_path)))
