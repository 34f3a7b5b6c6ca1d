"""Attention's CUDA source, compiled as C++ and run by one thread on this CPU, against the reference."""

import shutil

import numpy as np
import pytest

from hpcpar.kernels import AttentionDropout, Visible
from hpcpar.kernels.generic import attention as reference
from hpcpar.kernels.gpu import attention as gpu
from hpcpar.kernels.gpu import matmul as gpu_matmul
from hpcpar.kernels.precision import rounded

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("cuda_on_this_cpu"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the sources")]


def conditions(rng, name, n, h, length, keys):
    positions = {"q_positions": rng.permutation(length), "k_positions": rng.permutation(keys)}
    return {
        "everything": {},
        "causal": {"causal": True},
        "window": {"window": (9, 4), **positions},
        "documents": {"q_documents": rng.integers(0, 3, (n, length)), "k_documents": rng.integers(0, 3, (n, keys))},
        "mask": {"mask": rng.random((h, 1, keys)) < 0.6, "causal": True},
        "bias": {"mask": rng.standard_normal((n, 1, length, keys)), **positions, "causal": True},
    }[name]


@pytest.mark.parametrize("name", ["everything", "causal", "window", "documents", "mask", "bias"])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-5), (np.float64, 1e-12)])
def test_outputs_and_gradients_are_those_of_the_reference(rng, monkeypatch, name, dropped, dtype, tolerance):
    monkeypatch.setattr(gpu, "BLOCK", (13, 17))
    monkeypatch.setattr(gpu, "LANES", 4)
    n, h, g, length, keys = 2, 4, 2, 29, 37
    q, k, v, up = (rng.standard_normal(s).astype(dtype) for s in ((n, h, length, 6), (n, g, keys, 6), (n, g, keys, 5),
                                                                  (n, h, length, 5)))
    visible = Visible(**conditions(rng, name, n, h, length, keys))
    dropout = AttentionDropout(3, 4, 0.3, (n + 1, h + 2, 50, 60), (1, 2)) if dropped else None
    want = reference.attention_forward(q, k, v, 0.4, visible, dropout)
    got = gpu.attention_forward(q, k, v, 0.4, visible, dropout)
    want += reference.attention_backward(up, q, k, v, *want, 0.4, visible, dropout)
    got += gpu.attention_backward(up, q, k, v, *got, 0.4, visible, dropout)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype and mine.strides == theirs.strides
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=10 * tolerance)


def test_what_the_device_does_not_serve_is_declined():
    half = np.ones((1, 1, 3, 2), np.float16)
    assert gpu.attention_forward(half, half, half, 1.0, Visible()) is NotImplemented
    empty = np.ones((1, 1, 0, 2), np.float32)
    assert gpu.attention_forward(empty, empty, empty, 1.0, Visible()) is NotImplemented
    assert gpu_matmul.matmul(empty[0, 0], empty[0, 0].T) is NotImplemented


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_operands_are_rounded_to_their_bits(rng, compute_dtype):
    a = rng.standard_normal((5, 7)).astype(np.float32).T
    bits = gpu_matmul.bits(a, compute_dtype)
    wide = bits.astype(np.float32) if compute_dtype == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(wide, rounded(a, compute_dtype))
    assert bits.itemsize == 2 and bits.flags.c_contiguous
