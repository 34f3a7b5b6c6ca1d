"""The vision transformer of volumes: its block against torch, and the whole network on every mesh as on one rank."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.models import Spread, ViT3d, place
from hpcpar.models.vit3d import Block
from hpcpar.models.volume_tokens import PatchEmbedding, ToVoxels, sin_cos_positions
from hpcpar.testing import shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
SIZE = (9, 10, 7)


def torch_block(block, x):
    """The same block, with the weights in torch's shapes and the tokens in one row."""
    import torch

    w = {name: torch.tensor(a) for name, a in block.state_dict(numpy=True).items()}
    linear, norm = torch.nn.functional.linear, torch.nn.functional.layer_norm

    def attention(y):
        n, s, c = y.shape
        heads = [
            linear(y, w[f"attention.{a}.weight"], w[f"attention.{a}.bias"]).reshape(n, s, 3, c // 3).transpose(1, 2)
            for a in "qkv"
        ]
        y = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(n, s, c)
        return linear(y, w["attention.o.weight"], w["attention.o.bias"])

    def mlp(y):
        y = torch.nn.functional.gelu(linear(y, w["mlp.up.weight"], w["mlp.up.bias"]))
        return linear(y, w["mlp.down.weight"], w["mlp.down.bias"])

    flat = x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3], x.shape[4])
    flat = flat + attention(norm(flat, flat.shape[-1:], w["norm1.weight"], w["norm1.bias"]))
    return (flat + mlp(norm(flat, flat.shape[-1:], w["norm2.weight"], w["norm2.bias"]))).reshape(x.shape)


@pytest.mark.parametrize("context", ["ring", "all_to_all", "gather"])
def test_a_block_equals_torch_on_a_split_grid(context):
    torch = pytest.importorskip("torch")
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        block = Block(width=12, heads=3, hidden=10, dropout=0.0)
        for p in block.parameters():
            nn.init.normal_(p, std=0.4)
    block.attention.context = context
    array = np.random.default_rng(0).standard_normal((2, 5, 3, 2, 12))
    x = hp.tensor(array, mesh, L(None, "depth"), requires_grad=True)
    twin = torch.tensor(array, requires_grad=True)
    y, wanted = block(x), torch_block(block, twin)
    np.testing.assert_allclose(y.numpy(), wanted.detach().numpy(), rtol=1e-11, atol=1e-12)
    (y * y).sum().backward()
    (wanted * wanted).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), twin.grad.numpy(), rtol=1e-9, atol=1e-10)


NETWORKS = {
    "voxels": {"classes": 3, "heads": 2},
    "refined": {"classes": 3, "heads": 3, "refine": 4},
    "learned": {"classes": 3, "heads": 4, "positions": "learned", "size": SIZE},
    "numbers": {"outputs": 2, "heads": 4},
}


@pytest.fixture
def network(volume_network, volumes):
    def make(name, count=3):
        x, target = volumes(count, SIZE, 3)
        if "outputs" in NETWORKS[name]:
            target = np.stack([x.mean((1, 2, 3, 4)), x.std((1, 2, 3, 4))], axis=1)
        options = {"width": 12, "depth": 2, "patch": (2, 4, 4), "mlp_ratio": 1.5, **NETWORKS[name]}
        return volume_network(lambda: ViT3d(1, **options), x, target)

    return make


@pytest.mark.parametrize("name", NETWORKS)
def test_result_and_gradients_are_those_of_one_rank(network, name, axes):
    network(name).compare(axes)


@pytest.mark.parametrize("name", ["refined", "numbers"])
def test_twenty_steps_are_those_of_one_rank(network, name, axes):
    network(name).compare_training(axes)


def test_a_sample_that_some_ranks_have_nothing_of(network, axes):
    network("voxels", count=1).compare(axes)


def test_the_checked_mode_finds_nothing_to_object_to(network, axes):
    mesh = hp.Mesh(**axes)
    with hp.checked() as check:
        network("refined").pass_through(mesh)
    assert len(check.log) > 100
    mesh.free()


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
