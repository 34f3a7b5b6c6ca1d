"""Compiled kernels: the cache on disk, shared by processes that start together; the vectorised scalar functions."""

import os
import subprocess
import sys

import numpy as np
import pytest

from hpcpar import kernels

pytestmark = [pytest.mark.serial,
              pytest.mark.skipif(not kernels.available("numba"), reason="numba is not available")]

PROGRAM = """
import numpy as np, time
from hpcpar import kernels
from hpcpar.kernels.cpu.fused import elementwise
x = np.linspace(-1, 1, 101, dtype=np.float32)
y = kernels.leaky_relu(x, 0.5)
assert np.array_equal(y, np.where(x > 0, x, np.float32(0.5) * x))
stats = elementwise._leaky._dispatcher.stats
print("compiled" if stats.cache_misses else "loaded", len(stats.cache_hits))
"""


def test_of_processes_that_start_together_one_compiles_and_the_others_load(tmp_path):
    environment = {**os.environ, "HPCPAR_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [process.communicate(timeout=240) for process in started]
    assert all(process.returncode == 0 for process in started), results
    outcomes = sorted(out.split()[0] for out, _ in results)
    assert outcomes == ["compiled", "loaded", "loaded", "loaded"], results
    assert list(tmp_path.glob("numba-*/*.done"))


def test_a_folder_that_cannot_be_written_gives_way_to_the_temporary_one(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    environment = {**os.environ, "HPCPAR_CACHE_DIR": str(in_the_way), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob(f"hpcpar-{os.getuid()}/numba-*/*.done"))


def apply(function, x):
    """A function of the numbers, or the rows, of an array."""
    import numba

    @numba.njit(error_model="numpy")
    def run(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    y = np.empty(len(x), x.dtype)
    run(x, y)
    return y


def test_exp_is_within_two_units_in_the_last_place_and_right_at_the_ends():
    from hpcpar.kernels.cpu.fused.functions import exp32

    x = np.concatenate([np.linspace(-87.3, 88.7, 400001), np.linspace(-1, 1, 100001)]).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(apply(exp32, x) - want) / np.spacing(want.astype(np.float32))).max() <= 2
    ends = apply(exp32, np.array([0, -0.0, -87.4, -1e30, -np.inf, 88.73, 1e30, np.inf, np.nan], np.float32))
    np.testing.assert_array_equal(ends, np.array([1, 1, 0, 0, 0, np.inf, np.inf, np.inf, np.nan], np.float32))


def test_normal_distribution_function_keeps_its_tail():
    torch = pytest.importorskip("torch")
    from hpcpar.kernels.cpu.fused.functions import normal_cdf32

    x = np.linspace(-6, 8, 50001).astype(np.float32)
    want = torch.special.ndtr(torch.tensor(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(apply(normal_cdf32, x), want, rtol=1e-5)


def test_row_maximum_orders_signs_and_infinities():
    from hpcpar.kernels.cpu.fused.functions import row_max32

    rows = np.array([[-3, -1, -2], [0, -0.0, -1], [-np.inf, -np.inf, -np.inf], [1, np.inf, -np.inf], [2, 7, -9]],
                    np.float32)
    np.testing.assert_array_equal(apply(row_max32, rows), rows.max(axis=1))
