"""Activations and their gradients against torch; memory order, not-a-number and infinities."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "elementwise"
EDGES = [0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 0.4687, 4, -4, 30, -30, 87, -87, 104, -104, 1e30, -1e30]
pytestmark = pytest.mark.serial


@pytest.fixture
def x(rng):
    values = rng.standard_normal((2, 5, 9, 7, 5)) * 3
    values.flat[:len(EDGES)] = EDGES
    return values


def pairs(torch):
    """name, torch's function, ours, our gradient, whether the gradient takes the output."""
    f = torch.nn.functional
    return [
        ("relu", torch.relu, kernels.leaky_relu, kernels.leaky_relu_backward, False),
        ("leaky", lambda a: f.leaky_relu(a, 0.3), lambda a: kernels.leaky_relu(a, 0.3),
         lambda g, a: kernels.leaky_relu_backward(g, a, 0.3), True),
        ("steep", lambda a: f.leaky_relu(a, 1.5), lambda a: kernels.leaky_relu(a, 1.5),
         lambda g, a: kernels.leaky_relu_backward(g, a, 1.5), False),
        ("gelu", f.gelu, kernels.gelu, kernels.gelu_backward, False),
        ("gelu tanh", lambda a: f.gelu(a, approximate="tanh"), lambda a: kernels.gelu(a, True),
         lambda g, a: kernels.gelu_backward(g, a, True), False),
        ("silu", f.silu, kernels.silu, kernels.silu_backward, False),
        ("sigmoid", torch.sigmoid, kernels.sigmoid, kernels.sigmoid_backward, True),
        ("tanh", torch.tanh, kernels.tanh, kernels.tanh_backward, True),
    ]


@pytest.mark.parametrize("how", ["last", "first", "gaps"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 2e-15), (np.float32, 2e-6)])
def test_activations_and_gradients_equal_torch(implementation, arrange, rng, x, how, dtype, tolerance):
    torch = pytest.importorskip("torch")
    g = rng.standard_normal(x.shape)
    for name, reference, ours, backward, takes_output in pairs(torch):
        exact = torch.tensor(x.astype(dtype).astype(np.float64), requires_grad=True)
        want = reference(exact)
        want.backward(torch.tensor(g.astype(dtype).astype(np.float64)))
        moved = arrange(x.astype(dtype), how)
        with np.errstate(over="ignore", invalid="ignore"):
            y = ours(moved)
            dx = backward(arrange(g.astype(dtype), how), y if takes_output else moved)
        for got, right in ((y, want.detach()), (dx, exact.grad)):
            assert got.dtype == dtype and got.shape == x.shape, name
            bounded = np.isfinite(got)  # the cube in the tanh form overflows at 1e30
            assert bounded.sum() >= x.size - 2, name
            np.testing.assert_allclose(got[bounded], right.numpy()[bounded], rtol=4 * tolerance, atol=4 * tolerance,
                                       err_msg=name)


def test_results_keep_the_memory_order(implementation, arrange, x):
    for how in ("last", "first"):
        moved = arrange(x.astype(np.float32), how)
        for y in (kernels.leaky_relu(moved), kernels.leaky_relu(moved, 0.1), kernels.gelu(moved), kernels.silu(moved),
                  kernels.leaky_relu_backward(moved, moved, 0.1), kernels.gelu_backward(moved, moved)):
            assert y.strides == moved.strides


def test_operands_of_different_memory_orders_agree(implementation, arrange, x):
    g, y = x.astype(np.float32), x[::-1].astype(np.float32)
    want = np.where(y > 0, g, np.float32(0.2) * g)
    for first in ("last", "first", "gaps"):
        for second in ("last", "first", "gaps"):
            np.testing.assert_array_equal(
                kernels.leaky_relu_backward(arrange(g, first), arrange(y, second), 0.2), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_not_a_number_stays_one(implementation, dtype):
    x = np.array([np.nan, 1, -1, np.inf, -np.inf], dtype)
    with np.errstate(invalid="ignore"):
        for call in (kernels.leaky_relu, kernels.gelu, kernels.silu, kernels.sigmoid, kernels.tanh,
                     lambda a: kernels.leaky_relu(a, 0.1)):
            y = call(x)
            assert np.isnan(y[0]) and np.isfinite(y[1:3]).all()
        assert kernels.leaky_relu(x).tolist()[3:] == [np.inf, 0]
        assert kernels.sigmoid(x).tolist()[3:] == [1, 0]


def test_out_may_be_the_input(implementation, x):
    y = x.astype(np.float32)
    want = kernels.leaky_relu(y, 0.1)
    assert kernels.leaky_relu(y, 0.1, out=y) is y
    np.testing.assert_array_equal(y, want)


def test_mask_drops_even_not_a_number(implementation, rng):
    x = np.array([np.nan, 2, 3, np.inf], np.float32).reshape(1, 1, 4)
    y = kernels.apply_mask(x, np.array([False, True, False, False]).reshape(1, 1, 4), 1.25)
    assert y.tolist() == [[[0, 2.5, 0, 0]]] and y.dtype == np.float32
    wide = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    mask = rng.random(wide.shape) < 0.5
    np.testing.assert_array_equal(kernels.apply_mask(kernels.to_channels_last(wide), mask, 2.0),
                                  np.where(mask, wide * 2, 0))


def test_empty_arrays_pass(implementation):
    x = np.empty((2, 0, 3), np.float32)
    for call in (kernels.leaky_relu, kernels.gelu, kernels.silu, kernels.sigmoid, kernels.tanh):
        assert call(x).shape == x.shape
    assert kernels.gelu_backward(x, x).shape == kernels.leaky_relu_backward(x, x, 0.1).shape == x.shape


def test_erf_is_accurate_to_the_last_places():
    torch = pytest.importorskip("torch")
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.46875, -0.46875, 1e-300, np.inf, -np.inf]])
    np.testing.assert_allclose(kernels.erf(x), torch.erf(torch.tensor(x)).numpy(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("how", ["last", "first", "gaps"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 2e-15), (np.float32, 2e-6)])
def test_gated_activation_and_both_gradients_equal_torch(implementation, arrange, rng, how, dtype, tolerance):
    torch = pytest.importorskip("torch")
    gate, up, g = (rng.standard_normal((2, 5, 9, 7)).astype(dtype) for _ in range(3))
    exact = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (gate, up)]
    want = torch.nn.functional.silu(exact[0]) * exact[1]
    want.backward(torch.tensor(g.astype(np.float64)))
    moved = arrange(gate, how)
    got = kernels.swiglu(moved, up), *kernels.swiglu_backward(g, moved, up)
    for ours, right in zip(got, (want.detach(), *(a.grad for a in exact)), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, right.numpy(), rtol=8 * tolerance, atol=8 * tolerance)
