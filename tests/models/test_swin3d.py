"""The Swin transformer of volumes: its block against attention that knows no windows, its merging and its plan."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.models import Spread, Swin3d, place
from hpcpar.models.swin3d import PatchMerging, WindowedAttention
from hpcpar.models.volume_tokens import Block, triple
from hpcpar.testing import shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()


def mask_of_windows(block, size, window, shifts):
    """What the block's windows add to the scores of all tokens of the grid: a pair is hidden if no window has both.

    Windows are those of the unrolled grid: token i of a dim is in window ``(i - shift) // w``. The bias is looked up by
    the distance of two tokens in the grid.
    """
    place = np.indices(size).reshape(3, int(np.prod(size)))
    away = place[:, :, None] - place[:, None, :]
    homes = [(p - s) // m for p, s, m in zip(place, shifts, window, strict=True)]
    seen = np.all([h[:, None] == h[None, :] for h in homes], axis=0)
    row = 0
    for distance, m in zip(away, block.attention.window, strict=True):
        row = row * (2 * m - 1) + np.where(seen, distance, 0) + m - 1
    bias = block.state_dict(numpy=True)["attention.bias_table"][row].transpose(2, 0, 1)
    return np.where(seen, bias, -np.inf)


@pytest.mark.parametrize(
    ("size", "window", "shifted", "fitted", "shifts"),
    [
        ((6, 4, 4), 2, False, (2, 2, 2), (0, 0, 0)),
        ((6, 4, 4), 2, True, (2, 2, 2), (1, 1, 1)),
        ((7, 5, 2), 3, True, (3, 3, 2), (1, 1, 0)),
        ((2, 5, 7), (4, 3, 4), True, (2, 3, 4), (0, 1, 2)),
    ],
    ids=["whole", "shifted", "hanging over", "small grid"],
)
def test_a_block_equals_attention_that_hides_what_no_window_has(size, window, shifted, fitted, shifts, compare_block):
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        block = Block(6, WindowedAttention(6, 3, triple(window, "window"), shifted), 8, 0.0)
        for p in block.parameters():
            nn.init.normal_(p, std=0.5)
    assert block.attention.fitted(size) == (fitted, shifts)
    array = np.random.default_rng(0).standard_normal((2, *size, 6))
    compare_block(block, array, mesh, heads=3, mask=mask_of_windows(block, size, fitted, shifts))


def test_merging_normalises_and_maps_each_eight_neighbours():
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        merging = PatchMerging(2)
    array = np.random.default_rng(1).standard_normal((2, 5, 4, 2, 2))
    y = merging(hp.tensor(array, mesh, L(None, "depth")))
    filled = np.pad(array, [(0, 0), (0, 1), (0, 0), (0, 0), (0, 0)])
    eight = filled.reshape(2, 3, 2, 2, 2, 1, 2, 2).transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(2, 3, 2, 1, 16)
    centred = eight - eight.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    wanted = normal @ merging.state_dict(numpy=True)["weight"].T
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(min=2)
def test_only_shifted_windows_send_tokens_where_borders_agree():
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        blocks = [Block(4, WindowedAttention(4, 2, (2, 2, 2), shifted), 8, 0.0) for shifted in (False, True)]
    x = hp.tensor(np.ones((1, 4 * RANKS, 4, 2, 4)), mesh, L(None, "depth"))
    plane = 4 * 2 * 4 * 8
    for block, planes in zip(blocks, (0, 2), strict=True):
        with counting() as sent:
            block(x)
        halo = sum(tally.bytes for (name, _), tally in sent.items() if name == "halo")
        assert halo == planes * plane, "a plane there and its result back"


def test_the_plan_splits_heads_hidden_channels_and_decoder():
    mesh = shared_mesh(depth=RANKS, model=1) if RANKS % 2 else shared_mesh(depth=RANKS // 2, model=2)
    with mesh:
        model = Swin3d(1, 2, width=6, depths=(1, 1), heads=(3, 3), window=2, base=4)
    said = place(model, mesh, Spread())
    split = "model" if RANKS % 2 == 0 else None
    stage = dict(model.named_modules())
    assert stage["stage1.0.attention.q"].weight.layout == L(split)
    assert stage["stage0.0.attention"].bias_table.layout == L(None, split)
    assert stage["stage0.0.mlp.up"].weight.layout == L(split), "and not as a transposed convolution"
    assert model.join.conv2.weight.layout == model.up.weight.layout.replace(0, None).replace(1, split)
    assert len(said) == (10 if split else 0)
    shown = model.state_dict(numpy=True)
    assert shown["merging1.weight"].shape == (12, 48) and shown["stage1.0.attention.o.weight"].shape == (12, 12)


def test_arguments_that_do_not_fit_are_named():
    with shared_mesh(depth=RANKS) as mesh:
        with pytest.raises(ValueError, match="heads that divide"):
            Swin3d(1, 2, width=6, depths=(1, 1), heads=(3, 5))
        with pytest.raises(ValueError, match="window is one positive number"):
            Swin3d(1, 2, window=(2, 0, 2))
        model = Swin3d(1, 2, width=4, depths=(1,), heads=(2,), window=2, base=4)
        with pytest.raises(ValueError, match=r"takes \(N, 1, D, H, W\)"):
            model(hp.tensor(np.zeros((1, 2, 8, 8, 8), np.float32), mesh))
