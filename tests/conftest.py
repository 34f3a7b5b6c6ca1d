"""Every test runs serially and under mpiexec with 2, 3 and 4 ranks; the plugin keeps the ranks in step."""

import sys

import pytest

import hpcpar as hp

pytest_plugins = ["hpcpar.testing.plugin"]

MESHES = ("data", "model", "data x model")


@pytest.fixture(params=MESHES)
def training_mesh(request, comm):
    """All ranks as a batch axis, as a model axis, as both (depth is there to be split by hand)."""
    size = comm.Get_size()
    batch = {"data": size, "model": 1, "data x model": size // 2 if size % 2 == 0 else 1}[request.param]
    with hp.Mesh(comm, batch=batch, model=size // batch, depth=1) as mesh:
        yield mesh
    mesh.free()


@pytest.fixture
def alike():
    """Everything starts alike on all ranks, in float64."""
    hp.manual_seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    with hp.nn.default_dtype("float64"):
        yield
