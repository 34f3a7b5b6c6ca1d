"""The block rule against brute force over all small sizes."""

import itertools

import pytest

from hpcpar.layout.blocks import overlapping, owned, owner


@pytest.mark.parametrize("p", range(1, 13))
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 11, 12, 13, 24])
def test_blocks_tile_the_dim_in_rank_order_and_differ_by_at_most_one(n, p):
    blocks = [owned(n, p, r) for r in range(p)]
    assert [i for a, b in blocks for i in range(a, b)] == list(range(n))
    lengths = {b - a for a, b in blocks}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("p", range(1, 13))
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 11, 12, 13, 24])
def test_owner_is_the_exact_inverse(n, p):
    for r in range(p):
        for i in range(*owned(n, p, r)):
            assert owner(n, p, i) == r
    for outside in (-1, n):
        with pytest.raises(IndexError, match=str(n)):
            owner(n, p, outside)


def test_owner_is_exact_for_sizes_beyond_double_precision():
    n, p = 3 * 2**61 + 1, 7 * 2**20 + 3
    for r in (0, 1, p // 3, p - 1):
        a, b = owned(n, p, r)
        assert owner(n, p, a) == owner(n, p, b - 1) == r


@pytest.mark.parametrize("p", range(1, 13))
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 11, 12, 13, 24])
def test_overlapping_lists_exactly_the_non_empty_blocks_that_meet_the_interval(n, p):
    for lo, hi in itertools.product(range(-2, n + 3), repeat=2):
        wanted = [r for r in range(p) if any(lo <= i < hi for i in range(*owned(n, p, r)))]
        assert list(overlapping(n, p, lo, hi)) == wanted


def test_index_over_two_axes_refines_the_blocks_of_the_first():
    for n, p, q in itertools.product(range(20), range(1, 5), range(1, 5)):
        for r in range(p):
            fine = [owned(n, p * q, r * q + i) for i in range(q)]
            assert (fine[0][0], fine[-1][1]) == owned(n, p, r)
