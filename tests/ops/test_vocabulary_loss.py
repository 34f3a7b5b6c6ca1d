"""Cross entropy over a vocabulary, (N, V, S) as a view of (N, S, V): any dims split, few words sent, nothing copied."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.testing import collective_assert, compare_with_serial, draw_layout, draw_mesh, run_cases, shared_mesh
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_samples_tokens_and_words_may_be_split_unevenly(reduction: str) -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = [(3, 5, 7), (1, 4, 2), (2, 3, 1), (0, 2, 3)][rng.integers(4 if reduction != "mean" else 3)]
        target = rng.integers(0, shape[2], shape[:2])
        target[rng.random(target.shape) < 0.3] = -1
        options = {"ignore_index": -1, "reduction": reduction, "label_smoothing": float(rng.choice([0, 0.1]))}
        if reduction == "mean" and not (target >= 0).any():
            return
        compare_with_serial(
            lambda x, t: F.cross_entropy(x.transpose(1, 2), t, **options),
            lambda x, t: torch.nn.functional.cross_entropy(x.transpose(1, 2), t, **options),
            [rng.standard_normal(shape), target],
            mesh,
            [draw_layout(rng, shape, mesh, partial=True), Layout()],
        )

    assert run_cases(case, 25, seed=41).accepted > 10


@pytest.mark.ranks(min=2)
def test_a_split_vocabulary_costs_three_words_a_token_forward_and_none_backward() -> None:
    p = hp.current_mesh().size
    mesh = shared_mesh(sequence=1 if p % 2 else 2, model=p if p % 2 else p // 2)
    model, parts = mesh.shape["model"], mesh.shape["sequence"]
    samples, tokens, words = 2, 6, 12
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((samples, tokens, words)).astype(np.float32)
    x = hp.tensor(logits, mesh, Layout(None, "sequence", "model"), requires_grad=True)
    target = hp.tensor(rng.integers(0, words, (samples, tokens)), mesh, Layout(None, "sequence"))
    with counter.counting() as forward:
        loss = F.cross_entropy(x.transpose(1, 2), target)
    with counter.counting() as backward:
        loss.backward()
    here = samples * tokens // parts
    # of each token the maximum, the sum of exponentials and the logit of the target
    sent = {axis: (tally.messages, tally.bytes) for (_, axis), tally in forward.items()}
    wanted = {"model": (2, 2 * (model - 1) / model * here * 3 * 4)} if model > 1 else {}
    if parts > 1:  # loss and count, and whether all targets are words
        wanted["sequence"] = (2, 2 * (parts - 1) / parts * 3 * 8)
    collective_assert(
        mesh.world, sent == {k: pytest.approx(v) for k, v in wanted.items()}, f"sent {sent}, not {wanted}"
    )
    collective_assert(mesh.world, not backward, f"backward sent {dict(backward)}")


@pytest.mark.serial
def test_logits_are_not_copied_and_backward_makes_one_array_of_their_size() -> None:
    if not kernels.available("numba"):
        pytest.skip("numba is not available")
    mesh = shared_mesh(a=1)
    logits = np.random.default_rng(1).standard_normal((2, 64, 8000)).astype(np.float32)
    x = hp.tensor(logits, mesh, requires_grad=True)
    target = hp.tensor(np.zeros((2, 64), np.int64), mesh)
    F.cross_entropy(x.transpose(1, 2), target).backward()  # compiles
    y = (x + 1.0).transpose(1, 2)
    tracemalloc.start()
    try:
        loss = F.cross_entropy(y, target)
        forward = tracemalloc.get_traced_memory()[1]
        rule, saved = loss.node.rule, loss.node.saved
        tracemalloc.reset_peak()
        (dx, _) = loss.node.op.backward(rule, saved, np.ones((), np.float32), (True, False))
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forward < 0.05 * logits.nbytes
    assert backward < 1.05 * logits.nbytes and dx.shape == (2, 8000, 64)
    assert dx.transpose(0, 2, 1).flags.c_contiguous, "the gradient lies as the logits do"
