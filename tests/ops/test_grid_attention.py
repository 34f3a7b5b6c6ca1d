"""Attention over all tokens of a split grid: what moves, and what is refused.

Results and gradients for random grids and layouts are those of torch: `test_transformer_generator`.
"""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import kernels
from hpcpar.testing import collective_assert, shared_mesh
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


@pytest.mark.parametrize("name", ["attn_mask", "dropout_p", "is_causal", "enable_gqa", "window", "documents", "order"])
def test_masks_and_dropout_are_refused_by_name(name):
    q = tokens(2)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        F.grid_attention(q, q, q, **{name: None})


def test_a_mask_in_the_place_of_the_scale_is_refused():
    """torch's function has its mask there."""
    q = tokens(2)
    for wrong in (np.ones((3, 3), bool), np.array([True]), tokens(1), "mean"):
        with pytest.raises(TypeError, match="grid_attention: scale is a number, got a .*; it takes no mask"):
            F.grid_attention(q, q, q, wrong)


def in_two_bytes(mesh, compute_dtype, context="auto"):
    """Result and gradients of attention over a grid whose depth is split, as whole arrays."""
    rng = np.random.default_rng(12)
    arrays = [rng.standard_normal((2, 4, 5, 3, 4, 16)).astype(np.float32) for _ in range(4)]
    q, k, v, g = (hp.tensor(a, mesh, L(None, None, "depth"), requires_grad=True) for a in arrays)
    y = F.grid_attention(q, k, v, context=context, compute_dtype=compute_dtype)
    y.backward(g.detach())
    return [a.numpy() for a in (y, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("context", ["ring", "all_to_all", "gather"])
@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning")
def test_products_in_two_bytes_are_those_of_one_rank(context, compute_dtype):
    if missing := kernels.compute_missing(compute_dtype):
        pytest.skip(missing)
    alone, mesh = hp.Mesh(MPI.COMM_SELF, depth=1), shared_mesh(depth=RANKS)
    exact, whole = (in_two_bytes(alone, dtype) for dtype in ("float32", compute_dtype))
    split = in_two_bytes(mesh, compute_dtype, context)
    alone.free()
    part = kernels.ROUNDINGS[compute_dtype]
    for full, want, got in zip(exact, whole, split, strict=True):
        scale = np.abs(full).max()
        away, apart = (np.abs(a - want).max() / scale for a in (full, got))
        limit = away if context == "ring" else 1e-5  # blocks of a ring round their weights before they are merged
        collective_assert(mesh.world, part / 50 < away < 6 * part and apart < limit, f"{away:.2g} {apart:.2g}")


def test_what_cannot_be_served_is_named():
    q = tokens(2)
    with pytest.raises(ValueError, match="context is one of"):
        F.grid_attention(q, q, q, context="star")
    with pytest.raises(ValueError, match="grid_attention: compute_dtype is one of float32, bfloat16, float16"):
        F.grid_attention(q, q, q, compute_dtype="half")
    with pytest.raises(ValueError, match="dims of tokens"):
        F.grid_attention(q, q[:, :1], q)
    if RANKS > 1:
        with pytest.raises(hp.LayoutError, match="features may not be split"):
            F.grid_attention(*[q.repartition(L(None, None, None, None, "depth"))] * 3)
        with pytest.raises(hp.LayoutError, match="operands lie differently"):
            F.grid_attention(q, q, q.repartition(L(None, None, None, "depth")))
        assert F.grid_attention(q, q.repartition(L()), q).layout == q.layout
