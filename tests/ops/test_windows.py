"""Windows of a grid of tokens that cross the borders of shards: what moves, and what is refused.

Results and gradients for random windows and layouts are those of torch: `test_transformer_generator`.
"""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import collective_assert, shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
DEPTH = {"depth": RANKS}


def test_merge_undoes_partition_where_windows_hang_over_and_ranks_have_none():
    mesh = shared_mesh(**DEPTH)
    x = hp.tensor(np.arange(2 * 5 * 3 * 2.0).reshape(2, 5, 3, 2), mesh, L(None, "depth"))
    windows = F.window_partition(x, (4, 2), (2, 1))
    assert windows.shape == (2, 2, 2, 8, 2) and windows.layout == x.layout
    back = F.window_merge(windows, (4, 2), (5, 3), (2, 1))
    assert back.layout == x.layout and np.array_equal(back.numpy(), x.numpy())


@pytest.mark.ranks(min=2)
def test_nothing_moves_where_windows_and_blocks_have_the_same_borders():
    x = hp.tensor(np.ones((1, 6 * RANKS, 4, 2)), shared_mesh(**DEPTH), L(None, "depth")).requires_grad_()
    with counting() as sent:
        y = F.window_partition(x, (3, 4))
        F.window_merge(y, (3, 4), x.shape[1:-1]).sum().resolve()
    assert not any(tally.bytes for (name, _), tally in sent.items() if name == "halo")


@pytest.mark.ranks(min=2)
def test_a_shift_moves_its_planes_over_every_border_and_as_many_back():
    x = hp.tensor(np.ones((1, 6 * RANKS, 4, 5)), shared_mesh(**DEPTH), L(None, "depth")).requires_grad_()
    plane = 4 * 5 * x.dtype.itemsize
    with counting() as sent:
        y = F.window_partition(x, (3, 2), (1, 1))
    assert sum(tally.bytes for tally in sent.values()) == plane
    with counting() as sent:
        y.backward(y.detach())
    assert sum(tally.bytes for tally in sent.values()) == plane


@pytest.mark.ranks(min=2)
def test_uneven_blocks_move_what_lies_in_the_windows_of_others():
    mesh = shared_mesh(**DEPTH)
    n, w = 11, 2
    x = hp.tensor(np.ones((1, n, 3)), mesh, L(None, "depth"))
    with counting() as sent:
        F.window_partition(x, w)
    grid, (own,) = -(-n // w), [x.sig.box[1]]
    r = mesh.index("depth")
    wanted = range(r * grid // RANKS * w, min((r + 1) * grid // RANKS * w, n))
    missing = sum(not own[0] <= i < own[1] for i in wanted)
    received = mesh.world.gather_objects(missing)
    here = sum(tally.bytes for tally in sent.values())
    collective_assert(mesh.world, sum(mesh.world.gather_objects(here)) == sum(received) * 3 * 8, f"{here} bytes sent")
    assert sum(received) > 0


@pytest.mark.ranks(min=2)
def test_attention_inside_windows_sends_nothing():
    mesh = shared_mesh(**DEPTH)
    q = hp.tensor(np.ones((1, 2 * RANKS, 2, 4, 3)), mesh, L(None, "depth")).requires_grad_()
    with counting() as sent:
        y = F.window_attention(q, q, q, size=[8 * RANKS], window_size=4, shift_size=1)
        y.backward(y.detach())
    assert not sum(tally.bytes for tally in sent.values())


@pytest.mark.parametrize("name", ["attn_mask", "dropout_p", "is_causal", "enable_gqa", "documents", "order", "context"])
def test_masks_and_dropout_are_refused_by_name(name):
    q = hp.tensor(np.ones((1, 2, 1, 4, 5)), shared_mesh(**DEPTH))
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        F.window_attention(q, q, q, size=[8], window_size=4, **{name: None})


def test_a_mask_in_the_place_of_the_table_or_the_scale_is_refused():
    mesh = shared_mesh(**DEPTH)
    q, mask = hp.tensor(np.ones((1, 2, 1, 4, 5)), mesh), hp.tensor(np.ones((4, 4), bool), mesh)
    with pytest.raises(ValueError, match=r"a table of shape \(4, 4\) is not that of 1 heads"):
        F.window_attention(q, q, q, mask, size=[8], window_size=4)
    for wrong in (mask, np.ones((4, 4)), "mean"):
        with pytest.raises(TypeError, match="window_attention: scale is a number, got a .*; it takes no mask"):
            F.window_attention(q, q, q, size=[8], window_size=4, scale=wrong)
    with pytest.raises(ValueError, match="window_attention: compute_dtype is one of float32, bfloat16, float16"):
        F.window_attention(q, q, q, size=[8], window_size=4, compute_dtype="half")


def test_what_cannot_be_served_is_named():
    mesh = shared_mesh(**DEPTH)
    x = hp.tensor(np.ones((2, 4, 6, 5)), mesh, L(None, "depth"))
    with pytest.raises(ValueError, match="less than the window"):
        F.window_partition(x, 2, 2)
    with pytest.raises(ValueError, match="1 to 3 dims"):
        F.window_partition(hp.tensor(np.ones((2, 4)), mesh), 2)
    y = F.window_partition(x, 2)
    q = hp.tensor(np.ones((2, 2, 3, 1, 4, 5)), mesh, L(None, "depth"))
    with pytest.raises(ValueError, match="not the windows"):
        F.window_merge(y, 2, (4, 7))
    with pytest.raises(ValueError, match="a table of shape"):
        F.window_attention(q, q, q, hp.tensor(np.ones((1, 2, 2)), mesh), size=[4, 6], window_size=2)
    if RANKS > 1:
        with pytest.raises(hp.LayoutError, match="tokens of a window"):
            F.window_merge(y.repartition(L(None, None, None, "depth")), 2, (4, 6))
        q = hp.tensor(np.ones((2, 2, 3, 2, 5)), mesh, L(None, None, None, "depth"))
        with pytest.raises(hp.LayoutError, match="may not be split"):
            F.window_attention(q, q, q, size=[4], window_size=2)
        p = q.repartition(L())
        q = q.repartition(L(None, "depth"))
        assert F.window_attention(q, p, p, size=[4], window_size=2).layout == q.layout
        with pytest.raises(hp.LayoutError, match="operands lie differently"):
            F.window_attention(q, p.repartition(L(None, None, "depth")), p, size=[4], window_size=2)
