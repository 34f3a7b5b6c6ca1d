"""Maps of windowed operations against brute force on drawn cases."""

import random

import numpy as np
import pytest

from hpcpar.layout.blocks import owned
from hpcpar.layout.maps import (
    FILL,
    PAD_MODES,
    Map,
    Run,
    map_of_indices,
    out_size,
    same_padding,
    scatter_padding,
    transposed_map,
    window_map,
)

NUMPY_MODE = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def drawn_windows(seed, count):
    """Draw (n, k, s, d, lo, hi, out) with at least one output."""
    rng = random.Random(seed)
    while count:
        n, k, s, d = rng.randint(1, 20), rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 3)
        lo, hi = rng.randint(0, 7), rng.randint(0, 7)
        out = out_size("conv", n, k, s, d, lo, hi)
        if out > 0:
            count -= 1
            yield rng, n, k, s, d, lo, hi, out


@pytest.mark.parametrize("mode", PAD_MODES)
def test_window_shows_the_padded_input(mode):
    for rng, n, k, s, d, lo, hi, out in drawn_windows(1, 1500):
        if mode == "reflect":
            lo, hi = min(lo, n - 1), min(hi, n - 1)
            out = out_size("conv", n, k, s, d, lo, hi)
            if out < 1:
                continue
        options = {"constant_values": FILL} if mode == "zeros" else {}
        padded = np.pad(np.arange(n), (lo, hi), NUMPY_MODE[mode], **options)
        p = rng.randint(1, 5)
        for r in range(p):
            o0, o1 = owned(out, p, r)
            shown = window_map(n, o0, o1, k, s, d, lo, mode).indices()
            wanted = padded[o0 * s : (o1 - 1) * s + d * (k - 1) + 1] if o1 > o0 else padded[:0]
            assert shown.tolist() == wanted.tolist(), (n, k, s, d, lo, hi, mode, o0, o1)


def test_window_of_the_usual_convolution_is_one_run():
    assert window_map(32, 8, 16, 3, 1, 1, 1) == Map(10, (Run(0, 7, 10),))
    assert window_map(32, 0, 8, 3, 1, 1, 1) == Map(10, (Run(1, 0, 9),))
    assert window_map(4, 0, 4, 3, 1, 1, 1, "circular").runs == (Run(0, 3, 1), Run(1, 0, 4), Run(5, 0, 1))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_repeating_an_empty_dim_is_an_error(mode):
    with pytest.raises(ValueError, match="empty"):
        window_map(0, 0, 1, 3, 1, 1, 1, mode)
    with pytest.raises(ValueError, match="mirror"):
        window_map(4, 0, 4, 3, 1, 1, 1, "mirror")


def test_transposed_window_and_its_local_paddings_give_the_block_of_the_whole_result():
    rng = random.Random(2)
    for _ in range(3000):
        n, k, s, d = rng.randint(1, 14), rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 3)
        lo, hi, extra = rng.randint(0, 4), rng.randint(0, 4), rng.randint(0, 3)
        out = out_size("transposed", n, k, s, d, lo, hi, extra=extra)
        if out < 1:
            continue
        x, w = np.random.default_rng(n).random(n), np.arange(1.0, k + 1)
        whole = scattered(x, w, s, d, lo, out)
        p = rng.randint(1, 6)
        for r in range(p):
            o0, o1 = owned(out, p, r)
            read = transposed_map(n, o0, o1, k, s, d, lo)
            index = read.indices()
            i0, i1 = read.start, read.start + read.size
            assert index.tolist() == list(range(i0, i1))
            before, after = scatter_padding(o0, o1, i0, i1, k, s, d, lo)
            span = (i1 - i0 - 1) * s + d * (k - 1) + 1 if i1 > i0 else 0
            assert span - before - after == o1 - o0
            np.testing.assert_allclose(scattered(x[i0:i1], w, s, d, before, o1 - o0), whole[o0:o1], rtol=1e-14)


