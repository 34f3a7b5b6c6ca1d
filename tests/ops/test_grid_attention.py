"""Attention over all tokens of a split grid: what moves, and what is refused.

Results and gradients for random grids and layouts are those of torch: `test_transformer_generator`.
"""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()


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
