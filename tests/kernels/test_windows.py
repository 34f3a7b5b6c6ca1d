"""Attention inside windows against torch's, window by window."""

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels.generic import windows

FAMILY = "windows"
pytestmark = pytest.mark.serial


def heads_in_memory(rng, b, h, t, e, dtype):
    """(B, H, T, E) as projections leave it: (B, T, H, E) in memory."""
    return rng.standard_normal((b, t, h, e)).astype(dtype).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("scores", [1, 200, 1 << 18], ids=["one window", "some", "all"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_regions", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 3e-5)])
def test_forward_and_gradients_equal_torch(
    implementation, rng, monkeypatch, scores, with_bias, with_regions, dtype, tolerance
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(windows, "SCORES", scores)
    b, h, t, e, v = 6, 2, 5, 3, 4
    q, k = (heads_in_memory(rng, b, h, t, e, dtype) for _ in range(2))
    value, g = (heads_in_memory(rng, b, h, t, v, dtype) for _ in range(2))
    bias = rng.standard_normal((h, t, t)).astype(dtype) if with_bias else None
    regions = np.array([[0] * t, [0, 0, 1, 1, 2], [3, 1, 3, 3, 1]], np.int8) if with_regions else None
    out, lse = kernels.window_attention_forward(q, k, value, 0.6, bias, regions)
    grads = kernels.window_attention_backward(g, q, k, value, out, lse, 0.6, bias, regions)

    twins = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (q, k, value)]
    mask = torch.zeros(b, h, t, t, dtype=torch.float64)
    if with_bias:
        twins.append(torch.tensor(bias.astype(np.float64), requires_grad=True))
        mask = mask + twins[3]
    if with_regions:
        own = torch.tensor(np.tile(regions, (2, 1)))
        mask = mask.masked_fill((own[:, :, None] != own[:, None, :])[:, None], -torch.inf)
    want = torch.nn.functional.scaled_dot_product_attention(*twins[:3], mask, scale=0.6)
    want.backward(torch.tensor(g.astype(np.float64)))
    assert out.dtype == dtype and out.transpose(0, 2, 1, 3).flags.c_contiguous
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=tolerance, atol=tolerance)
    assert (grads[3] is None) == (not with_bias)
    for mine, twin in zip(grads, twins, strict=False):
        np.testing.assert_allclose(mine, twin.grad.numpy(), rtol=tolerance, atol=tolerance)
        assert mine.dtype == dtype


@pytest.mark.parametrize("shape", [(0, 2, 4, 3), (4, 0, 4, 3)])
def test_empty_arrays_pass(implementation, shape):
    q = np.ones(shape)
    regions = np.zeros((shape[0], 4), np.int8)
    bias = np.ones((shape[1], 4, 4))
    out, lse = kernels.window_attention_forward(q, q, q, 1.0, bias, regions)
    grads = kernels.window_attention_backward(out, q, q, q, out, lse, 1.0, bias, regions)
    assert out.shape == shape and lse.shape == shape[:-1]
    assert [a.shape for a in grads] == [shape] * 3 + [bias.shape] and not grads[3].any()


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning")
def test_operands_in_two_bytes_round_and_sums_do_not(implementation, rng, compute_dtype):
    if missing := kernels.compute_missing(compute_dtype):
        pytest.skip(missing)
    q, k, v, g = (heads_in_memory(rng, 6, 4, 27, 16, np.float32) for _ in range(4))
    bias = rng.standard_normal((4, 27, 27)).astype(np.float32)
    regions = rng.integers(0, 2, (3, 27)).astype(np.int8)
    found = {}
    for dtype in ("float32", compute_dtype):
        out, lse = kernels.window_attention_forward(q, k, v, 0.3, bias, regions, dtype)
        assert out.dtype == lse.dtype == np.float32
        gradients = kernels.window_attention_backward(g, q, k, v, out, lse, 0.3, bias, regions, dtype)
        found[dtype] = out, lse, *gradients
    part = kernels.ROUNDINGS[compute_dtype]
    for exact, near in zip(found["float32"], found[compute_dtype], strict=True):
        error = np.abs(near - exact).max() / np.abs(exact).max()
        assert part / 50 < error < 6 * part
    wide = [a.astype(np.float64) for a in (q, k, v)]
    with pytest.raises(ValueError, match="takes float32 arrays, got float64"):
        kernels.window_attention_forward(*wide, 0.3, compute_dtype=compute_dtype)
