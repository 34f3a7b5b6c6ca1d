"""The choice of implementations, its overrides and its report."""

import subprocess
import sys

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels import registry

pytestmark = pytest.mark.serial


def python(code, **environment):
    import os

    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=120, check=False)


def test_every_family_is_described_by_an_implementation_that_exists():
    rows = kernels.describe()
    assert [row["family"] for row in rows] == list(registry.PREFERENCE)
    for row in rows:
        assert row["implementation"] in registry.PREFERENCE[row["family"]] and row["version"]
        better = registry.PREFERENCE[row["family"]].index(row["implementation"])
        assert bool(row["note"]) == bool(better)


def test_every_operation_has_a_family_and_the_reference_is_asked_last():
    for name, (family, reference) in registry.OPERATIONS.items():
        assert family in registry.PREFERENCE
        assert registry._resolve(name, registry._State.host)[-1] is reference
        assert getattr(kernels, name).__doc__ == reference.__doc__


def test_use_chooses_for_a_while_and_restores_also_after_an_error():
    before = registry.preferences()
    with kernels.use(all="numpy"):
        assert all(order == ("numpy",) for order in registry.preferences().values())
        assert {row["implementation"] for row in kernels.describe()} == {"numpy"}
    assert registry.preferences() == before
    with pytest.raises(KeyError), kernels.use(conv="numpy"):
        raise KeyError
    assert registry.preferences() == before


@pytest.mark.parametrize(("families", "message"), [
    ({"convolution": "numpy"}, "no family"), ({"conv": "mkl"}, "no implementation 'mkl'"),
    ({"conv": "numba"}, "no implementation 'numba'"), ({"all": "mkl"}, "no implementation 'mkl'"),
])
def test_unknown_names_are_refused(families, message):
    with pytest.raises(ValueError, match=message), kernels.use(**families):
        pass


def test_the_environment_chooses_and_mistakes_in_it_are_named():
    show = "from hpcpar import kernels; print({r['family']: r['implementation'] for r in kernels.describe()}['conv'])"
    assert python(show, HPCPAR_KERNELS="conv=numpy").stdout.strip() == "numpy"
    for text, message in (("conv", "family=implementation"), ("conf=numpy", "no family"), ("conv=x", "no implem")):
        wrong = python(show, HPCPAR_KERNELS=text)
        assert wrong.returncode and message in wrong.stderr and "HPCPAR_KERNELS" in wrong.stderr


def test_a_missing_library_is_named_once_and_numpy_computes():
    code = """
import warnings, numpy as np
from hpcpar import kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        x = np.ones((1, 1, 4), np.float32)
        y = kernels.conv_forward(x, np.ones((1, 1, 2), np.float32), None, (1,), ((0, 0),), (1,), 1)
        kernels.conv_backward_data(y, np.ones((1, 1, 2), np.float32), x.shape, (1,), ((0, 0),), (1,), 1)
assert y.tolist() == [[[2, 2, 2]]]
print(len(caught), caught[0].category.__name__, caught[0].message)
print([r["note"] for r in kernels.describe() if r["family"] == "conv"])
try:
    kernels.use(conv="onednn").__enter__()
except RuntimeError as error:
    print("refused:", error)
"""
    done = python(code, HPCPAR_ONEDNN_LIB="/nowhere/libdnnl.so.3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 KernelWarning") and done.stdout.count("/nowhere/libdnnl.so.3") >= 3
    assert "refused: kernels.use(conv='onednn')" in done.stdout


@pytest.mark.skipif(not kernels.available("onednn"), reason="oneDNN is not available")
def test_the_library_named_by_the_variable_is_the_one_loaded_and_others_are_told_apart(tmp_path):
    path = next(row["library"] for row in kernels.describe() if row["implementation"] == "onednn")
    other = tmp_path / "libother.so.3"
    other.symlink_to(path)
    show = "from hpcpar import kernels; print(kernels.describe()[0]['library'], kernels.describe()[0]['note'])"
    assert python(show, HPCPAR_ONEDNN_LIB=str(other)).stdout.startswith(str(other))
    broken = tmp_path / "libdnnl.so.3"
    broken.write_text("no library")
    assert str(broken) in python(show, HPCPAR_ONEDNN_LIB=str(broken)).stdout.partition("not available")[2]


def test_importing_the_kernels_loads_no_optional_library():
    code = "import sys, hpcpar.kernels; print([m for m in ('numba', 'scipy', 'cupy', 'h5py', 'torch') " \
           "if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_malloc_is_left_alone_on_request():
    code = "from hpcpar.kernels import memory; print(memory.malloc)"
    assert "HPCPAR_MALLOC=0" in python(code, HPCPAR_MALLOC="0").stdout
    if sys.platform == "linux" and "glibc" in str(sys.implementation) + "".join(__import__("platform").libc_ver()):
        assert "raised" in python(code, HPCPAR_MALLOC="").stdout


def test_keyword_calls_reach_the_kernels():
    x = np.array([-1.0, 2.0])
    assert kernels.leaky_relu(x=x, slope=0.5).tolist() == [-0.5, 2]
