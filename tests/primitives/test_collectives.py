"""Each primitive and its adjoint: values, and <Ax, y> = <x, A*y> over uneven, empty and Fortran-ordered blocks."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hpcpar.layout.blocks import owned
from hpcpar.primitives import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter, shift
from hpcpar.testing import collective_assert, dot_test
from hpcpar.transport import Comm

LENGTHS = [0, 1, 2, 5, 8]


@pytest.fixture
def c(comm: MPI.Comm) -> Comm:
    return Comm(comm, "all")


def vector(c: Comm, shape: tuple[int, ...], seed: int, order: str = "C") -> np.ndarray:
    return np.asarray(np.random.default_rng([seed, c.rank]).standard_normal(shape), order=order)


def length(c: Comm, n: int) -> int:
    lo, hi = owned(n, c.size, c.rank)
    return hi - lo


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_all_reduce_is_its_own_adjoint(c: Comm, shape: tuple[int, ...]) -> None:
    assert all_reduce.adjoint is all_reduce
    x, y = vector(c, shape, 1), vector(c, shape, 2)
    dot_test(lambda x: all_reduce(c, x), lambda y: all_reduce.adjoint(c, y), x, y, c)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("order", ["C", "F"])
def test_all_gather_and_reduce_scatter_are_adjoint(c: Comm, n: int, dim: int, order: str) -> None:
    def shape(length: int) -> tuple[int, int]:
        return (length, 3) if dim == 0 else (3, length)

    block, whole = vector(c, shape(length(c, n)), 3, order), vector(c, shape(n), 4, order)
    dot_test(lambda x: all_gather(c, x, dim, n), lambda y: all_gather.adjoint(c, y, dim, n), block, whole, c)
    dot_test(lambda x: reduce_scatter(c, x, dim, n), lambda y: reduce_scatter.adjoint(c, y, dim, n), whole, block, c)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("m", LENGTHS)
def test_all_to_all_is_the_adjoint_of_its_mirror_image(c: Comm, n: int, m: int) -> None:
    assert all_to_all.adjoint is all_to_all
    x, y = vector(c, (length(c, n), 2, m), 5), vector(c, (n, 2, length(c, m)), 6)
    dot_test(lambda x: all_to_all(c, x, 2, 0, n), lambda y: all_to_all.adjoint(c, y, 0, 2, m), x, y, c)


def test_all_to_all_turns_one_split_into_the_other(c: Comm) -> None:
    for n, m in ((5, 3), (1, 7), (2, 0), (8, 8)):
        whole = np.arange(n * m, dtype=float).reshape(n, m)
        rows, columns = whole[slice(*owned(n, c.size, c.rank))], whole[:, slice(*owned(m, c.size, c.rank))]
        got = all_to_all(c, rows, split_dim=1, join_dim=0, n=n)
        collective_assert(c, np.array_equal(got, columns) and got.shape == columns.shape, f"{n} x {m}: {got}")


def test_gathering_and_scattering_of_values(c: Comm) -> None:
    for n in LENGTHS:
        whole = np.arange(3.0 * n).reshape(n, 3)
        mine = whole[slice(*owned(n, c.size, c.rank))]
        collective_assert(c, np.array_equal(all_gather(c, mine, 0, n), whole))
        collective_assert(c, np.array_equal(reduce_scatter(c, whole, 0, n), mine * c.size))


def test_broadcast_and_reduce_are_adjoint_for_every_root(c: Comm) -> None:
    assert broadcast.adjoint is reduce and reduce.adjoint is broadcast
    for root in range(c.size):
        x, y = vector(c, (2, 3), 7), vector(c, (2, 3), 8)
        # a broadcast reads the root's array alone
        dot_test(lambda x, r=root: broadcast(c, x, r), lambda y, r=root: broadcast.adjoint(c, y, r), x, y, c)
        dot_test(lambda x, r=root: reduce(c, x, r), lambda y, r=root: reduce.adjoint(c, y, r), x, y, c)


@pytest.mark.parametrize("offset", [1, -1, 2, 5])
def test_the_adjoint_of_a_shift_is_the_shift_back(c: Comm, offset: int) -> None:
    assert shift.adjoint is shift
    before = (c.rank, 2)
    after = ((c.rank - offset) % c.size, 2)  # every rank's array has its own length, one is empty
    dot_test(
        lambda x: shift(c, x, offset, after),
        lambda y: shift.adjoint(c, y, -offset, before),
        vector(c, before, 9),
        vector(c, after, 10),
        c,
    )
