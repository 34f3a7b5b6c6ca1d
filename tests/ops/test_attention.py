"""Attention with whole sequences: torch's arguments, our conditions, every split of samples and heads, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.testing import (
    collective_assert,
    compare_with_serial,
    draw_layout,
    draw_mesh,
    operand,
    run_cases,
    shared_mesh,
)
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional
reference = torch.nn.functional.scaled_dot_product_attention


def seen(queries: int, keys: int, causal: bool, window: Any, documents: Any = None) -> Any:
    """Torch's bool mask (N or 1, 1, L, S) for our conditions; every query of the tests sees a key."""
    q, k = np.arange(queries)[:, None], np.arange(keys)
    mask = np.ones((1, 1, queries, keys), bool)
    if causal:
        mask = mask & (k <= q)
    if window is not None:
        mask = mask & (k >= q - window[0]) & (k <= q + window[1])
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return torch.tensor(mask)


def arrays(rng: np.random.Generator, n=3, h=4, g=4, length=6, keys=6, e=3, v=5) -> list[np.ndarray]:
    return [rng.standard_normal(s) for s in ((n, h, length, e), (n, g, keys, e), (n, g, keys, v))]


def test_all_arguments_of_torch_give_what_torch_gives() -> None:
    """Under random splits of samples and heads, which may differ where one operand is whole."""

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        h, g = [(4, 4), (6, 2), (5, 5), (4, 1), (1, 1)][rng.integers(5)]
        length, keys = [(6, 6), (3, 7), (7, 3), (1, 1)][rng.integers(4)]
        operands = arrays(rng, int(rng.integers(1, 5)), h, g, length, keys)
        layout = draw_layout(rng, operands[0].shape, mesh, forbid=(2, 3))
        layouts = [layout if rng.integers(3) else Layout() for _ in operands]
        options: dict[str, Any] = {"enable_gqa": h != g}
        if rng.integers(2):
            options["scale"] = 0.7
        kind = rng.integers(4)
        if kind == 1:
            options["is_causal"] = True
        elif kind > 1:
            shapes = [(length, keys), (operands[0].shape[0], 1, length, keys), (1, h, 1, keys), (1, keys)]
            mask = rng.standard_normal(shapes[rng.integers(4)])
            if kind == 2:
                mask = mask > -0.5
                mask[..., 0] = True
            operands.append(mask)
            layouts.append(Layout())

        def ours(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            return F.scaled_dot_product_attention(q, k, v, mask, **options)

        def theirs(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            return reference(q, k, v, mask, **options)

        compare_with_serial(ours, theirs, operands, mesh, layouts)

    assert run_cases(case, 60, seed=31).accepted > 40


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 3)])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_windows_and_documents_hide_what_a_mask_would(causal: bool, window: Any, packed: bool) -> None:
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(5)
    operands = arrays(rng, 2, 5, 5, 9, 9)
    documents = np.sort(rng.integers(0, 3, (2, 9)), axis=1) if packed else None
    options = {"window": window, "is_causal": causal, "documents": documents}
    compare_with_serial(
        lambda *x: F.scaled_dot_product_attention(*x, **options),
        lambda *x: reference(*x, seen(9, 9, causal, window, documents)),
        operands,
        mesh,
        [Layout(None, "a")] * 3,
        out=Layout(None, "a"),
    )


def test_without_samples_or_heads() -> None:
    rng = np.random.default_rng(6)
    mesh = shared_mesh(a=hp.current_mesh().size)
    q, k, v = (a[0] for a in arrays(rng))
    for dims, layout in ((1, Layout()), (0, Layout("a"))):
        operands = [a[0] if dims else a for a in (q, k, v)]
        compare_with_serial(
            lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
            lambda *x: reference(*x, is_causal=True),
            operands,
            mesh,
            [layout] * 3,
        )


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)], ids=["samples", "heads", "tokens"])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    q, k, v = (operand(np.zeros(shape), mesh, Layout("a"), requires_grad=True) for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.sum().backward()
    assert y.shape == shape and q.grad.shape == k.grad.shape == v.grad.shape == shape


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient() -> None:
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(7)
    q, k, v = (operand(a, mesh, Layout(None, "a"), requires_grad=True) for a in arrays(rng))
    mask = np.ones((6, 6), bool)
    mask[2] = False
    y = F.scaled_dot_product_attention(q, k, v, mask)
    y.sum().backward()
    assert not y.numpy()[:, :, 2].any() and np.isfinite(y.numpy()).all() and y.numpy()[:, :, 3].all()
    assert not q.grad.numpy()[:, :, 2].any() and np.isfinite(k.grad.numpy()).all()


@pytest.mark.ranks(min=2)
def test_splits_of_samples_and_heads_send_nothing() -> None:
    p = hp.current_mesh().size
    mesh, rng = shared_mesh(a=p), np.random.default_rng(8)
    for layout in (Layout("a"), Layout(None, "a")):
        operands = [operand(a, mesh, layout, True) for a in arrays(rng, 5, 2 * p, p)]
        with counter.counting() as sent:
            y = F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)
            y.sum().backward(retain_graph=True)
        assert list(sent) in ([], [("all_reduce", "a")]), "the sum's own message at most"
        assert sum(t.bytes for t in sent.values()) < 100


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (6, 3), (2, 1)])
def test_few_key_heads_are_sliced_for_the_query_heads_of_a_rank(heads: tuple[int, int]) -> None:
    """6 heads over 4 ranks cut the groups: rank 1 has one head of the first group and one of the second."""
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(9)
    compare_with_serial(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        lambda *x: reference(*x, is_causal=True, enable_gqa=True),
        arrays(rng, 2, *heads),
        mesh,
        [Layout(None, "a"), Layout(), Layout()],
        out=Layout(None, "a"),
    )