def scattered(x, w, s, d, lo, out):
    """Transposed convolution by its definition."""
    y = np.zeros(out)
    for i, t in np.ndindex(len(x), len(w)):
        o = i * s - lo + d * t
        if 0 <= o < out:
            y[o] += x[i] * w[t]
    return y


def test_transposed_window_is_as_narrow_as_possible():
    for rng, n, k, s, d, lo, hi, _ in drawn_windows(3, 1500):
        out = out_size("transposed", n, k, s, d, lo, hi)
        if out < 1:
            continue
        o0 = rng.randrange(out)
        o1 = rng.randint(o0 + 1, out)
        reached = [i for i in range(n) if any(o0 <= i * s - lo + d * t < o1 for t in range(k))]
        shown = transposed_map(n, o0, o1, k, s, d, lo).indices().tolist()
        assert set(reached) <= set(shown)
        if reached:
            # gaps between the reaches of two inputs (dilation) can leave an end that no tap hits
            assert all(o0 <= i * s - lo + d * (k - 1) and i * s - lo < o1 for i in shown)


def test_pulled_halo_of_a_convolution_holds_every_output_that_reads_the_block():
    for rng, n, k, s, d, lo, _hi, out in drawn_windows(4, 1500):
        p = rng.randint(1, 5)
        for r in range(p):
            a, b = owned(n, p, r)
            readers = {o for o in range(out) for t in range(k) if a <= o * s - lo + d * t < b}
            assert readers <= set(transposed_map(out, a, b, k, s, d, lo).indices().tolist())


def test_pulled_halo_of_a_transposed_convolution_is_a_window_of_the_output():
    rng = random.Random(5)
    for _ in range(1500):
        n, k, s, d, lo = rng.randint(1, 14), rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 3)
        out = out_size("transposed", n, k, s, d, lo, lo)
        if out < 1:
            continue
        p = rng.randint(1, 5)
        for r in range(p):
            a, b = owned(n, p, r)
            shown = window_map(out, a, b, k, s, d, lo).indices()
            for i in range(a, b):
                for t in range(k):
                    o = i * s - lo + d * t
                    assert shown[(i - a) * s + d * t] == (o if 0 <= o < out else FILL)


def test_out_size_equals_torch():
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    rng = random.Random(6)
    for _ in range(800):
        n, k, s, d = rng.randint(1, 20), rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
        lo = rng.randint(0, k // 2)
        x = torch.zeros(1, 1, n)
        for ceil in (False, True):
            out = out_size("pool", n, k, s, d, lo, lo, ceil=ceil)
            if out > 0 and out_size("conv", n, k, s, d, lo, lo) > 0:
                pooled = torch.nn.functional.max_pool1d(x, k, s, lo, d, ceil_mode=ceil)
                assert pooled.shape[-1] == out
        extra = rng.randrange(max(s, d))
        out = out_size("transposed", n, k, s, d, lo, lo, extra=extra)
        if out > 0:
            y = torch.nn.functional.conv_transpose1d(x, torch.zeros(1, 1, k), None, s, lo, extra, 1, d)
            assert y.shape[-1] == out
        assert out_size("conv", n, k, 1, d, *same_padding(k, d)) == n
    with pytest.raises(ValueError, match="unknown"):
        out_size("unfold", 4, 2)


def test_map_of_indices_inverts_indices():
    rng = random.Random(7)
    for _ in range(2000):
        index = [rng.randint(-1, 5) for _ in range(rng.randint(0, 12))]
        built = map_of_indices(index)
        assert built.indices().tolist() == index
        holes = {j for a, b in built.holes() for j in range(a, b)}
        assert holes == {j for j, i in enumerate(index) if i == FILL}


def test_runs_that_overlap_or_leave_the_map_are_refused():
    with pytest.raises(AssertionError, match="overlap"):
        Map(4, (Run(0, 0, 3), Run(2, 0, 1)))
    with pytest.raises(AssertionError, match="size 2"):
        Map(2, (Run(0, 0, 3),))
