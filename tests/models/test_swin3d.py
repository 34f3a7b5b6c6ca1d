"""The Swin transformer of volumes: its block against attention that knows no windows, and the network on every mesh."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.models import Spread, Swin3d, place
from hpcpar.models.swin3d import PatchMerging, SwinBlock
from hpcpar.testing import shared_mesh
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()


def torch_block(block, x, window, shifts):
    """The same block without windows: all tokens of the grid, a pair of which is hidden if no window has both.

    Windows are those of the unrolled grid: token i of a dim is in window ``(i - shift) // w``. The bias is looked up by
    the distance of two tokens in the grid.
    """
    import torch

    w = {name: torch.tensor(a) for name, a in block.state_dict(numpy=True).items()}
    linear, norm = torch.nn.functional.linear, torch.nn.functional.layer_norm
    n, *size, c = x.shape
    heads = w["attention.bias_table"].shape[1]
    place = np.indices(size).reshape(3, int(np.prod(size)))
    away = place[:, :, None] - place[:, None, :]
    homes = [(p - s) // m for p, s, m in zip(place, shifts, window, strict=True)]
    seen = np.all([h[:, None] == h[None, :] for h in homes], axis=0)
    row = 0
    for distance, m in zip(away, block.attention.window, strict=True):
        row = row * (2 * m - 1) + np.where(seen, distance, 0) + m - 1
    bias = w["attention.bias_table"][torch.tensor(row)].permute(2, 0, 1)
    bias = bias.masked_fill(~torch.tensor(seen), -torch.inf)

    def attention(y):
        q, k, v = (
            linear(y, w[f"attention.{a}.weight"], w[f"attention.{a}.bias"])
            .reshape(n, y.shape[1], heads, c // heads)
            .transpose(1, 2)
            for a in "qkv"
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).reshape(y.shape)
        return linear(y, w["attention.o.weight"], w["attention.o.bias"])

    def mlp(y):
        y = torch.nn.functional.gelu(linear(y, w["mlp.up.weight"], w["mlp.up.bias"]))
        return linear(y, w["mlp.down.weight"], w["mlp.down.bias"])

    flat = x.reshape(n, int(np.prod(size)), c)
    flat = flat + attention(norm(flat, (c,), w["norm1.weight"], w["norm1.bias"]))
    return (flat + mlp(norm(flat, (c,), w["norm2.weight"], w["norm2.bias"]))).reshape(x.shape)


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
def test_a_block_equals_attention_that_hides_what_no_window_has(size, window, shifted, fitted, shifts):
    torch = pytest.importorskip("torch")
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        block = SwinBlock(6, 3, (window,) * 3 if isinstance(window, int) else window, shifted, 8, 0.0)
        for p in block.parameters():
            nn.init.normal_(p, std=0.5)
    assert block.attention.fitted(size) == (fitted, shifts)
    array = np.random.default_rng(0).standard_normal((2, *size, 6))
    x = hp.tensor(array, mesh, L(None, "depth"), requires_grad=True)
    twin = torch.tensor(array, requires_grad=True)
    y, wanted = block(x), torch_block(block, twin, fitted, shifts)
    np.testing.assert_allclose(y.numpy(), wanted.detach().numpy(), rtol=1e-11, atol=1e-11)
    (y * y).sum().backward()
    (wanted * wanted).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), twin.grad.numpy(), rtol=1e-9, atol=1e-9)


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


NETWORKS = {
    "even": {"size": (8, 8, 8), "patch": 2, "window": 2},
    "uneven": {"size": (9, 10, 7), "patch": (1, 2, 2), "window": 3},
    "few windows": {"size": (6, 7, 5), "patch": 2, "window": 4},
}


@pytest.fixture
def network(volume_network, volumes):
    def make(name, count=3):
        options = {"width": 4, "depths": (2, 1), "heads": (2, 2), "mlp_ratio": 1.5, "base": 3, **NETWORKS[name]}
        return volume_network(lambda: Swin3d(1, 3, **options), *volumes(count, options.pop("size"), 3))

    return make


@pytest.mark.parametrize("name", NETWORKS)
def test_result_and_gradients_are_those_of_one_rank(network, name, axes):
    network(name).compare(axes)


def test_twenty_steps_are_those_of_one_rank(network, axes):
    network("uneven", count=2).compare_training(axes)


def test_the_checked_mode_finds_nothing_to_object_to(network, axes):
    mesh = hp.Mesh(**axes)
    with hp.checked() as check:
        network("uneven").pass_through(mesh)
    assert len(check.log) > 150
    mesh.free()


@pytest.mark.ranks(min=2)
def test_only_shifted_windows_send_tokens_where_borders_agree():
    mesh = shared_mesh(depth=RANKS)
    with mesh, nn.default_dtype(np.float64):
        blocks = [SwinBlock(4, 2, (2, 2, 2), shifted, 8, 0.0) for shifted in (False, True)]
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
