"""The helpers must fail where they should, on all ranks, and pass where they should."""

import numpy as np
import pytest

from hpcpar.testing import assert_close_everywhere, collective_assert, dot_test


@pytest.fixture
def rng(comm):
    return np.random.default_rng(comm.rank)


def test_collective_assert_fails_on_all_ranks_when_it_fails_on_the_last(comm):
    last = comm.size - 1
    with pytest.raises(AssertionError, match=f"rank {last} of {comm.size}: block is late"):
        collective_assert(comm, comm.rank != last, "block is late")


def test_collective_assert_passes_where_all_agree(comm):
    collective_assert(comm, True, "never shown")


def test_error_is_relative_to_the_largest_value_of_all_ranks(comm):
    # the block of rank 0 is small and slightly wrong: within the scale of the whole
    expected = np.full(3, 1.0 if comm.rank == comm.size - 1 else 1e-9)
    got = expected + 1e-13
    assert assert_close_everywhere(comm, got, expected, 1e-12) == pytest.approx(1e-13, rel=0.01)


def test_one_wrong_element_on_the_last_rank_fails_everywhere_and_is_named(comm):
    expected = np.ones((2, 3), np.float32)
    got = expected.copy()
    if comm.rank == comm.size - 1:
        got[1, 2] = 1.5
    with pytest.raises(AssertionError, match=rf"rank {comm.size - 1} .*\(1, 2\) of \(2, 3\)"):
        assert_close_everywhere(comm, got, expected)


def test_shape_and_dtype_are_compared_first(comm):
    with pytest.raises(AssertionError, match="float32"):
        assert_close_everywhere(comm, np.ones(3, np.float32), np.ones(3))
    with pytest.raises(AssertionError, match=r"\(3,\)"):
        assert_close_everywhere(comm, np.ones(3), np.ones(4))


def test_nan_where_none_is_expected_fails(comm):
    with pytest.raises(AssertionError, match="nan"):
        assert_close_everywhere(comm, np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert assert_close_everywhere(comm, np.array([np.nan, np.inf]), np.array([np.nan, np.inf])) == 0


def test_empty_blocks_are_welcome(comm):
    block = np.ones((0, 4)) if comm.rank == 0 else np.ones((2, 4))
    assert assert_close_everywhere(comm, block, block.copy()) == 0


def test_integers_are_compared_exactly(comm):
    with pytest.raises(AssertionError, match="got"):
        assert_close_everywhere(comm, np.array([10**9 + 1]), np.array([10**9]))


def test_sum_and_copy_are_adjoint(comm, rng):
    def total(x):
        return comm.allreduce(x)

    # an all-reduce is its own adjoint in the space of all ranks' arrays
    assert dot_test(total, total, rng.normal(size=5), rng.normal(size=5), comm) < 1e-14


def test_a_wrong_adjoint_is_found_even_if_it_is_wrong_on_one_rank_only(comm, rng):
    def forward(x):
        return 2 * x

    def adjoint(y):
        return 2 * y if comm.rank else 2 * y + 1e-6

    with pytest.raises(AssertionError, match="relative difference"):
        dot_test(forward, adjoint, rng.normal(size=4), rng.normal(size=4), comm)


def test_zero_operators_prove_nothing(comm, rng):
    with pytest.raises(AssertionError, match="zero everywhere"):
        dot_test(np.zeros_like, np.zeros_like, rng.normal(size=4), rng.normal(size=4), comm)


def test_a_result_of_the_wrong_shape_is_named(comm, rng):
    with pytest.raises(AssertionError, match=r"adjoint\(y\) has shape \(3,\), expected \(4,\)"):
        dot_test(lambda x: x[:3], lambda y: y, rng.normal(size=4), rng.normal(size=3), comm)


def test_float32_is_held_to_float32(rng):
    matrix = rng.normal(size=(30, 20)).astype(np.float32)
    x, y = rng.normal(size=20).astype(np.float32), rng.normal(size=30).astype(np.float32)
    assert dot_test(lambda a: matrix @ a, lambda b: matrix.T @ b, x, y) < 1e-6
