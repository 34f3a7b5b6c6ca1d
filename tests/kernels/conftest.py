"""What the kernel tests share: every implementation of a family, and arrays in awkward memory orders."""

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels.registry import PREFERENCE


def pytest_generate_tests(metafunc):
    """A test that asks for ``implementation`` runs by each one of the module's FAMILY."""
    if "implementation" in metafunc.fixturenames:
        family = metafunc.module.FAMILY
        metafunc.parametrize("implementation", [(family, name) for name in PREFERENCE[family]], indirect=True,
                             ids=PREFERENCE[family])


@pytest.fixture
def implementation(request):
    """The name of the implementation by which the test runs; skipped where its library is not installed."""
    family, name = request.param
    if name != "numpy" and not kernels.available(name):
        pytest.skip(f"{name} is not available")
    with kernels.use(**{family: name}):
        yield name


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.fixture
def arrange():
    """``arrange(a, how)``: a in another memory order, channels "last", "first", "gaps" (strided) or "reversed"."""
    def arranged(a, how):
        if how == "last":
            return kernels.to_channels_last(a)
        if how == "first":
            return np.ascontiguousarray(a)
        if how == "gaps":
            room = np.full(tuple(2 * n + 1 for n in a.shape), np.asarray(77, a.dtype))
            view = room[tuple(slice(1, 2 * n + 1, 2) for n in a.shape)]
            view[...] = a
            return view
        return np.ascontiguousarray(a[::-1, :, ::-1])[::-1, :, ::-1]

    return arranged
