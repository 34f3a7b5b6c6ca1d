"""Meshes for optimizers."""

import sys

import pytest

import hpcpar as hp

MESHES = ("data", "model", "data x model")


@pytest.fixture(params=MESHES)
def mesh(request, comm):
    """All ranks as a batch axis, as a model axis, as both."""
    size = comm.Get_size()
    batch = {"data": size, "model": 1, "data x model": size // 2 if size % 2 == 0 else 1}[request.param]
    with hp.Mesh(comm, batch=batch, model=size // batch) as mesh:
        yield mesh
    mesh.free()


@pytest.fixture(autouse=True)
def alike():
    """Everything starts alike on all ranks, in float64."""
    hp.manual_seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    with hp.nn.default_dtype("float64"):
        yield
