"""Layer and RMS normalisation over split rows: exact, stable far from zero, one message each way."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout
from hpcpar.ops.layer_norm import layer_norm
from hpcpar.ops.norm_rows import rms_norm
from hpcpar.testing import assert_close_everywhere, compare_with_serial, draw_layout, draw_mesh, run_cases
from hpcpar.transport import counter


@pytest.fixture
def mesh(comm):
    with hp.Mesh(comm, model=-1, batch=1) as mesh:
        yield mesh
    mesh.free()


def reference(x, dims, eps=1e-5):
    axes = tuple(range(-dims, 0))
    mean = x.mean(axes, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + eps)


@pytest.mark.parametrize("shape", [(3, 7), (3, 1), (2, 5, 3), (0, 4)])
def test_rows_split_unevenly_or_not_at_all(mesh, shape):
    x = np.random.default_rng(1).standard_normal(shape)
    for layout in (Layout(), Layout("model"), Layout(*[None] * (len(shape) - 1), "model")):
        y = layer_norm(hp.tensor(x, layout=layout), shape[-1])
        assert y.layout == layout.on(shape, mesh.shape)
        assert_close_everywhere(mesh.world, y.numpy(), reference(x, 1), 1e-12)


def test_small_differences_far_from_zero_survive_in_float32(mesh):
    rows = 1e4 + np.random.default_rng(1).standard_normal((4, 64))
    x = rows.astype(np.float32)
    y = layer_norm(hp.tensor(x, layout=Layout(None, "model")), 64).numpy()
    assert np.abs(y - reference(x.astype(np.float64), 1)).max() < 2e-5


def test_one_message_forward_and_one_backward(mesh):
    x = hp.tensor(np.random.default_rng(1).standard_normal((6, 8)), layout=Layout(None, "model"), requires_grad=True)
    weight = hp.tensor(np.ones(8), layout=Layout("model"), requires_grad=True)
    with counter.counting() as forward:
        y = layer_norm(x, (8,), weight)
    g = hp.tensor(np.ones((6, 8)), layout=y.layout)
    with counter.counting() as backward:
        y.backward(g)
    if mesh.size == 1:
        assert not forward and not backward
    else:
        assert [t.messages for t in forward.values()] == [1]
        assert {key[0]: t.messages for key, t in backward.items()} == {"all_reduce": 1}
        assert backward["all_reduce", "model"].bytes == pytest.approx(2 * (mesh.size - 1) / mesh.size * 2 * 6 * 8)
    assert weight.grad.layout == weight.layout


def test_wrong_shapes_are_named(mesh):
    x = hp.tensor(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"layer_norm over \(4,\): x has shape \(2, 3\)"):
        layer_norm(x, 4)
    with pytest.raises(ValueError, match=r"the bias has shape \(2,\)"):
        layer_norm(x, 3, hp.tensor(np.ones(3)), hp.tensor(np.ones(2)))


def test_rms_norm_sends_one_word_a_row_each_way(mesh):
    rng = np.random.default_rng(1)
    x = hp.tensor(rng.standard_normal((6, 8)), layout=Layout(None, "model"), requires_grad=True)
    weight = hp.tensor(np.ones(8), layout=Layout("model"), requires_grad=True)
    with counter.counting() as forward:
        y = rms_norm(x, (8,), weight)
    g = hp.tensor(rng.standard_normal((6, 8)), layout=y.layout)
    with counter.counting() as backward:
        y.backward(g)
    for sent in (forward, backward):
        if mesh.size == 1:
            assert not sent
        else:
            assert {key[0]: t.messages for key, t in sent.items()} == {"all_reduce": 1}
            assert sent["all_reduce", "model"].bytes == pytest.approx(2 * (mesh.size - 1) / mesh.size * 6 * 8)
    assert weight.grad.layout == weight.layout


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_modules_over_split_tokens_and_split_features_equal_torch(comm, name):
    torch = pytest.importorskip("torch", reason="torch is the oracle")

    def case(rng):
        mesh = draw_mesh(rng, ("a", "b"))
        shape = [(3, 5, 7), (2, 1, 3), (0, 4, 2), (4, 1, 2)][rng.integers(4)]
        with mesh, hp.nn.default_dtype("float64"):
            module = getattr(hp.nn, name)(shape[-1], eps=1e-6)
        twin = getattr(torch.nn, name)(shape[-1], eps=1e-6, dtype=torch.float64)
        names = list(module.state_dict())
        own = [rng.standard_normal(shape[-1]) for _ in names]
        layouts = [draw_layout(rng, shape, mesh, partial=True), *[draw_layout(rng, a.shape, mesh) for a in own]]

        def ours(x, *values):
            for key, value in zip(names, values, strict=True):
                module.register_parameter(key, value)
            return module(x)

        def theirs(x, *values):
            return torch.func.functional_call(twin, dict(zip(names, values, strict=True)), x)

        arrays = [rng.standard_normal(shape) + 3, *own]
        compare_with_serial(ours, theirs, arrays, mesh, layouts, parameters=range(1, len(arrays)), tolerance=1e-9)

    assert run_cases(case, 25, seed=51).accepted > 10


def test_float32_rows_keep_no_array_but_the_input_and_the_result(mesh):
    x = hp.tensor(np.ones((4, 6), np.float32), requires_grad=True)
    for norm in (layer_norm, rms_norm):
        rows, *statistics = norm(x, (6,)).node.saved
        assert np.shares_memory(rows, x.shard)
        assert all(s is None or np.size(s) <= 4 for s in statistics)
