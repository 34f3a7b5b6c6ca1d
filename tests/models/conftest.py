"""A block of the transformers of volumes, and the same of torch to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.mesh import Mesh
from hpcpar.nn import Module


def torch_block(block: Module, x: Any, heads: int, mask: Any = None) -> Any:
    """Return what torch's functions make of x (N, D, H, W, C) with the block's weights, all tokens in one row."""
    import torch

    w = {name: torch.tensor(a) for name, a in block.state_dict(numpy=True).items()}
    n, d, height, width, c = x.shape
    tokens = d * height * width

    def linear(name: str, y: Any) -> Any:
        return torch.nn.functional.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name: str, y: Any) -> Any:
        return torch.nn.functional.layer_norm(y, (c,), w[f"{name}.weight"], w[f"{name}.bias"])

    flat = x.reshape(n, tokens, c)
    y = norm("norm1", flat)
    q, k, v = (linear(f"attention.{a}", y).reshape(n, tokens, heads, c // heads).transpose(1, 2) for a in "qkv")
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(n, tokens, c)
    flat = flat + linear("attention.o", y)
    y = torch.nn.functional.gelu(linear("mlp.up", norm("norm2", flat)))
    return (flat + linear("mlp.down", y)).reshape(x.shape)


@pytest.fixture
def compare_block():
    """``compare_block(block, array, mesh, heads, mask=None)``: split along depth, a block does what torch's does."""
    torch = pytest.importorskip("torch")

    def compare(block: Module, array: np.ndarray, mesh: Mesh, heads: int, mask: np.ndarray | None = None) -> None:
        x = hp.tensor(array, mesh, hp.Layout(None, "depth"), requires_grad=True)
        twin = torch.tensor(array, requires_grad=True)
        wanted = torch_block(block, twin, heads, None if mask is None else torch.tensor(mask))
        y = block(x)
        np.testing.assert_allclose(y.numpy(), wanted.detach().numpy(), rtol=1e-11, atol=1e-11)
        (y * y).sum().backward()
        (wanted * wanted).sum().backward()
        np.testing.assert_allclose(x.grad.numpy(), twin.grad.numpy(), rtol=1e-9, atol=1e-9)

    return compare
