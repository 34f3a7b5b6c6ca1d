"""The vision transformer of volumes: its block against torch, its patches and positions, its plan."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.models import Spread, ViT3d, place
from hpcpar.models.vit3d import GlobalAttention
from hpcpar.models.volume_tokens import Block, PatchEmbedding, ToVoxels, sin_cos_positions
from hpcpar.testing import shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()


@pytest.mark.parametrize("context", ["ring", "all_to_all", "gather"])
def test_a_block_equals_torch_on_a_split_grid(context, compare_block):
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        block = Block(12, GlobalAttention(12, heads=3), hidden=10, dropout=0.0)
        for p in block.parameters():
            nn.init.normal_(p, std=0.4)
    block.attention.context = context
    array = np.random.default_rng(0).standard_normal((2, 5, 3, 2, 12))
    compare_block(block, array, mesh, heads=3)


@pytest.mark.ranks(min=2)
def test_patches_with_the_borders_of_blocks_need_no_message():
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        embedding, voxels = PatchEmbedding(1, 6, (2, 3, 3)), ToVoxels(6, 2, (2, 3, 3))
    x = hp.tensor(np.ones((1, 1, 4 * RANKS, 5, 6)), mesh, L(None, None, "depth"), requires_grad=True)
    with counting() as sent:
        tokens = embedding(x)
        y = voxels(tokens, x.shape[2:])
        (y * y).sum().backward()
    assert y.shape == (1, 2, 4 * RANKS, 5, 6) and tokens.layout == L(None, "depth")
    assert not any(tally.bytes for (name, _), tally in sent.items() if name == "halo")


def test_waves_tell_all_positions_apart_and_are_the_same_under_every_split():
    mesh = shared_mesh(height=RANKS)
    tokens = hp.tensor(np.zeros((1, 3, 5, 4, 20)), mesh, L(None, None, "height"))
    table = sin_cos_positions(tokens)
    whole = sin_cos_positions(tokens.repartition(L())).numpy()
    assert table.layout == L(None, "height").on(table.shape, mesh.shape)
    assert np.array_equal(table.numpy(), whole)
    assert len(np.unique(whole.reshape(60, 20).round(9), axis=0)) == 60
    assert not whole[..., 18:].any(), "the channels that do not divide by 6"


def test_the_plan_splits_heads_and_hidden_channels_and_learned_positions():
    mesh = shared_mesh(depth=RANKS, model=1) if RANKS % 2 else shared_mesh(depth=RANKS // 2, model=2)
    with mesh:
        model = ViT3d(1, 2, width=12, depth=1, heads=3, patch=2, positions="learned", size=8, refine=3)
    said = place(model, mesh, Spread())
    split = "model" if RANKS % 2 == 0 else None
    depth = "depth" if mesh.shape["depth"] > 1 else None
    assert model.blocks[0].attention.q.weight.layout == L(split)
    assert model.blocks[0].mlp.down.weight.layout == L(None, split)
    assert model.positions.layout == L(depth)
    assert any("blocks.*.attention.o: Row" in line for line in said) == (split is not None)
    assert ("blocks.*.attention: Placement(context='auto')" in said) == (depth is not None)
    place(model, mesh, Spread(context="gather"))
    assert model.blocks[0].attention.context == ("gather" if depth else "auto")
    shown = model.state_dict(numpy=True)
    assert shown["blocks.0.attention.q.weight"].shape == (12, 12)
    assert shown["voxels.weight"].shape == (8 * 3, 12)


def test_arguments_that_do_not_fit_are_named():
    with shared_mesh(depth=RANKS) as mesh:
        with pytest.raises(ValueError, match="one of classes and outputs"):
            ViT3d(1, 2, 3)
        with pytest.raises(ValueError, match="do not divide into 5 heads"):
            ViT3d(1, 2, width=12, heads=5)
        with pytest.raises(ValueError, match="with a size"):
            ViT3d(1, 2, positions="learned")
        model = ViT3d(1, 2, width=12, depth=1, heads=3, patch=2, positions="learned", size=8)
        with pytest.raises(ValueError, match="learned positions"):
            model(hp.tensor(np.zeros((1, 1, 8, 8, 9), np.float32), mesh))
        with pytest.raises(ValueError, match=r"takes \(N, 1, D, H, W\)"):
            model(hp.tensor(np.zeros((1, 2, 8, 8, 8), np.float32), mesh))
