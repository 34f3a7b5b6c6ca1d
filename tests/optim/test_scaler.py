"""Loss scaling: all ranks take or skip a step together, the scale is equal everywhere, and numbers are torch's."""

import math

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar import functional as F
from hpcpar.optim import SGD, AdamW, GradScaler, clip_grad_norm_
from hpcpar.parallel import GradientSync
from hpcpar.testing import assert_close_everywhere

ROWS, WIDTH = 13, 6


def network(mesh):
    """Two layers, the first split over the model axis, and their input over the batch axis."""
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 3))
    hp.parallelize(net, {"0": hp.Column("model"), "1": hp.Row("model")})
    x = np.random.default_rng(4).standard_normal((ROWS, WIDTH))
    return net, hp.tensor(x, layout=Layout("batch"))


def backward(net, x, scaler=None):
    sync = GradientSync(net)
    y = F.tanh(net(x))
    loss = (y * y).sum()
    sync.backward(loss if scaler is None else scaler.scale(loss))
    sync.close()


def weights(net):
    return {name: a.copy() for name, a in net.state_dict(numpy=True).items()}


def equal_everywhere(mesh, value):
    assert len(set(mesh.world.gather_objects(value))) == 1
    return value


@pytest.mark.parametrize("how", ["on the fly", "unscaled first", "clipped"])
def test_a_scaled_step_is_the_step_without_scaling(mesh, how):
    results = []
    for scaled in (False, True):
        hp.manual_seed(1)
        net, x = network(mesh)
        optimizer = AdamW(net, lr=0.1)
        scaler = GradScaler(2.0**10, enabled=scaled)
        for _ in range(3):
            optimizer.zero_grad()
            backward(net, x, scaler)
            if how != "on the fly":
                assert scaler.unscale_(optimizer)
            if how == "clipped":
                clip_grad_norm_(net, 0.5)
            assert scaler.step(optimizer)
            scaler.update()
        results.append(weights(net))
    for name in results[0]:
        assert_close_everywhere(mesh.world, results[1][name], results[0][name], 1e-12, name)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("unscaled", [False, True])
def test_an_infinity_on_one_rank_stops_the_step_of_all(mesh, bad, unscaled):
    net, x = network(mesh)
    optimizer, scaler = SGD(net, lr=0.1), GradScaler(1024.0)
    backward(net, x, scaler)
    before = weights(net)
    if mesh.world.rank == mesh.size - 1:
        net[1].bias.grad.shard[-1:] = bad  # replicated: the others do not see it
    if unscaled:
        assert equal_everywhere(mesh, scaler.unscale_(optimizer)) is False
    assert equal_everywhere(mesh, scaler.step(optimizer)) is False
    scaler.update()
    assert equal_everywhere(mesh, scaler.get_scale()) == 512.0
    after = weights(net)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert optimizer.steps == 0
    optimizer.zero_grad()
    backward(net, x, scaler)
    assert scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0 and optimizer.steps == 1
    assert any(not np.array_equal(a, before[name]) for name, a in weights(net).items())


def test_an_empty_shard_is_finite(mesh):
    like = hp.tensor(np.zeros((1, 3)), layout=Layout("model"))
    parameter = nn.Parameter(like.shard, like.sig)
    parameter.grad = hp.tensor(np.full((1, 3), 8.0), layout=Layout("model"))
    optimizer, scaler = SGD([("w", parameter)], lr=1.0), GradScaler(4.0)
    assert scaler.step(optimizer)
    np.testing.assert_array_equal(parameter.numpy(), np.full((1, 3), -2.0))


def test_the_scale_takes_the_course_of_torch(mesh):
    torch = pytest.importorskip("torch")
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    ours = GradScaler(64.0, 3.0, 0.25, 2)
    weight = torch.zeros(3, requires_grad=True)
    twin = torch.optim.SGD([weight], lr=1.0)
    like = hp.tensor(np.zeros(3), layout=Layout())
    parameter = nn.Parameter(like.shard, like.sig)
    optimizer = SGD([("w", parameter)], lr=1.0)
    for i, good in enumerate([True, True, False, True, False, False, True, True, True, True, True]):
        value = float(i + 1) if good else math.inf
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((3,), value)
        last = mesh.world.rank == mesh.size - 1
        parameter.grad = hp.tensor(np.full(3, float(i + 1)), layout=Layout())
        if not good and last:
            parameter.grad.shard[1] = math.inf
        theirs.step(twin)
        theirs.update()
        assert ours.step(optimizer) is good
        ours.update()
        assert equal_everywhere(mesh, ours.get_scale()) == theirs.get_scale()
        assert ours.state_dict() == theirs.state_dict()
        np.testing.assert_allclose(parameter.numpy(), weight.detach().numpy(), rtol=1e-6)


@pytest.mark.serial
def test_a_state_continues_where_it_was_saved():
    scaler = GradScaler(8.0, growth_interval=2)
    scaler._good_steps = 1
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert GradScaler(enabled=False).state_dict() == {}
    with pytest.raises(RuntimeError, match="empty"):
        other.load_state_dict({})


@pytest.mark.serial
def test_calls_out_of_order_are_refused(mesh):
    net, x = network(mesh)
    optimizer, scaler = SGD(net, lr=0.1), GradScaler()
    with pytest.raises(RuntimeError, match="call backward first"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="neither step nor unscale_"):
        scaler.update()
    backward(net, x, scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_ has been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="called twice"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step has been called"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="backoff_factor between 0 and 1"):
        GradScaler(backoff_factor=2.0)


def test_partial_gradients_are_refused(mesh):
    if mesh.shape["batch"] == 1:
        pytest.skip("nothing is partial on this mesh")
    net, x = network(mesh)
    scaler = GradScaler()
    scaler.scale(net(x).sum()).backward()
    with pytest.raises(RuntimeError, match="still partial"):
        scaler.step(SGD(net, lr=0.1))


@pytest.mark.serial
def test_the_scale_stays_a_finite_float32(mesh):
    net, x = network(mesh)
    optimizer, scaler = SGD(net, lr=0.0), GradScaler(2.0**126, growth_interval=1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(net, x, scaler)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127
