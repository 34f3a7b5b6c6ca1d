"""The order of tokens, what queries see, and the ways of blocks of keys."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hpcpar.layout.blocks import owned
from hpcpar.layout.sequence import intervals, positions, reach, routes, sees, visible_pairs, zigzag

pytestmark = pytest.mark.serial
SIZES = [(n, p) for n in (0, 1, 2, 3, 7, 8, 12, 29) for p in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("n", "p"), SIZES)
def test_zigzag_is_a_permutation_in_which_every_rank_has_a_piece_of_both_ends(n: int, p: int) -> None:
    order = zigzag(n, p)
    assert order.dtype == np.int64 and sorted(order) == list(range(n))
    front, back = 0, n
    for r in range(p):
        a, b = owned(n, p, r)
        half = (b - a) // 2
        assert list(order[a : a + half]) == list(range(front, front + half))
        assert list(order[a + half : b]) == list(range(back - (b - a - half), back))
        front, back = front + half, back - (b - a - half)
    assert front == back, "the last rank has the middle"


def test_zigzag_of_one_rank_is_the_natural_order() -> None:
    assert list(zigzag(5, 1)) == list(positions(5, 1)) == list(range(5))
    assert list(zigzag(8, 2)) == [0, 1, 6, 7, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        positions(5, 2)[0] = 1


@pytest.mark.parametrize("order", ["natural", "zigzag"])
@pytest.mark.parametrize(("n", "p"), SIZES)
def test_intervals_are_the_positions_of_a_block(n: int, p: int, order: str) -> None:
    lie = positions(n, p if order == "zigzag" else 1)
    for r in range(p):
        found = [i for a, b in intervals(n, p, r, order) for i in range(a, b)]
        assert found == list(lie[slice(*owned(n, p, r))])
        assert all(a < b for a, b in intervals(n, p, r, order))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (0, 3), (4, 0)])
def test_what_is_seen_is_what_the_pairs_say(causal: bool, window: tuple[int, int] | None) -> None:
    def visible(q: int, k: int) -> bool:
        inside = window is None or q - window[0] <= k <= q + window[1]
        return inside and (not causal or k <= q)

    for queries, keys in ((5, 5), (3, 8), (8, 3), (0, 4), (4, 0)):
        pairs = sum(visible(q, k) for q, k in product(range(queries), range(keys)))
        assert visible_pairs(queries, keys, causal, window) == pairs
    for order, p in product(("natural", "zigzag"), (2, 3)):
        blocks = [intervals(9, p, r, order) for r in range(p)]
        for q, k in product(blocks, blocks):
            each = product(*[[i for a, b in block for i in range(a, b)] for block in (q, k)])
            assert sees(q, k, causal, window) == any(visible(*pair) for pair in each)


def test_causal_ends_a_window_at_the_query() -> None:
    assert reach(False, None) == (None, None)
    assert reach(True, None) == (None, 0)
    assert reach(True, (3, 2)) == (3, 0)
    assert reach(False, (3, 2)) == (3, 2)


def test_blocks_go_as_far_as_they_are_needed_by_the_shorter_way() -> None:
    everybody = [[True] * 4] * 4
    assert routes(everybody, [2] * 4) == ((3, 3, 3, 3), (0, 0, 0, 0))
    causal = [[j <= i for j in range(4)] for i in range(4)]
    assert routes(causal, [2] * 4) == ((3, 2, 1, 0), (0, 0, 0, 0))
    near = [[abs(i - j) <= 1 for j in range(4)] for i in range(4)]
    assert routes(near, [2] * 4) == ((1, 1, 1, 0), (0, 1, 1, 1))
    nobody = [[i == j for j in range(3)] for i in range(3)]
    assert routes(nobody, [2] * 3).steps == 0
    # across the end of the line the ring is shorter: the last block is needed by the first rank alone
    assert routes([[True, False, True], [False, True, False], [False, False, True]], [1] * 3) == ((0, 0, 1), (0, 0, 0))


@pytest.mark.parametrize("seed", range(8))
def test_every_block_passes_everyone_who_needs_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = int(rng.integers(1, 7))
    needed = (rng.random((p, p)) < 0.4).tolist()
    ways = routes(needed, rng.integers(1, 4, p).tolist())
    for i, j in product(range(p), range(p)):
        if i != j and needed[i][j]:
            assert (i - j) % p <= ways.forward[j] or (j - i) % p <= ways.backward[j]
    assert max((f + b for f, b in zip(*ways, strict=True)), default=0) <= p - 1
