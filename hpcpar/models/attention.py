"""Self-attention of a decoder: projections onto heads, rotary positions, attention, and back onto the stream."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.nn import init
from hpcpar.ops.attention import ORDERS
from hpcpar.ops.context import CONTEXTS
from hpcpar.tensors import Tensor

if TYPE_CHECKING:
    from hpcpar.models.cache import LayerCache

Initializer = Callable[[Tensor], Any]

_ROWS = "nabdfg"  # labels of samples, and of what else lies before the tokens


class ToHeads(nn.Module):
    """A linear layer from the stream (N, S, C), or (N, ..., S, C), onto heads (N, ..., H, S, E).

    The weight is kept as (heads, head_dim, width), so that heads may be split, evenly or not;
    ``state_dict(numpy=True)`` shows torch's (heads * head_dim, width).

    Parameters
    ----------
    heads, head_dim, width : int
    bias : bool
    initializer : callable
        Fills the weight in place; the bias is zero.
    """

    parallel_dims = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 2}}
    compute_dtype = "float32"

    def __init__(self, heads: int, head_dim: int, width: int, bias: bool, initializer: Initializer) -> None:
        super().__init__()
        self.weight = init.parameter((heads, head_dim, width), initializer)
        self.register_parameter("bias", init.parameter((heads, head_dim), init.zeros_) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        rows = _ROWS[: x.ndim - 2]
        y = F.einsum(f"{rows}sc,hec->{rows}hse", x, self.weight, out=self.out, compute_dtype=self.compute_dtype)
        if self.bias is None:
            return y
        # added where it broadcasts as it lies: its gradient then stays partial until gradients are synchronised
        return F.transpose(F.transpose(y, -3, -2) + self.bias, -3, -2)

    def shown_shape(self, name: str) -> tuple[int, ...]:
        heads, head_dim, width = self.weight.shape
        return (heads * head_dim, width) if name == "weight" else (heads * head_dim,)

    def extra_repr(self) -> str:
        heads, head_dim, width = self.weight.shape
        return f"{width} -> {heads} x {head_dim}, bias={self.bias is not None}"


class FromHeads(nn.Module):
    """A linear layer from heads (N, ..., H, S, E) onto the stream (N, ..., S, C), the other way round than `ToHeads`.

    Over a split of the heads the result is partial: one reduction, after which the bias is added.
    """

    parallel_dims = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}
    compute_dtype = "float32"

    def __init__(self, heads: int, head_dim: int, width: int, bias: bool, initializer: Initializer) -> None:
        super().__init__()
        self.weight = init.parameter((width, heads, head_dim), initializer)
        self.register_parameter("bias", init.parameter((width,), init.zeros_) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        rows = _ROWS[: x.ndim - 3]
        y = F.einsum(f"{rows}hse,che->{rows}sc", x, self.weight, out=self.out, compute_dtype=self.compute_dtype)
        return y if self.bias is None else y + self.bias

    def shown_shape(self, name: str) -> tuple[int, ...] | None:
        shape = self.weight.shape
        return (shape[0], prod(shape[1:])) if name == "weight" else None

    def extra_repr(self) -> str:
        width, heads, head_dim = self.weight.shape
        return f"{heads} x {head_dim} -> {width}, bias={self.bias is not None}"


class Attention(nn.Module):
    """Causal self-attention with as many heads of keys and values as the configuration says.

    Attributes
    ----------
    context : {"auto", "ring", "all_to_all", "gather"}
        How a split of the tokens is served.
    order : {"natural", "zigzag"}
        The order in which tokens lie.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which queries, keys, weights and values are multiplied; see `nn.set_compute_dtype`.
    """

    compute_dtype = "float32"
    option_choices = {"context": CONTEXTS, "order": ORDERS}

    def __init__(self, config: DecoderConfig, weights: Initializer, residual_weights: Initializer) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.q = ToHeads(c.heads, c.head_dim, c.width, bias, weights)
        self.k = ToHeads(c.kv_heads, c.head_dim, c.width, bias, weights)
        self.v = ToHeads(c.kv_heads, c.head_dim, c.width, bias, weights)
        self.o = FromHeads(c.heads, c.head_dim, c.width, c.out_bias, residual_weights)
        self.grouped, self.dropout = c.kv_heads != c.heads, c.dropout
        self.rotary = c.positions == "rotary"
        self.theta, self.scaling = c.rope_theta, c.rope_scaling
        self.window = None if c.window is None else (c.window - 1, 0)
        self.context, self.order = "auto", "natural"

    def forward(
        self, x: Tensor, positions: Tensor, documents: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Return what attention adds to the stream x (N, S, C).

        Parameters
        ----------
        positions : Tensor
            (S,) or (N, S), of the tokens.
        documents : Tensor, optional
            (N, S): tokens see those of their own document.
        cache : LayerCache, optional
            Keys and values of earlier tokens, which are seen too; those of x are put into it.
        """
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.rotary:
            q = F.rotary(q, positions, self.theta, scaling=self.scaling)
            k = F.rotary(k, positions, self.theta, scaling=self.scaling)
        if cache is not None:
            return self.o(cache.attend(q, k, v, positions, self.window, self.compute_dtype))
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True, enable_gqa=self.grouped,
            window=self.window, documents=documents, order=self.order, context=self.context,
            compute_dtype=self.compute_dtype,
        )  # fmt: skip
        return self.o(mixed)

    def extra_repr(self) -> str:
        return f"window={self.window}, context={self.context!r}, order={self.order!r}"
