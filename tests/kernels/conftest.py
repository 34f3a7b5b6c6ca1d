"""What the kernel tests share: every implementation of a family, and arrays in awkward memory orders."""

import ctypes
import subprocess

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels.gpu import launch as launcher
from hpcpar.kernels.registry import PREFERENCE

AS_ONE_THREAD = r"""
#include <cmath>
using namespace std;
#define __global__
#define __device__
struct Dim { unsigned x; };
static Dim blockIdx = {0}, blockDim = {1}, gridDim = {1}, threadIdx = {0};
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
"""
KINDS = {float: ctypes.c_double, np.float32: ctypes.c_float, np.float64: ctypes.c_double, np.int64: ctypes.c_longlong,
         np.uint64: ctypes.c_ulonglong}


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


@pytest.fixture(params=["native", "float32"])
def instructions(request, monkeypatch):
    """Products by instructions for bfloat16, or for float32 of numbers rounded before."""
    missing = kernels.bfloat16_missing()
    if missing:
        pytest.skip(f"no bfloat16 compute: {missing}")
    from hpcpar.kernels.cpu.onednn.library import load

    monkeypatch.setitem(load().__dict__, "bfloat16_by_float32", request.param == "float32")
    return request.param


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


@pytest.fixture
def cuda_on_this_cpu(tmp_path_factory, monkeypatch):
    """CUDA sources are compiled as C++, once a session, and run by one thread."""
    folder = tmp_path_factory.getbasetemp() / "sources"
    folder.mkdir(exist_ok=True)

    class Module:
        def __init__(self, source, kind):
            path = folder / f"{abs(hash(source))}{kind}.so"
            if not path.exists():
                path.with_suffix(".cpp").write_text(AS_ONE_THREAD + launcher.code(source, kind))
                subprocess.run(["g++", "-O1", "-std=c++14", "-shared", "-fPIC", "-o", path, path.with_suffix(".cpp")],
                               check=True, timeout=120)
            self.library = ctypes.CDLL(str(path))

        def get_function(self, name):
            def run(grid, block, arguments):
                assert grid[0] >= 1 and block == (launcher.THREADS,)
                getattr(self.library, name)(*(
                    ctypes.c_void_p(a.__array_interface__["data"][0]) if isinstance(a, np.ndarray)
                    else KINDS[type(a)](a) for a in arguments))
            return run

    monkeypatch.setattr(launcher, "module", Module)
