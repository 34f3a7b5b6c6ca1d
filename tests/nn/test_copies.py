"""Deep copies of models, as a teacher or an average of weights needs them: own memory, same mesh, same training."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import nn

VOLUME = hp.Layout("batch", None, "depth")


@pytest.fixture
def mesh(comm):
    size = comm.Get_size()
    batch = 2 if size % 2 == 0 else 1
    mesh = hp.Mesh(comm=comm, batch=batch, depth=size // batch)
    with mesh, nn.default_dtype("float64"):
        hp.manual_seed(0)
        yield mesh
    mesh.free()


def network() -> nn.Sequential:
    first = nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(first, nn.BatchNorm3d(2), nn.ReLU(), nn.Conv3d(2, 2, 3, padding=1), nn.AvgPool3d(2))
    model.add_module("again", model[0])  # one layer under two names
    return model


def train(model, optimizer, steps):
    sync = hp.parallel.GradientSync(model)
    x = hp.tensor(np.random.default_rng(1).standard_normal((2, 2, 7, 4, 4)), layout=VOLUME)
    losses = []
    for _ in range(steps):
        loss = (model(x) ** 2).mean().resolve()
        sync.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) < steps:
            optimizer.zero_grad()
    sync.close()
    return losses


def values(model):
    return {name: t.numpy() for name, t in (*model.named_parameters(), *model.named_buffers())}


def test_a_copied_model_has_its_own_memory_and_goes_on_as_the_original(mesh):
    model = network()
    optimizer = hp.optim.AdamW(model, lr=1e-2)
    train(model, optimizer, 2)
    sync = hp.parallel.GradientSync(model)  # its hooks are not those of the copy
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert twin.again is twin[0] and twin.again is not model.again and twin[0].weight.mesh is mesh
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert theirs.name == ours.name and theirs.sig is ours.sig and theirs.hooks is None, name
        assert theirs.shard.strides == ours.shard.strides and not np.shares_memory(theirs.shard, ours.shard), name
        np.testing.assert_array_equal(theirs.grad.shard, ours.grad.shard)
        assert not np.shares_memory(theirs.grad.shard, ours.grad.shard)
    before = values(model)
    its_optimizer.zero_grad()
    losses = train(twin, its_optimizer, 3)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, before[name])
    sync.close()
    optimizer.zero_grad()
    assert train(model, optimizer, 3) == losses
    for name, value in values(twin).items():
        np.testing.assert_array_equal(value, values(model)[name])


def test_plans_and_frozen_parameters_are_copied_with_the_model(mesh):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    split, overlap = hp.Layout("depth"), ("gather", "reduce", "scatter")
    place = hp.Placement(hp.Layout("batch"), hp.Layout("batch"), overlap=overlap, weight=split, bias=split)
    hp.parallelize(model, {"0": place, "2": place})
    model[2].requires_grad_(False)
    twin = copy.deepcopy(model)
    assert repr(twin) == repr(model) and not twin[2].weight.requires_grad and twin[0].weight.requires_grad
    assert twin[0].weight.overlap == model[0].weight.overlap == set(overlap)
    assert twin[0].weight.ahead is twin[2].weight.ahead is not model[0].weight.ahead
    x = hp.tensor(np.random.default_rng(2).standard_normal((3, 4)), layout=hp.Layout("batch"), requires_grad=True)
    gradients = []
    for net in (model, twin, twin):
        net.zero_grad()
        y = net(x)
        (y * y).mean().backward()
        gradients.append(net[0].weight.grad.numpy())
        assert net[2].weight.grad is None
    np.testing.assert_array_equal(gradients[1:], [gradients[0]] * 2)


def test_what_an_operation_made_is_not_copied_and_nothing_is_pickled(mesh):
    x = hp.tensor(np.ones((2, 3)), layout=hp.Layout("batch"), requires_grad=True)
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(x * 2)
    detached = copy.deepcopy((x * 2).detach())
    np.testing.assert_array_equal(detached.numpy(), 2)
    assert not detached.requires_grad and copy.deepcopy(mesh) is mesh and copy.copy(mesh) is mesh
    for thing in (mesh, x, network()):
        with pytest.raises(TypeError, match="cannot be pickled.*state_dict"):
            pickle.dumps(thing)
