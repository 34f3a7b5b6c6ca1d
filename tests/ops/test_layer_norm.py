"""Layer normalisation over split rows: exact, stable far from zero, two messages each way."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout
from hpcpar.ops.layer_norm import layer_norm
from hpcpar.testing import assert_close_everywhere
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
