"""Optimizer steps against torch's optimizers, in every memory order; buckets of arrays."""

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "optimizer"
SHAPES = [(5, 3, 3, 3), (70000,), (1,), (), (0, 4), (300, 257)]
pytestmark = pytest.mark.serial


def run(torch, make, step, state, shape, dtype, rng, arrange, steps=4):
    """Four steps by torch and by ours from one start; returns the largest difference, relative."""
    start = rng.standard_normal(shape)
    weight = torch.nn.Parameter(torch.tensor(start.astype(dtype)))
    optimizer = make([weight])
    p = np.array(start.astype(dtype))
    p = arrange(p, "last") if p.ndim > 2 else p
    extra = [np.zeros_like(p) for _ in range(state)]
    for i in range(steps):
        g = rng.standard_normal(shape).astype(dtype)
        weight.grad = torch.tensor(g)
        optimizer.step()
        step(p, g * np.asarray(4, dtype), extra, i)
    got = weight.detach().numpy()
    return np.abs(p - got).max(initial=0) / (1 + np.abs(got).max(initial=0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 1e-6)])
def test_sgd_equals_torch(implementation, arrange, rng, shape, dtype, tolerance):
    torch = pytest.importorskip("torch")
    for momentum, dampening, nesterov, decay in ((0, 0, False, 0), (0.9, 0, False, 0.1), (0.9, 0.3, False, 0),
                                                 (0.8, 0, True, 0.01), (0, 0, False, 0.5)):
        def step(p, g, extra, i, m=momentum, d=dampening, n=nesterov, w=decay):
            kernels.sgd_step(p, g, extra[0] if m else None, 0.1, m, d, w, n, first=i == 0, grad_scale=0.25)

        def make(weights, m=momentum, d=dampening, n=nesterov, w=decay):
            return torch.optim.SGD(weights, 0.1, momentum=m, dampening=d, nesterov=n, weight_decay=w)

        assert run(torch, make, step, 1, shape, dtype, rng, arrange) <= tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 2e-6)])
def test_adam_equals_torch(implementation, arrange, rng, name, shape, amsgrad, dtype, tolerance):
    torch = pytest.importorskip("torch")
    ours = kernels.adam_step if name == "Adam" else kernels.adamw_step

    def step(p, g, extra, i):
        ours(p, g, extra[0], extra[1], i + 1, 0.01, 0.8, 0.95, 1e-6, 0.1, vmax=extra[2] if amsgrad else None,
             grad_scale=0.25)

    def make(weights):
        return getattr(torch.optim, name)(weights, 0.01, (0.8, 0.95), 1e-6, 0.1, amsgrad=amsgrad)

    assert run(torch, make, step, 3, shape, dtype, rng, arrange) <= tolerance


def test_the_gradient_is_not_changed(implementation, rng):
    p, g, m, v = (rng.random((40, 50)).astype(np.float32) for _ in range(4))
    kept = g.copy()
    kernels.sgd_step(p, g, m, 0.1, 0.9, weight_decay=0.1, nesterov=True, first=True)
    kernels.sgd_step(p, g, m, 0.1, 0.9, weight_decay=0.1, nesterov=True)
    kernels.adam_step(p, g, m, v, 1, 0.1, weight_decay=0.1)
    kernels.adamw_step(p, g, m, v, 2, 0.1, grad_scale=0.5)
    np.testing.assert_array_equal(g, kept)


def test_add_into_adds_across_memory_orders(implementation, arrange, rng):
    for how in ("last", "first", "gaps"):
        for other in ("last", "first", "gaps"):
            a, b = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((2, 3, 4, 5))
            moved = arrange(a.copy(), how)
            kernels.add_into(moved, arrange(b, other))
            np.testing.assert_array_equal(moved, a + b)


def test_buckets_carry_arrays_in_memory_order_there_and_back(arrange, rng):
    arrays = [rng.standard_normal((2, 3, 4)), arrange(rng.standard_normal((2, 3, 4, 5)), "last"), np.array(3.0),
              np.empty((0, 2)), rng.standard_normal(7)]
    buffer = np.empty(sum(a.size for a in arrays))
    kernels.pack(arrays, buffer)
    np.testing.assert_array_equal(buffer[24:144], arrays[1].transpose(0, 2, 3, 1).ravel())
    copies = [np.zeros_like(a) for a in arrays]
    kernels.unpack(buffer, copies)
    for a, b in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="1-D"):
        kernels.pack(arrays, buffer[1:])
    with pytest.raises(ValueError, match="gaps"):
        kernels.pack([arrange(np.ones((2, 2, 2)), "gaps")], np.empty(8))
