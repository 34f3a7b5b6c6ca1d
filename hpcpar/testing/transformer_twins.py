"""How operations of transformers are called by a `Case`, here and in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcpar import functional
from hpcpar.layout.layout import LayoutError

# ---- ours


def _einsum(*operands: Any, equation: str, out: Any = None) -> Any:
    return functional.einsum(equation, *operands, out=out)


def _overlapped_linear(x: Any, weight: Any, bias: Any = None, out: Any = None) -> Any:
    """A linear layer whose plan overlaps everything, and keeps the weight by its source."""
    from hpcpar.ahead import Ahead

    weight.overlap, weight.ahead, weight.keep = frozenset(("reduce", "scatter", "gather")), Ahead(), "source"
    return functional.linear(x, weight, bias, out=out)


def _attention(query: Any, key: Any, value: Any, *further: Any, parts: int = 1, **rest: Any) -> Any:
    """Attention whose further operands are documents and mask, as the flags say."""
    if parts != query.sig.parts(2) and rest.get("order") == "zigzag":
        raise LayoutError(f"the order is one of {parts} parts, the tokens lie in {query.sig.parts(2)}")
    given = list(further)
    documents = given.pop(0) if rest.pop("documents", False) else None
    mask = given.pop(0) if rest.pop("mask", False) else None
    return functional.scaled_dot_product_attention(query, key, value, mask, documents=documents, **rest)


def _token_cross_entropy(x: Any, target: Any, **rest: Any) -> Any:
    return functional.cross_entropy(x.transpose(1, 2), target, **rest)


OURS: dict[str, Callable[..., Any]] = {
    "einsum": _einsum,
    "overlapped_linear": _overlapped_linear,
    "attention": _attention,
    "token_cross_entropy": _token_cross_entropy,
}

# ---- torch's


def _torch(name: str) -> Callable[..., Any]:
    """A function of torch, without the layout of the result."""

    def call(*operands: Any, out: Any = None, **rest: Any) -> Any:
        import torch

        return (getattr(torch.nn.functional, name, None) or getattr(torch, name))(*operands, **rest)

    return call


def _torch_einsum(*operands: Any, equation: str, out: Any = None) -> Any:
    import torch

    return torch.einsum(equation, *operands)


def _torch_swiglu(gate: Any, up: Any) -> Any:
    import torch

    return torch.nn.functional.silu(gate) * up


def _torch_rotary(
    x: Any, positions: Any = None, theta: float = 10000.0, dims: int | None = None, interleaved: bool = False
) -> Any:
    """The rotation pair by pair, from its definition."""
    import torch

    dims = x.shape[-1] if dims is None else dims
    positions = torch.arange(x.shape[2]) if positions is None else positions
    angles = positions[..., None].to(x.dtype) * theta ** (-torch.arange(0, dims, 2, dtype=x.dtype) / dims)
    angles = angles if angles.ndim == 2 else angles[:, None]
    cos, sin = torch.cos(angles), torch.sin(angles)
    first, second = (x[..., 0:dims:2], x[..., 1:dims:2]) if interleaved else x[..., :dims].chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    made = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([made, x[..., dims:]], -1)


def _torch_attention(
    query: Any, key: Any, value: Any, *further: Any, documents: bool = False, mask: bool = False, parts: int = 1,
    order: str = "natural", scale: float | None = None, is_causal: bool = False, enable_gqa: bool = False,
    window: tuple[int, int] | None = None, context: str = "auto",
) -> Any:  # fmt: skip
    """Attention from its definition, with the whole score matrix; rows that see nothing are 0."""
    import torch

    given = list(further)
    seen = torch.ones((1, 1, query.shape[2], key.shape[2]), dtype=torch.bool)
    at, of = (_positions(n, parts if order == "zigzag" else 1) for n in (query.shape[2], key.shape[2]))
    if is_causal:
        seen = seen & (of[None, :] <= at[:, None])
    if window is not None:
        seen = seen & (of[None, :] >= at[:, None] - window[0]) & (of[None, :] <= at[:, None] + window[1])
    if documents:
        numbers = given.pop(0)
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask:
        added = given.pop(0)
        seen = seen & added if added.dtype == torch.bool else seen
        scores = scores if added.dtype == torch.bool else scores + added
    seen = seen.expand(scores.shape)
    some = seen.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(some, scores.masked_fill(~seen, -torch.inf), 0.0), -1)
    return torch.where(some & seen, weights, 0.0) @ value


def _positions(n: int, parts: int) -> Any:
    """The position of each token in memory: part r has tokens of the front and of the back in turn."""
    import torch

    if parts == 1:
        return torch.arange(n)
    order, front, back = [], 0, n
    for r in range(parts):
        size = (r + 1) * n // parts - r * n // parts
        ahead, behind = size // 2, size - size // 2
        order += [*range(front, front + ahead), *range(back - behind, back)]
        front, back = front + ahead, back - behind
    return torch.tensor(order, dtype=torch.int64)


def _torch_token_cross_entropy(x: Any, target: Any, **rest: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(x.transpose(1, 2), target, **rest)


TORCH: dict[str, Callable[..., Any]] = {
    "einsum": _torch_einsum,
    "linear": _torch("linear"),
    "overlapped_linear": _torch("linear"),
    "matmul": _torch("matmul"),
    "embedding": _torch("embedding"),
    "swiglu": _torch_swiglu,
    "rotary": _torch_rotary,
    "attention": _torch_attention,
    "token_cross_entropy": _torch_token_cross_entropy,
}
