"""Modules of the rarer spatial operations: names, arguments and results as in torch."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.testing import assert_close_everywhere, shared_mesh

RANKS = MPI.COMM_WORLD.Get_size()
CASES = [
    ("ConstantPad2d", ((1, 2, 0, 3), 1.5), (2, 3, 5, 6)),
    ("ZeroPad1d", (2,), (2, 3, 5)),
    ("ReflectionPad2d", ((1, 2, 3, 0),), (2, 3, 5, 6)),
    ("ReplicationPad3d", (2,), (2, 3, 4, 5, 3)),
    ("CircularPad1d", ((3, 1),), (2, 3, 5)),
    ("AdaptiveMaxPool2d", ((3, None),), (2, 3, 5, 6)),
    ("LPPool2d", (2, 3, 2), (2, 3, 7, 6)),
    ("LPPool1d", (2, 3), (2, 3, 7)),
    ("PixelShuffle", (2,), (2, 4, 5, 3)),
    ("PixelUnshuffle", (2,), (2, 1, 6, 4)),
    ("LocalResponseNorm", (3, 0.5), (2, 5, 6)),
    ("RMSNorm", (6, 1e-6), (2, 5, 6)),
    ("MaxPool2d", (3, 2, 1, 1, False, True), (2, 3, 8, 6)),
]


@pytest.mark.parametrize(("name", "arguments", "shape"), CASES, ids=[c[0] for c in CASES])
def test_modules_equal_those_of_torch_under_a_split(name, arguments, shape):
    torch = pytest.importorskip("torch")
    mesh = shared_mesh(height=RANKS)
    with mesh, nn.default_dtype(np.float32):
        module = getattr(nn, name)(*arguments)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y = module(hp.tensor(x, mesh, hp.Layout(None, None, "height")))
    twin = getattr(torch.nn, name)(*arguments)
    assert_close_everywhere(mesh.world, y.numpy(), twin(torch.tensor(x)).detach().numpy())
    assert set(module.state_dict()) == set(twin.state_dict())


def test_pooling_and_unpooling_modules_fit_together():
    mesh = shared_mesh(height=RANKS)
    x = hp.tensor(np.arange(1.0, 31).reshape(1, 1, 5, 6), mesh, hp.Layout(None, None, "height"))
    y, index = nn.MaxPool2d(2, return_indices=True)(x)
    back = nn.MaxUnpool2d(2)(y, index, x.shape).numpy()
    assert back.sum() == y.numpy().sum() and back[0, 0, 1, 1] == 8.0


def test_padding_has_one_width_an_end():
    with pytest.raises(ValueError, match="ReflectionPad2d"):
        nn.ReflectionPad2d((1, 2, 3))
    assert repr(nn.ConstantPad1d(2, 1.0)) == "ConstantPad1d(padding=(2, 2), value=1.0)"
    assert "(N, C, D, H, W)" in nn.CircularPad3d.__doc__
