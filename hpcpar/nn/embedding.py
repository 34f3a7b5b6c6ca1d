"""A trained table, whose rows are looked up by index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcpar import functional as F
from hpcpar.layout.layout import Layout
from hpcpar.nn import init
from hpcpar.nn.module import Module
from hpcpar.tensors import Tensor


class Embedding(Module):
    """Rows of a table at integer indices of any shape; arguments, defaults and names as in torch.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Rows and columns of the table.
    padding_idx : int, optional
        A row that starts as zeros and gets no gradient; may count from the end.
    out : Layout, optional
        The layout of the result; see `functional.embedding`.
    layouts : mapping of str to Layout, optional
        The layout of ``"weight"``; replicated by default. Split rows (`Row`) make the result partial, split columns
        (`Column`) split its last dim.
    dtype : dtype, optional
        `nn.get_default_dtype` by default.

    Notes
    -----
    The weight (num_embeddings, embedding_dim) is drawn from the standard normal distribution. A model ties its head to
    it by assigning the parameter: ``self.head.weight = self.tokens.weight``.
    """

    parallel_dims = {"column": {"weight": 1}, "row": {"weight": 0}}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        out: Layout | None = None,
        layouts: Mapping[str, Layout] | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"Embedding: padding_idx is {padding_idx}, the table has {num_embeddings} rows")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.out = out
        shape = num_embeddings, embedding_dim
        self.weight = init.parameter(shape, self.reset, layout=(layouts or {}).get("weight"), dtype=dtype)

    def reset(self, weight: Tensor) -> None:
        """Fill the table: normal numbers, zeros in the row of the padding index."""
        init.normal_(weight)
        if self.padding_idx is not None:
            init.zero_row_(weight, self.padding_idx)

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, self.padding_idx, out=self.out)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
