"""Attention by blocks against torch and against a plain softmax in float64: outputs, gradients, masks, dropout."""

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels import AttentionDropout, Visible
from hpcpar.kernels import visible as visible_module
from hpcpar.kernels.generic import attention as reference

FAMILY = "attention"
pytestmark = pytest.mark.serial

TOLERANCE = {np.float64: 1e-11, np.float32: 2e-5, np.float16: 3e-3}
EVERYTHING = Visible()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that every call has many of them."""
    monkeypatch.setattr(reference, "BLOCK", (7, 11))
    if kernels.available("numba"):
        from hpcpar.kernels.cpu.fused import attention as fused

        monkeypatch.setattr(fused, "ROWS", 32)
        monkeypatch.setattr(fused, "KEYS", 48)
        monkeypatch.setattr(fused, "SMALL", 100)


def allowed_keys(visible, shape):
    """Bool (N, H, L, S) and what is added to the scores."""
    n, h, length, keys = shape
    q = np.arange(length) if visible.q_positions is None else visible.q_positions
    k = np.arange(keys) if visible.k_positions is None else visible.k_positions
    seen, added = np.ones(shape, bool), np.zeros(shape)
    if visible.causal:
        seen &= k <= q[:, None]
    if visible.window is not None:
        left, right = visible.window
        seen &= (k >= q[:, None] - left) & (k <= q[:, None] + right)
    if visible.q_documents is not None:
        seen &= visible.q_documents[:, None, :, None] == visible.k_documents[:, None, None, :]
    if visible.mask is not None and visible.mask.dtype == bool:
        seen &= visible.mask
    elif visible.mask is not None:
        added = added + visible.mask
    return seen, added


def plain(query, key, value, scale, visible, kept=None):
    """Output, logarithm of sums and a function of g that gives the gradients, of the whole matrix in float64."""
    q, k, v = (a.astype(np.float64) for a in (query, key, value))
    n, h, length, _ = q.shape
    groups = k.shape[1]
    k, v = (np.repeat(a, h // groups, axis=1) for a in (k, v))
    seen, added = allowed_keys(visible, (n, h, length, k.shape[2]))
    scores = np.where(seen, q @ k.swapaxes(2, 3) * scale + added, -np.inf)
    top = scores.max(axis=3, keepdims=True, initial=-1e300)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(axis=3, keepdims=True)
    p = exponentials / np.where(total == 0, 1, total)
    kept = np.ones(p.shape) if kept is None else kept
    out = (p * kept) @ v
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(total == 0, 0, top))[..., 0]

    def gradients(g):
        g = g.astype(np.float64)
        dp = (g @ v.swapaxes(2, 3)) * kept
        ds = p * (dp - (dp * p).sum(axis=3, keepdims=True))
        per_group = (n, groups, h // groups, k.shape[2])
        dk = (ds.swapaxes(2, 3) @ q * scale).reshape(*per_group, k.shape[3]).sum(2)
        dv = ((p * kept).swapaxes(2, 3) @ g).reshape(*per_group, v.shape[3]).sum(2)
        return ds @ k * scale, dk, dv, ds

    return out, lse, gradients


def close(got, want, dtype, name=""):
    tolerance = TOLERANCE[dtype]
    hidden = np.isneginf(want)  # of the logarithms of rows that see nothing
    np.testing.assert_array_equal(np.isneginf(got), hidden, err_msg=name)
    got, want = np.where(hidden, 0, got), np.where(hidden, 0, want)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1, np.abs(want).max(initial=0)),
                               err_msg=name)


def drawn(rng, n, h, g, length, keys, e, v, dtype):
    """Query, key and value, each in a memory order of its own."""
    q, k, w = (rng.standard_normal(s).astype(dtype) for s in ((n, length, h, e), (n, g, e, keys), (n, g, keys, v)))
    return q.transpose(0, 2, 1, 3), k.swapaxes(2, 3), w[:, :, ::-1] if rng.random() < 0.3 else w


def draw_visible(rng, n, h, length, keys, dtype):
    """Some of the conditions together."""
    chosen = {}
    order = rng.choice(["none", "none", "shuffled", "two runs"])
    if order == "shuffled":
        chosen |= {"q_positions": rng.permutation(length + 5)[:length], "k_positions": rng.permutation(keys + 5)[:keys]}
    elif order == "two runs":
        chosen |= {f"{name}_positions": np.r_[0:size // 2, 3 * size:3 * size + size - size // 2]
                   for name, size in (("q", length), ("k", keys))}
    if rng.random() < 0.5:
        chosen["causal"] = True
    if rng.random() < 0.4:
        chosen["window"] = tuple(int(i) for i in rng.integers(0, max(length, keys), 2))
    if rng.random() < 0.4:
        documents = [rng.integers(0, 4, (n, size)) for size in (length, keys)]
        if rng.random() < 0.7:
            documents = [np.sort(d) for d in documents]
        chosen |= {"q_documents": documents[0], "k_documents": documents[1]}
    shape = tuple(int(size if rng.random() < 0.6 else 1) for size in (n, h, length, keys))[rng.integers(0, 3):]
    kind = rng.choice(["none", "bool", "float"])
    if kind != "none":
        chosen["mask"] = rng.random(shape) < 0.7 if kind == "bool" else rng.standard_normal(shape).astype(dtype)
    return Visible(**chosen)


def kept_of(dropout, visible, shape):
    """The factors of the weights, from the mask of the whole global array."""
    n, h, length, keys = shape
    (n0, h0), (_, _, rows, columns) = dropout.offset, dropout.shape
    box = ((n0, n0 + n), (h0, h0 + h), (0, rows), (0, columns))
    mask = kernels.dropout_mask(dropout.seed, dropout.stream, dropout.shape, box, dropout.p)
    q = np.arange(length) if visible.q_positions is None else visible.q_positions
    k = np.arange(keys) if visible.k_positions is None else visible.k_positions
    return mask[:, :, q][..., k] * dropout.factor


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("blocks", ["small", "usual"])
def test_all_conditions_together_equal_a_plain_softmax(implementation, request, seed, dtype, blocks):
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    rng = np.random.default_rng([seed, blocks == "small"])
    n, g, per, e, v = (int(i) for i in rng.integers(1, [4, 4, 4, 9, 9]))
    length, keys = (int(i) for i in rng.integers(1, 90, 2))
    h = g * per
    q, k, w = drawn(rng, n, h, g, length, keys, e, v, dtype)
    visible = draw_visible(rng, n, h, length, keys, dtype)
    dropout = None
    if rng.random() < 0.3:
        size = 4 * max(length, keys)
        dropout = AttentionDropout(seed, 3, 0.3, (n + 2, h + 1, size, size), (2, 1))
    kept = None if dropout is None else kept_of(dropout, visible, (n, h, length, keys))
    want, want_lse, gradients = plain(q, k, w, 0.4, visible, kept)
    out, lse = kernels.attention_forward(q, k, w, 0.4, visible, dropout)
    close(out, want, dtype, "out")
    close(lse, want_lse, dtype, "lse")
    assert out.dtype == lse.dtype == dtype and out.transpose(0, 2, 1, 3).flags.c_contiguous
    up = rng.standard_normal(out.shape).astype(dtype)
    float_mask = visible.mask is not None and visible.mask.dtype != bool
    got = kernels.attention_backward(up, q, k, w, out, lse, 0.4, visible, dropout, mask_gradient=float_mask)
    *expected, ds = gradients(up)
    for name, mine, theirs in zip(("dq", "dk", "dv"), got, expected, strict=False):
        close(mine, theirs, dtype, name)
        assert mine.dtype == dtype and mine.transpose(0, 2, 1, 3).flags.c_contiguous
    if float_mask:
        while ds.ndim > visible.mask.ndim:
            ds = ds.sum(0)
        single = tuple(d for d, size in enumerate(visible.mask.shape) if size == 1)
        close(got[3], ds.sum(axis=single, keepdims=True), dtype, "dmask")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_float32_equals_torch(implementation, rng, causal, grouped):
    torch = pytest.importorskip("torch")
    q, k, v = (rng.standard_normal((2, h, 300, 32)).astype(np.float32) for h in (4, *(2 if grouped else 4,) * 2))
    twins = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*twins, is_causal=causal, enable_gqa=grouped)
    g = rng.standard_normal(want.shape).astype(np.float32)
    want.backward(torch.tensor(g))
    visible = Visible(causal=causal)
    out, lse = kernels.attention_forward(q, k, v, 32**-0.5, visible)
    close(out, want.detach().numpy(), np.float32)
    for mine, twin in zip(kernels.attention_backward(g, q, k, v, out, lse, 32**-0.5, visible), twins, strict=True):
        close(mine, twin.grad.numpy(), np.float32)


def test_gradients_are_the_slopes_of_the_output(implementation, rng, small_blocks):
    q, k, v = drawn(rng, 2, 4, 2, 23, 31, 5, 6, np.float64)
    visible = Visible(causal=True, window=(9, 3), mask=rng.standard_normal((4, 1, 31)))
    dropout = AttentionDropout(1, 2, 0.25, (2, 4, 40, 40))
    out, lse = kernels.attention_forward(q, k, v, 0.5, visible, dropout)
    g = rng.standard_normal(out.shape)
    gradients = kernels.attention_backward(g, q, k, v, out, lse, 0.5, visible, dropout)
    arrays = [q, k, v]
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(arrays[i].shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [a + step * direction if j == i else a for j, a in enumerate(arrays)]
            ends.append((kernels.attention_forward(*moved, 0.5, visible, dropout)[0] * g).sum())
        slope = (ends[0] - ends[1]) / 2e-5
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("borders", [(0, 13, 50), (0, 0, 50), (0, 1, 2, 49, 50)])
def test_sets_of_keys_merge_to_all_of_them(implementation, rng, borders):
    q, k, v = drawn(rng, 2, 4, 2, 37, 50, 8, 7, np.float64)
    whole = Visible(causal=True)
    out, lse = kernels.attention_forward(q, k, v, 0.3, whole)
    g = rng.standard_normal(out.shape)
    dq, dk, dv = kernels.attention_backward(g, q, k, v, out, lse, 0.3, whole)
    merged, sums, parts = None, None, []
    for a, b in zip(borders, borders[1:], strict=False):
        keys = k[:, :, a:b], v[:, :, a:b]
        visible = Visible(causal=True, k_positions=np.arange(a, b))
        found = kernels.attention_forward(q, *keys, 0.3, visible)
        merged, sums = found if merged is None else kernels.attention_merge(merged, sums, *found)
        parts.append(kernels.attention_backward(g, q, *keys, out, lse, 0.3, visible))
    close(merged, out, np.float64)
    close(sums, lse, np.float64)
    close(sum(part[0] for part in parts), dq, np.float64)
    for i, want in ((1, dk), (2, dv)):
        close(np.concatenate([part[i] for part in parts], axis=2), want, np.float64)


def test_merging_with_rows_that_saw_nothing_keeps_the_other(implementation, rng):
    out, lse = rng.standard_normal((1, 2, 5, 3)), rng.standard_normal((1, 2, 5))
    nothing = np.zeros(out.shape), np.full(lse.shape, -np.inf)
    for first, second in (((out.copy(), lse.copy()), nothing), (tuple(a.copy() for a in nothing), (out, lse))):
        merged, sums = kernels.attention_merge(*first, *second)
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_array_equal(sums, lse)
    merged, sums = kernels.attention_merge(*(a.copy() for a in nothing), *nothing)
    assert not merged.any() and (sums == -np.inf).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_dropout_does_not_depend_on_blocks_order_or_the_part_at_hand(implementation, rng, monkeypatch, dtype):
    q, k, v = drawn(rng, 2, 4, 4, 60, 60, 4, 4, dtype)
    dropout = AttentionDropout(7, 1, 0.4, (2, 4, 60, 60))
    whole, _ = kernels.attention_forward(q, k, v, 1.0, EVERYTHING, dropout)
    order = rng.permutation(60)
    part = AttentionDropout(7, 1, 0.4, (2, 4, 60, 60), offset=(1, 2))
    visible = Visible(q_positions=order[:21], k_positions=order)
    keys = k[1:, 2:4, order], v[1:, 2:4, order]
    piece, _ = kernels.attention_forward(q[1:, 2:4, order[:21]], *keys, 1.0, visible, part)
    close(piece, whole[1:, 2:4, order[:21]], dtype)
    monkeypatch.setattr(reference, "BLOCK", (9, 5))
    again, _ = kernels.attention_forward(q, k, v, 1.0, EVERYTHING, dropout)
    close(again, whole, dtype)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_keeps_the_mean_of_weights(implementation, p):
    size = 160
    q = k = np.zeros((2, 3, size, 4), np.float32)
    v = np.ones((2, 3, size, 1), np.float32)
    dropout = AttentionDropout(11, 5, p, (2, 3, size, size))
    out, lse = kernels.attention_forward(q, k, v, 1.0, EVERYTHING, dropout)
    np.testing.assert_allclose(lse, np.log(size), rtol=1e-6)
    if p == 1:
        assert not out.any()
        return
    spread = (p / (1 - p) / size) ** 0.5  # of the mean of `size` weights that are 0 or 1 / (1 - p)
    assert abs(out.mean() - 1) < 5 * spread / out.size**0.5
    assert 0.9 < out.std() / spread < 1.1


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 4, 5, 6), (1, 0, 0, 3, 4, 5, 6), (1, 2, 1, 0, 4, 5, 6),
                                   (1, 2, 1, 3, 0, 5, 6), (1, 2, 2, 3, 4, 0, 6), (1, 2, 1, 3, 4, 5, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_empty_arrays_pass(implementation, shape, dtype):
    n, h, g, length, keys, e, v = shape
    q, k, w = np.ones((n, h, length, e), dtype), np.ones((n, g, keys, e), dtype), np.ones((n, g, keys, v), dtype)
    out, lse = kernels.attention_forward(q, k, w, 1.0, EVERYTHING)
    assert out.shape == (n, h, length, v) and lse.shape == (n, h, length)
    want = np.log(keys) + e if keys else -np.inf
    np.testing.assert_allclose(lse, np.full(lse.shape, want), rtol=1e-6)
    assert (out == (1 if keys else 0)).all()
    gradients = kernels.attention_backward(out, q, k, w, out, lse, 1.0, EVERYTHING)
    assert [a.shape for a in gradients] == [q.shape, k.shape, w.shape]
    assert not gradients[0].any() and not gradients[1].any()


def test_float16_is_computed_in_float32(implementation, rng):
    q, k, v = (rng.standard_normal((1, 2, 40, 8)).astype(np.float16) for _ in range(3))
    want, want_lse, gradients = plain(q, k, v, 0.3, EVERYTHING)
    out, lse = kernels.attention_forward(q, k, v, 0.3, EVERYTHING)
    assert out.dtype == np.float16 and lse.dtype == np.float32
    close(out, want, np.float16)
    close(lse, want_lse, np.float32)
    got = kernels.attention_backward(out, q, k, v, out, lse, 0.3, EVERYTHING)
    for mine, theirs in zip(got, gradients(out), strict=False):
        assert mine.dtype == np.float16
        close(mine, theirs, np.float16)


def test_large_scores_neither_overflow_nor_lose_the_row(implementation):
    q = np.full((1, 1, 3, 2), 300, np.float32)
    k = np.stack([np.full((1, 1, 2), 300, np.float32), np.full((1, 1, 2), -300, np.float32)], axis=2)
    v = np.array([[[[2.0], [5.0]]]], np.float32)
    out, lse = kernels.attention_forward(q, k, v, 1.0, EVERYTHING)
    np.testing.assert_array_equal(out, np.full((1, 1, 3, 1), 2, np.float32))
    np.testing.assert_allclose(lse, 180000, rtol=1e-6)


def test_not_a_number_shows(implementation):
    q, k, v = (np.ones((1, 1, 20, 4), np.float32) for _ in range(3))
    q[0, 0, 3, 1] = np.nan
    with np.errstate(invalid="ignore"):
        out, lse = kernels.attention_forward(q, k, v, 1.0, EVERYTHING)
    bad = np.isnan(out[0, 0]).any(axis=1)
    assert bad[3] and not np.delete(bad, 3).any() and np.isnan(lse[0, 0, 3])


def test_blocks_that_cannot_be_seen_are_passed_over(implementation, rng, small_blocks, monkeypatch):
    """Keys that nobody sees may be anything, and a zigzag order has as many blocks as it needs."""
    q, k, v = (rng.standard_normal((1, 1, 96, 4)) for _ in range(3))
    k[:, :, 48:] = np.nan
    with np.errstate(invalid="raise"):
        out, _ = kernels.attention_forward(q[:, :, :48], k, v, 1.0, Visible(causal=True))
    assert np.isfinite(out).all()
    positions = np.r_[0:48, 144:192]
    sight = visible_module.Sight(Visible(causal=True, q_positions=positions, k_positions=positions), (1, 1, 96, 96),
                                 (16, 16))
    states = sight.states[0]
    none, some, every = visible_module.NONE, visible_module.SOME, visible_module.ALL
    assert (np.diag(states) == some).all() and (states[np.tril_indices(6, -1)] == every).all()
    assert (states[np.triu_indices(6, 1)] == none).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_outlines_have_the_shapes_and_memory_of_results(implementation, dtype):
    arrays = [np.ones(s, dtype) for s in ((2, 4, 30, 8), (2, 2, 20, 8), (2, 2, 20, 6))]
    visible = Visible(causal=True, mask=np.zeros((4, 1, 20), dtype))
    results = []
    for q, k, v in (arrays, [kernels.outline.empty(a.shape, a.dtype) for a in arrays]):
        out, lse = kernels.attention_forward(q, k, v, 0.5, visible)
        out, lse = kernels.attention_merge(out, lse, out, lse)
        results.append((out, lse, *kernels.attention_backward(out, q, k, v, out, lse, 0.5, visible, None, True)))
    for real, outline in zip(*results, strict=True):
        assert (outline.shape, outline.dtype, outline.strides) == (real.shape, real.dtype, real.strides)


def test_shapes_that_do_not_fit_are_refused(implementation):
    a = np.ones((2, 4, 3, 5))
    with pytest.raises(ValueError, match=r"query \(2, 4, 3, 5\), key \(2, 3, 3, 5\).* H a multiple of G"):
        kernels.attention_forward(a, a[:, :3], a[:, :3], 1.0, EVERYTHING)
    with pytest.raises(ValueError, match="documents are given for queries and keys, or for neither"):
        kernels.attention_forward(a, a, a, 1.0, Visible(q_documents=np.zeros((2, 3), int)))
    with pytest.raises(ValueError, match=r"k_positions has shape \(4,\), expected \(3,\)"):
        kernels.attention_forward(a, a, a, 1.0, Visible(k_positions=np.arange(4)))


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning")
def test_operands_in_two_bytes_round_and_sums_do_not(implementation, rng, compute_dtype, grouped):
    missing = kernels.compute_missing(compute_dtype)
    if missing:
        pytest.skip(missing)
    q, k, v = (rng.standard_normal((2, h, 150, 32)).astype(np.float32) for h in (4, *(2 if grouped else 4,) * 2))
    visible, g = Visible(causal=True), rng.standard_normal((2, 4, 150, 32)).astype(np.float32)
    found = {}
    for dtype in ("float32", compute_dtype):
        out, lse = kernels.attention_forward(q, k, v, 0.2, visible, compute_dtype=dtype)
        assert out.dtype == lse.dtype == np.float32
        gradients = kernels.attention_backward(g, q, k, v, out, lse, 0.2, visible, compute_dtype=dtype)
        found[dtype] = out, lse, *gradients
    part = kernels.ROUNDINGS[compute_dtype]
    for exact, near in zip(found["float32"], found[compute_dtype], strict=True):
        error = np.abs(near - exact).max() / np.abs(exact).max()
        assert part / 50 < error < 6 * part
    with pytest.raises(ValueError, match="takes float32 arrays, got float64"):
        kernels.attention_forward(*(a.astype(np.float64) for a in (q, k, v)), 0.2, visible, compute_dtype=compute_dtype)