def test_dropped_weights_are_the_same_under_every_layout_and_as_many_as_asked_for() -> None:
    rng, results = np.random.default_rng(10), []
    q, k, v = arrays(rng, 2, 3, 3, 40, 40, 4, 40)
    v[:] = np.eye(40)  # the result is the matrix of weights
    for layout in (Layout(), Layout("a"), Layout(None, "a")):
        mesh = shared_mesh(a=hp.current_mesh().size)
        hp.manual_seed(3)
        y = F.scaled_dot_product_attention(*[operand(a, mesh, layout) for a in (q, k, v)], dropout_p=0.3)
        again = F.scaled_dot_product_attention(*[operand(a, mesh, layout) for a in (q, k, v)], dropout_p=0.3)
        results.append(y.numpy())
        assert not np.array_equal(y.numpy(), again.numpy()), "another call drops others"
    weights = reference(*[torch.tensor(a) for a in (q, k, v)]).numpy()
    for got in results:
        kept = got != 0
        assert 0.66 < kept.mean() < 0.74
        assert np.allclose(got[kept], weights[kept] / 0.7, rtol=1e-12)
        assert np.array_equal(kept, results[0] != 0)


def test_the_gradient_with_dropout_is_that_of_the_kept_weights() -> None:
    """The weights that were kept are read off the forward pass and given to torch as a product."""
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(11)
    q, k, v = arrays(rng, 2, 3, 3, 7, 7, 4, 7)
    eye = np.broadcast_to(np.eye(7), v.shape).copy()
    hp.manual_seed(4)
    shown = F.scaled_dot_product_attention(*[operand(a, mesh) for a in (q, k, eye)], dropout_p=0.4)
    kept = torch.tensor((shown.numpy() != 0) / 0.6)

    def ours(*x: Any) -> Any:
        hp.manual_seed(4)
        return F.scaled_dot_product_attention(*x, dropout_p=0.4)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return (torch.softmax(q @ k.transpose(2, 3) / 2, -1) * kept) @ v

    compare_with_serial(ours, theirs, [q, k, v], mesh, [Layout(None, "a")] * 3)
    hp.manual_seed(4)
    assert not F.scaled_dot_product_attention(*[operand(a, mesh) for a in (q, k, v)], dropout_p=1).numpy().any()


def test_float32_is_within_its_rounding() -> None:
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(12)
    compare_with_serial(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
        lambda *x: reference(*x, is_causal=True),
        [a.astype(np.float32) for a in arrays(rng, 2, 4, 4, 33, 33, 8, 8)],
        mesh,
        [Layout(None, "a")] * 3,
    )


def test_the_checked_mode_holds_the_value_against_its_gradient() -> None:
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(13)
    operands = [operand(a, mesh, Layout(None, "a"), True) for a in arrays(rng)]
    with hp.checked():
        F.scaled_dot_product_attention(*operands, is_causal=True).sum().backward()
    op = operands[0].sig.rules and F.scaled_dot_product_attention(*operands, is_causal=True).node.op
    right = op.backward

    def wrong(*args: Any) -> Any:
        dq, dk, dv = right(*args)
        return dq, dk, 2 * dv

    op.backward = wrong
    try:
        with hp.checked(), pytest.raises(hp.checks.CheckError, match="the value of operation.*a factor of 2"):
            F.scaled_dot_product_attention(*operands, is_causal=True).sum().backward()
    finally:
        del op.backward


