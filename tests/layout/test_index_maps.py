"""Maps of operations that only move elements, against NumPy and torch."""

import random

import numpy as np
import pytest

from hpcpar.layout.blocks import owned
from hpcpar.layout.index_maps import (
    block_map,
    concat_map,
    flip_map,
    pad_map,
    roll_map,
    shuffle_map,
    slice_map,
    unshuffle_map,
    window_tokens_map,
)
from hpcpar.layout.maps import FILL


def assembled(builder, n, out, p, *args):
    """Return the maps of all p output blocks, one after the other."""
    return [int(i) for r in range(p) for i in builder(n, *owned(out, p, r), *args).indices()]


def cases(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng, rng.randint(1, 17), rng.randint(1, 6)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_pad_equals_torch_with_positive_and_negative_amounts(mode):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    done = 0
    for rng, n, p in cases(1, 3000):
        lo, hi = rng.randint(-n, n), rng.randint(-n, n)
        # torch refuses an empty result, and mirrors or wraps a dim at most once
        if n + lo + hi < 1 or (mode == "reflect" and max(lo, hi) >= n):
            continue
        if mode == "circular" and max(lo, hi) > n - max(-lo, 0) - max(-hi, 0):
            continue
        x = torch.arange(float(n)).reshape(1, 1, n)
        options = {"value": float(FILL)} if mode == "constant" else {}
        wanted = torch.nn.functional.pad(x, (lo, hi), mode, **options).flatten().int().tolist()
        assert assembled(pad_map, n, n + lo + hi, p, lo, hi, mode) == wanted, (n, lo, hi)
        done += 1
    assert done > 500


def test_slices_with_positive_and_negative_steps_equal_numpy():
    for rng, n, p in cases(2, 3000):
        step = rng.choice([-3, -2, -1, 1, 2, 3, 5])
        chosen = slice(rng.choice([None, rng.randint(-n, n)]), rng.choice([None, rng.randint(-n, n)]), step)
        start, stop, step = chosen.indices(n)
        wanted = np.arange(n)[chosen].tolist()
        assert assembled(slice_map, n, len(range(start, stop, step)), p, start, step) == wanted


def test_flip_and_roll_equal_numpy():
    for rng, n, p in cases(3, 1000):
        shift = rng.randint(-2 * n, 2 * n)
        assert assembled(flip_map, n, n, p) == np.arange(n)[::-1].tolist()
        assert assembled(roll_map, n, n, p, shift) == np.roll(np.arange(n), shift).tolist()


def test_parts_of_a_concatenation_fill_it_exactly_once():
    for rng, _n, p in cases(4, 1000):
        lengths = [rng.randint(0, 6) for _ in range(rng.randint(1, 4))]
        out = sum(lengths)
        shown = np.full(out, FILL)
        for part, length in enumerate(lengths):
            index = np.array(assembled(concat_map, length, out, p, sum(lengths[:part])), int)
            assert (shown[index != FILL] == FILL).all()
            shown[index != FILL] = index[index != FILL]
        assert shown.tolist() == [i for length in lengths for i in range(length)]


def test_regrouping_gives_the_first_ranks_blocks_of_fewer():
    for rng, n, p in cases(5, 1000):
        m = rng.randint(1, p)
        shown = [block_map(n, m, r).indices().tolist() for r in range(p)]
        assert shown == [list(range(*owned(n, m, r))) for r in range(m)] + [[]] * (p - m)


def test_pixel_shuffle_buffer_holds_the_block_at_its_crop():
    for rng, n, p in cases(6, 1000):
        r = rng.randint(1, 4)
        for q in range(p):
            o0, o1 = owned(n * r, p, q)
            read = shuffle_map(n, o0, o1, r)
            if o1 == o0:
                assert read.size == 0
                continue
            fine = [i * r + j for i in read.indices().tolist() for j in range(r)]
            crop = o0 - r * (o0 // r)
            assert fine[crop : crop + o1 - o0] == list(range(o0, o1))
            assert len(fine) < o1 - o0 + 2 * r
            c0, c1 = owned(n, p, q)
            assert unshuffle_map(n * r, c0, c1, r).indices().tolist() == list(range(c0 * r, c1 * r))


def test_windows_of_a_rolled_dim_show_each_element_once():
    hanging = 0
    for rng, n, p in cases(7, 2000):
        w = rng.randint(1, 6)
        shift, grid = rng.randrange(w), -(-n // w)
        filled = np.append(np.arange(n), [FILL] * (grid * w - n))
        assert assembled(window_tokens_map, n, grid, p, w, shift) == np.roll(filled, -shift).tolist()
        hanging += grid * w > n and shift > 0
    assert hanging > 200
