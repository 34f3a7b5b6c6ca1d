"""Scaled dot-product attention under any layouts of samples, heads and tokens.

Samples and heads are independent: their splits cost no message. Tokens that are split are served by one of the schemes
of `hpcpar.ops.context`. The matrix of scores is never there as a whole, neither forward nor backward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar import random as _random
from hpcpar.kernels import COMPUTE_DTYPES
from hpcpar.ops.attention_layouts import NAME
from hpcpar.ops.context import CONTEXTS, attend
from hpcpar.ops.core import as_tensor
from hpcpar.ops.local_attention import Numbers, Sight
from hpcpar.ops.shape import unsqueeze
from hpcpar.tensors import Tensor

ORDERS = ("natural", "zigzag")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    documents: Any = None,
    order: str = "natural",
    context: str = "auto",
    compute_dtype: str = "float32",
) -> Tensor:
    """Return ``softmax(query @ key.T * scale + attn_mask) @ value``, as torch's function of this name.

    Parameters
    ----------
    query : Tensor
        (N, H, L, E), or (L, E), (H, L, E), (N, M, ..., H, L, E).
    key, value : Tensor
        (N, G, S, E) and (N, G, S, V), and likewise. G is H, or with `enable_gqa` a divisor of it.
    attn_mask : bool or float Tensor or array, optional
        Broadcasts to (N, H, L, S), where L and S count tokens as they lie in memory. True: may be seen; floats, of the
        dtype of the query, are added to the scores. A float mask gets a gradient if it requires one. With more than 4
        dims it broadcasts to (H, L, S).
    dropout_p : float
        Probability that a weight is dropped, in training or not, as in torch. The mask depends on the seed, the number
        of the call and (sample, head, positions): it is the same under every layout and order of tokens.
    is_causal : bool
        A query sees keys at its own position and before. Positions count from 0 in queries and in keys: with L != S
        the triangle starts at the upper left, as in torch.
    scale : float, optional
        ``E ** -0.5`` by default.
    enable_gqa : bool
        Query head h has the keys of head ``h // (H // G)`` (grouped queries, Ainslie et al. 2023).
    window : (int, int), optional
        (left, right): a query at position i sees keys from ``i - left`` to ``i + right`` only.
    documents : int Tensor or array, optional
        (N, S) for self-attention: a query sees the keys of its own document. Any numbers; padding is a document too.
    order : {"natural", "zigzag"}
        How the tokens of a split sequence lie; see `hpcpar.ops.context.zigzag`.
    context : {"auto", "ring", "all_to_all", "gather"}
        How a split of the tokens is served; see `hpcpar.ops.context`.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which the float32 operands of all products, forward and backward, are multiplied; see `functional.einsum`.

    Returns
    -------
    Tensor (N, H, L, V)
        Split as the query; rows that see no key are 0.

    Raises
    ------
    ValueError
        Shapes, dtypes or arguments that do not fit.
    LayoutError
        Layouts that are not served: samples and heads may be split by any axes, alike in all operands; the tokens of
        query, key and value by the same axes (keys may also be whole); the last dim not at all. Where H is split and G
        has fewer heads than there are parts, key and value are given with their heads together, and sliced.

    Notes
    -----
    Messages are sent where tokens are split (`hpcpar.ops.context` has the closed forms); where documents are split,
    which are gathered once a step; and for the gradients of key and value where their heads are sliced, which are
    partial. Otherwise there are none.
    """
    lacking = _lacking_dims(query, key, value, documents)
    for _ in range(lacking):
        query, key, value = (unsqueeze(t, 0) for t in (query, key, value))
    _check_shapes(query, key, value, enable_gqa)
    _check_arguments(attn_mask, dropout_p, is_causal, window, order, context, compute_dtype)

    operands = [query, key, value]
    if documents is not None:
        operands.append(_documents(documents, query, key))
    if attn_mask is not None:
        operands.append(_mask(attn_mask, query, key))
    sight = Sight(
        causal=bool(is_causal),
        window=None if window is None else (int(window[0]), int(window[1])),
        documents=documents is not None,
        mask=attn_mask is not None,
        compute_dtype=compute_dtype,
    )
    numbers = Numbers(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        dropout=(_random.seed(), _random.next_stream(), float(dropout_p)) if dropout_p else None,
    )
    result = attend(operands, sight, numbers, order, context)
    return result[(0,) * lacking] if lacking else result


def _lacking_dims(query: Tensor, key: Tensor, value: Tensor, documents: Any) -> int:
    """How many of the dims of samples and heads are not there, as torch allows."""
    if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
        return 0
    if documents is not None:
        raise ValueError(f"{NAME}: documents are of samples; query of shape {query.shape} has none")
    return 4 - query.ndim


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> None:
    q, k, v = query.shape, key.shape, value.shape
    why = ""
    if not len(q) == len(k) == len(v) or len(q) < 4:
        why = "all three have as many dims, the last ones heads, tokens and width"
    elif q[:-3] != k[:-3] or k[:-1] != v[:-1] or q[-1] != k[-1]:
        why = "expected (N, H, L, E), (N, G, S, E) and (N, G, S, V)"
    elif q[-3] != k[-3]:
        if not grouped:
            why = f"{q[-3]} heads in query and {k[-3]} in key; enable_gqa=True shares the heads of the key"
        elif k[-3] == 0 or q[-3] % k[-3]:
            why = f"the {q[-3]} heads of the query do not divide into {k[-3]} groups"
    if why:
        raise ValueError(f"{NAME} of query {q}, key {k}, value {v}: {why}")
    if not query.dtype == key.dtype == value.dtype or query.dtype.kind != "f":
        raise ValueError(
            f"{NAME}: dtypes are {query.dtype}, {key.dtype} and {value.dtype}; one float dtype is expected"
        )


def _check_arguments(
    mask: Any, p: float, causal: bool, window: Any, order: str, context: str, compute_dtype: str
) -> None:
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"{NAME}: compute_dtype is one of {', '.join(COMPUTE_DTYPES)}, got {compute_dtype!r}")
    if mask is not None and causal:
        raise ValueError(f"{NAME}: attn_mask and is_causal exclude each other, as in torch; put both into the mask")
    if not 0 <= p <= 1:
        raise ValueError(f"{NAME}: dropout_p is a probability, got {p}")
    if window is not None and (len(window) != 2 or min(window) < 0):
        raise ValueError(f"{NAME}: a window is (left, right), both at least 0, got {window!r}")
    if order not in ORDERS:
        raise ValueError(f"{NAME}: order is one of {', '.join(ORDERS)}, got {order!r}")
    if context not in CONTEXTS:
        raise ValueError(f"{NAME}: context is one of {', '.join(CONTEXTS)}, got {context!r}")


def _documents(documents: Any, query: Tensor, key: Tensor) -> Tensor:
    made = documents if isinstance(documents, Tensor) else as_tensor(np.asarray(documents), query, np.dtype(np.int64))
    n, keys = key.shape[0], key.shape[-2]
    if key.ndim > 4 or made.shape != (n, keys) or query.shape[-2] != keys or made.dtype.kind not in "iu":
        raise ValueError(
            f"{NAME}: documents are integers (N, S) for self-attention, here ({n}, {keys}) with as many queries as "
            f"keys; got {made.dtype} {made.shape} with a query of shape {query.shape}"
        )
    return made


def _mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    if not isinstance(mask, Tensor):
        mask = mask if hasattr(mask, "__array_function__") else np.asarray(mask)
        mask = as_tensor(mask, query, query.dtype if mask.dtype.kind == "f" else mask.dtype)
    if mask.dtype not in (np.dtype(bool), query.dtype):
        raise ValueError(f"{NAME}: attn_mask is bool or {query.dtype} as the query, got {mask.dtype}")
    shape = (query.shape[0] if query.ndim == 4 else 1, *query.shape[-3:-1], key.shape[-2])
    if mask.ndim > 4 or any(m not in (1, n) for m, n in zip(reversed(mask.shape), reversed(shape), strict=False)):
        raise ValueError(f"{NAME}: attn_mask of shape {mask.shape} does not broadcast to {shape}")
    while mask.ndim < 4:
        mask = unsqueeze(mask, 0)
    return mask
