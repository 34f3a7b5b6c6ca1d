"""Linear layers, also on what a Flatten would have made of a volume that is split in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from hpcpar import functional as F
from hpcpar.layout.layout import Layout
from hpcpar.nn import init
from hpcpar.nn.module import Module
from hpcpar.ops.linear import volume_linear
from hpcpar.tensors import Tensor


class Linear(Module):
    """``y = x @ weight.T + bias`` over the last dim of x.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    in_dims : sequence of int, optional
        The layer takes (N, *in_dims), say (N, C, D, H, W), where torch takes it flattened to (N, C D H W): the weight
        is kept as (out_features, C, D, H, W), so that any of these dims may be split; the result is then partial and
        costs one all-reduce. A flattened x is taken too, if nothing in it is split. ``state_dict(numpy=True)`` shows
        torch's (out_features, C D H W).
    out : Layout, optional
        The layout of the result: it decides where x and weight are split differently by one axis (`functional.einsum`).
    layouts : mapping of str to Layout, optional
        Layouts of ``"weight"`` and ``"bias"``; replicated by default.
    dtype : dtype, optional
        `nn.get_default_dtype` by default.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which float32 operands are multiplied, see `functional.einsum`; an attribute that may be changed at any time.

    Notes
    -----
    Weight (out_features, in_features), uniform within 1/sqrt(in_features), and bias likewise: torch's defaults.
    """

    parallel_dims = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_dims: Sequence[int] | None = None,
        out: Layout | None = None,
        layouts: Mapping[str, Layout] | None = None,
        dtype: Any = None,
        compute_dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.out = in_features, out_features, out
        self.compute_dtype = compute_dtype
        self.in_dims = (in_features,) if in_dims is None else tuple(in_dims)
        if prod(self.in_dims) != in_features:
            raise ValueError(f"Linear: in_dims {self.in_dims} hold {prod(self.in_dims)} features, not {in_features}")
        layouts = layouts or {}
        self.weight = init.parameter(
            (out_features, *self.in_dims), init.default_weight_, layout=layouts.get("weight"), dtype=dtype
        )
        biased = init.default_bias(in_features)
        self.register_parameter(
            "bias", init.parameter((out_features,), biased, layout=layouts.get("bias"), dtype=dtype) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if len(self.in_dims) == 1:
            return F.linear(x, self.weight, self.bias, out=self.out, compute_dtype=self.compute_dtype)
        if x.shape[1:] != self.in_dims:
            if x.ndim < 2 or prod(x.shape[1:]) != self.in_features:
                raise ValueError(f"Linear takes (N, {', '.join(map(str, self.in_dims))}), got shape {x.shape}")
            x = F.reshape(x, (x.shape[0], *self.in_dims))
        return volume_linear(x, self.weight, self.bias, out=self.out, compute_dtype=self.compute_dtype)

    def shown_shape(self, name: str) -> tuple[int, ...] | None:
        return (self.out_features, self.in_features) if name == "weight" else None

    def extra_repr(self) -> str:
        dims = "" if len(self.in_dims) == 1 else f", in_dims={self.in_dims}"
        if self.compute_dtype != "float32":
            dims += f", compute_dtype={self.compute_dtype}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{dims}"