WRONG = {
    "heads": (((2, 4, 6, 3), (2, 2, 6, 3), (2, 2, 6, 3)), {}, "enable_gqa=True"),
    "groups": (((2, 4, 6, 3), (2, 3, 6, 3), (2, 3, 6, 3)), {"enable_gqa": True}, "do not divide into 3 groups"),
    "width": (((2, 4, 6, 3), (2, 4, 6, 2), (2, 4, 6, 3)), {}, "expected .N, H, L, E."),
    "dims": (((2, 4, 6, 3, 1), (2, 4, 6, 3), (2, 4, 6, 3)), {}, "as many dims"),
    "mask and causal": (((2, 4, 6, 3),) * 3, {"attn_mask": np.ones((6, 6), bool), "is_causal": True}, "exclude"),
    "mask": (((2, 4, 6, 3),) * 3, {"attn_mask": np.ones((5, 6), bool)}, "does not broadcast"),
    "integer mask": (((2, 4, 6, 3),) * 3, {"attn_mask": np.ones((6, 6), int)}, "bool or float64 as .* got int64"),
    "dropout": (((2, 4, 6, 3),) * 3, {"dropout_p": 1.5}, "a probability"),
    "window": (((2, 4, 6, 3),) * 3, {"window": (-1, 2)}, "at least 0"),
    "documents": (((2, 4, 6, 3),) * 3, {"documents": np.zeros((2, 5), int)}, "documents are integers"),
    "order": (((2, 4, 6, 3),) * 3, {"order": "reversed"}, "natural, zigzag"),
    "context": (((2, 4, 6, 3),) * 3, {"context": "torus"}, "auto, ring, all_to_all, gather"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_make_no_sense_are_named(what: str) -> None:
    shapes, options, text = WRONG[what]
    with pytest.raises(ValueError, match=text):
        F.scaled_dot_product_attention(*[hp.tensor(np.ones(s)) for s in shapes], **options)


@pytest.mark.ranks(exactly=4)
def test_layouts_that_are_not_served_are_named_before_any_message() -> None:
    mesh = shared_mesh(a=2, b=2)
    whole, width = Layout(), Layout(None, None, None, "a")
    refused = [
        ((width, whole, whole), "last dim of the query is split; call .repartition"),
        ((Layout("a"), Layout("b"), whole), "samples are split differently"),
        ((Layout(None, "a"), Layout(None, "b"), whole), "heads are split differently"),
        ((Layout(None, None, "a"), Layout(None, None, "b"), whole), "tokens are split differently in query and key"),
        ((Layout("a"), Layout(None, "a"), whole), "axis 'a' splits two dims"),
        ((whole, Layout(None, ("a", "b")), whole), "groups of the 8 heads"),
    ]
    for layouts, text in refused:
        shapes = ((4, 8, 4, 2), (4, 2, 4, 2), (4, 2, 4, 2))
        operands = [operand(np.ones(s), mesh, lay) for s, lay in zip(shapes, layouts, strict=True)]
        with counter.counting() as sent, pytest.raises(LayoutError, match=text) as raised:
            F.scaled_dot_product_attention(*operands, enable_gqa=True)
        assert "it takes samples and heads split by any axes" in str(raised.value)
        collective_assert(mesh.world, not sent, "a message before the error")


def test_more_dims_before_the_heads_are_samples_too() -> None:
    """A batch and frames, both split: blocks of samples that do not follow each other in the global array."""

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        lead = tuple(int(n) for n in rng.integers(1, 4, 2 + rng.integers(2)))
        arrays = [rng.standard_normal((*lead, h, 5, 3)) for h in (4, 2, 2)]
        layout = draw_layout(rng, arrays[0].shape, mesh, forbid=(-1, -2, -3))
        options: dict[str, Any] = {"enable_gqa": True}
        if rng.integers(2):
            arrays.append(rng.standard_normal([(5, 5), (4, 5, 5), (4, 1, 5)][rng.integers(3)]))
        else:
            options["is_causal"] = True
        compare_with_serial(
            lambda *x: F.scaled_dot_product_attention(*x, **options),
            lambda *x: reference(*x, **options),
            arrays,
            mesh,
            [layout] * 3 + [Layout()] * (len(arrays) - 3),
            out=layout,
        )

    assert run_cases(case, 25, seed=32).accepted == 25


def test_dropout_counts_samples_over_all_dims_before_the_heads() -> None:
    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal((3, 5, 2, 4, 3)) for _ in range(3))
    results, gradients = [], []
    mesh = shared_mesh(a=hp.current_mesh().size)
    for layout in (Layout(), Layout("a"), Layout(None, "a"), Layout(None, None, "a")):
        hp.manual_seed(6)
        operands = [operand(a, mesh, layout, True) for a in (q, k, v)]
        y = F.scaled_dot_product_attention(*operands, dropout_p=0.4)
        (y * y).sum().backward()
        results.append(y.numpy())
        gradients.append([t.grad.numpy() for t in operands])
    hp.manual_seed(6)
    flat = F.scaled_dot_product_attention(*[operand(a.reshape(15, 2, 4, 3), mesh) for a in (q, k, v)], dropout_p=0.4)
    for got, grads in zip(results, gradients, strict=True):
        assert np.allclose(got, flat.numpy().reshape(got.shape), rtol=1e-12, atol=1e-14)
        for a, b in zip(grads, gradients[0], strict=True):
            assert np.allclose(a, b, rtol=1e-11, atol=1e-13)
