"""Meshes for modules, and the comparison of a module with its twin in torch."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.testing import assert_close_everywhere


@pytest.fixture
def mesh(training_mesh):
    """All ranks as a batch axis, as a model axis, as both."""
    return training_mesh


@pytest.fixture
def space(comm):
    """All ranks along depth."""
    with hp.Mesh(comm, batch=1, depth=comm.Get_size(), model=1) as mesh:
        yield mesh
    mesh.free()


def adopt(module, twin):
    """Give the module the weights of its twin."""
    module.load_state_dict(twin.state_dict())


def check_twin(module, twin, x, layout, seed=0):
    """Compare output, gradient of the input and gradients of all parameters, and buffers, with torch in float64."""
    torch = pytest.importorskip("torch")
    mesh = hp.current_mesh()
    ours = hp.tensor(x, layout=layout, requires_grad=True)
    theirs = torch.tensor(x, requires_grad=True)
    y, expected = module(ours), twin(theirs)
    assert y.shape == tuple(expected.shape)
    handle = mesh.world
    assert_close_everywhere(handle, y.numpy(), expected.detach().numpy(), 1e-12, "output")
    weights = np.random.default_rng(seed).standard_normal(y.shape)
    (y * hp.tensor(weights)).sum().backward()
    (expected * torch.tensor(weights)).sum().backward()
    assert_close_everywhere(handle, ours.grad.numpy(), theirs.grad.numpy(), 1e-11, "gradient of the input")
    for (name, parameter), (other, wanted) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        got = parameter.grad.numpy().reshape(wanted.shape)
        assert_close_everywhere(handle, got, wanted.grad.numpy(), 1e-11, f"gradient of {name}")
    values = module.state_dict(numpy=True)
    for name, wanted in twin.state_dict().items():
        assert_close_everywhere(handle, values[name], wanted.numpy(), 1e-12, name)


@pytest.fixture(name="adopt")
def adopt_fixture():
    return adopt


@pytest.fixture(name="check_twin")
def check_twin_fixture():
    return check_twin


@pytest.fixture(autouse=True)
def in_float64(alike):
    """Twins start alike on all ranks; modules are made in float64."""
