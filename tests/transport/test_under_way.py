"""Collectives under way bring what those at once bring, count the same, and leave their operands alone."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpar.testing import collective_assert, shared_mesh
from hpcpar.transport import Comm, counter
from hpcpar.transport.under_way import Gather, Scatter, Sum


@pytest.fixture
def line(comm) -> Comm:
    """All ranks as one axis."""
    return shared_mesh(a=comm.Get_size()).comm("a")


def finished(message: object) -> object:
    """The result of a message, after some tests."""
    for _ in range(5):
        message.test()
    result = message.wait()
    assert message.test()
    return result


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64"])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (70_000,)])
def test_sums_are_those_of_an_all_reduce(line: Comm, shape: tuple[int, ...], dtype: str) -> None:
    array = np.asarray(np.random.default_rng(line.rank).integers(-9, 9, shape), dtype)
    before = array.copy()
    with counter.counting() as at_once:
        wanted = line.all_reduce(array)
    with counter.counting() as under_way:
        got = finished(Sum(line, array.T)).T
    assert got.shape == shape and got.dtype == dtype and np.array_equal(got, wanted)
    assert np.array_equal(array, before) and under_way == at_once


@pytest.mark.parametrize("rows", [[2, 0, 3, 1], [0, 0, 0, 0], [1000, 1, 1, 1]])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_scatters_are_those_of_a_reduce_scatter(line: Comm, rows: list[int], dtype: str) -> None:
    rng = np.random.default_rng(line.rank)
    pieces = [rng.integers(-9, 9, (n, 300)).astype(dtype) for n in rows[: line.size]]
    with counter.counting() as at_once:
        wanted = line.reduce_scatter(pieces)
    with counter.counting() as under_way:
        got = finished(Scatter(line, pieces))
    assert got.dtype == dtype and np.array_equal(got, wanted) and under_way == at_once


@pytest.mark.parametrize("rows", [[2, 0, 3, 1], [0, 0, 0, 0]])
def test_gathers_are_those_of_an_all_gather(line: Comm, rows: list[int]) -> None:
    shapes = [(n, 3) for n in rows[: line.size]]
    array = np.random.default_rng(line.rank).standard_normal((3, rows[line.rank])).T  # Fortran-ordered
    with counter.counting() as at_once:
        wanted = line.all_gather(array, shapes)
    with counter.counting() as under_way:
        got = finished(Gather(line, array, shapes))
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True)) and under_way == at_once


@pytest.mark.ranks(min=2)
def test_several_at_a_time_keep_apart(line: Comm) -> None:
    arrays = [np.full(40_000, float(line.rank + i)) for i in range(3)]
    messages = [
        Sum(line, arrays[0]),
        Scatter(line, [arrays[1]] * line.size),
        Gather(line, arrays[2], [(40_000,)] * line.size),
    ]
    messages.append(Sum(line, arrays[2]))
    total, mine, blocks, last = (m.wait() for m in messages)
    ranks = sum(range(line.size))
    good = (total == ranks).all() and (mine == ranks + line.size).all() and (last == ranks + 2 * line.size).all()
    collective_assert(line, good and all((b == r + 2).all() for r, b in enumerate(blocks)), "mixed up")
