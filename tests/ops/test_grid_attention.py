"""Attention over all tokens of a split grid, against torch."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import CaseCount, compare_with_serial, draw_layout, draw_mesh, run_cases, shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()


def torch_attention(q, k, v, scale=None):
    import torch

    n, h, *grid, _ = q.shape
    flat = [a.reshape(n, h, int(np.prod(grid)), a.shape[-1]) for a in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*flat, scale=scale).reshape(n, h, *grid, v.shape[-1])


@pytest.mark.parametrize("context", ["auto", "ring", "all_to_all", "gather"])
def test_attention_equals_torch_for_random_grids_and_layouts(context):
    pytest.importorskip("torch")

    def case(rng):
        # two tokens at least: the gradient of a single one's query is zero, and rounding
        grid = (int(rng.integers(2, 5)), *[int(n) for n in rng.integers(1, 5, int(rng.integers(3)))])
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 5)), *grid)
        wide, out = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        mesh = draw_mesh(rng)
        layout = draw_layout(rng, (*shape, 1), mesh, partial=True, forbid=[-1])
        kept = L(*[layout.entry(d) for d in range(len(shape))])
        arrays = [rng.standard_normal((*shape, e)) for e in (wide, wide, out)]
        compare_with_serial(
            lambda q, k, v: F.grid_attention(q, k, v, scale=0.8, context=context),
            lambda q, k, v: torch_attention(q, k, v, 0.8), arrays, mesh, [layout, kept, kept], out=kept,
        )  # fmt: skip

    assert run_cases(case, 16, seed=3) == CaseCount(accepted=16)


def tokens(heads, **options):
    shape = (2, heads, 2 * RANKS, 3, 4)
    return hp.tensor(np.ones(shape), shared_mesh(depth=RANKS), L(None, None, "depth"), **options)


def sent_by(call):
    with counting() as sent:
        result = call()
    return result, {name: tally.bytes for (name, _), tally in sent.items() if tally.bytes}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("context", ["ring", "all_to_all", "gather"])
def test_bytes_are_those_of_the_closed_forms(context):
    q, k, v = (tokens(RANKS, requires_grad=True) for _ in range(3))
    words = q.sig.size  # N S C
    closed = 4 * (RANKS - 1) / RANKS**2 if context == "all_to_all" else 2 * (RANKS - 1) / RANKS
    y, forward = sent_by(lambda: F.grid_attention(q, k, v, context=context))
    _, backward = sent_by(lambda: y.backward(y.detach()))
    assert sum(forward.values()) == pytest.approx(closed * words * 8)
    assert sum(backward.values()) == pytest.approx(closed * words * 8 * (2 if context == "ring" else 1))


@pytest.mark.ranks(min=2)
def test_heads_are_exchanged_where_they_divide_evenly_and_keys_travel_where_not():
    _, sent = sent_by(lambda: F.grid_attention(*[tokens(2 * RANKS)] * 3))
    assert sent and "ring" not in sent
    _, sent = sent_by(lambda: F.grid_attention(*[tokens(2 * RANKS + 1)] * 3))
    assert set(sent) == {"ring"}


def test_what_cannot_be_served_is_named():
    q = tokens(2)
    with pytest.raises(ValueError, match="context is one of"):
        F.grid_attention(q, q, q, context="star")
    with pytest.raises(ValueError, match="dims of tokens"):
        F.grid_attention(q, q[:, :1], q)
    if RANKS > 1:
        with pytest.raises(hp.LayoutError, match="features may not be split"):
            F.grid_attention(*[q.repartition(L(None, None, None, None, "depth"))] * 3)
        with pytest.raises(hp.LayoutError, match="operands lie differently"):
            F.grid_attention(q, q, q.repartition(L(None, None, None, "depth")))
        assert F.grid_attention(q, q.repartition(L()), q).layout == q.layout
