"""What each kernel returns for outlines: shapes, dtypes, memory order, and what it takes in memory meanwhile.

Names and arguments are those of the reference in `hpcpar.kernels.generic`. Kernels without a rule run their reference
on outlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .. import registry
from ..bfloat16 import bfloat16_by_float32
from ..generic.attention import check as check_attention
from ..generic.attention import work_dtype
from ..generic.conv import check
from ..generic.pool import index_dtype, pool_sizes
from .arrays import Outline, empty, empty_as

Array = Any
Shape = Sequence[int]


def channels_last(shape: Shape, dtype: Any) -> Outline:
    """Return an outline of logical `shape` (N, C, *spatial) that lies channels last."""
    if len(shape) < 3:
        return empty(shape, dtype)
    memory = empty((shape[0], *shape[2:], shape[1]), dtype)
    return memory.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))


# ---- convolution


def rounded(compute_dtype: str, *activations: Array) -> list[Array]:
    """The copies of activations in two bytes or four, which live as long as the kernel runs."""
    if compute_dtype == "float32":
        return []
    dtype = np.float32 if compute_dtype == "bfloat16" and bfloat16_by_float32() else np.uint16
    return [empty(a.shape, dtype) for a in activations]


def channels_of_a_part(x: Array, w: Array, sizes: Shape) -> Array | None:
    """The copy of some channels of the input that is convolved at a time; None where it is taken whole."""
    if x.dtype != np.float32 or not registry.available("onednn"):
        return None
    from ..cpu.onednn.conv import channel_parts

    parts = channel_parts(w.shape[1], w.shape[0], prod(sizes))
    return empty((x.shape[0], max(b - a for a, b in parts), *x.shape[2:]), x.dtype) if len(parts) > 1 else None


def conv_forward(
    x: Array, w: Array, bias: Array | None, stride: Shape, padding: Any, dilation: Shape, groups: int = 1,
    out: Array | None = None, slope: float | None = None, accumulate: bool = False, compute_dtype: str = "float32",
) -> Array:  # fmt: skip
    sizes = check(x, w, stride, padding, dilation, groups)
    y = channels_last((x.shape[0], w.shape[0], *sizes), x.dtype) if out is None else out
    in_float32 = compute_dtype == "float32" or bfloat16_by_float32()
    _part = channels_of_a_part(x, w, sizes) if groups == 1 and in_float32 else None
    _held = rounded(compute_dtype, x if _part is None else _part)
    return y


def conv_backward_data(
    dy: Array, w: Array, x_shape: Shape, stride: Shape, padding: Any, dilation: Shape, groups: int = 1,
    compute_dtype: str = "float32",
) -> Array:  # fmt: skip
    _held = rounded(compute_dtype, dy)
    return channels_last(x_shape, dy.dtype)


def conv_backward_weight(
    x: Array, dy: Array, w_shape: Shape, stride: Shape, padding: Any, dilation: Shape, groups: int = 1,
    compute_dtype: str = "float32",
) -> Array:  # fmt: skip
    _held = rounded(compute_dtype, x, dy)
    kernel_first = empty((*w_shape[2:], w_shape[1], w_shape[0]), x.dtype)
    return kernel_first.transpose(len(w_shape) - 1, len(w_shape) - 2, *range(len(w_shape) - 2))


# ---- matrix products


def matmul(a: Array, b: Array, compute_dtype: str = "float32") -> Array:
    _held = rounded(compute_dtype, a, b)
    return np.matmul(a, b)


# ---- pooling


def max_pool_forward(
    x: Array, kernel: Shape, stride: Shape, dilation: Shape, out_shape: Shape | None = None, valid: Any = None
) -> tuple[Array, Array]:
    shape = (*x.shape[:2], *pool_sizes(x.shape[2:], kernel, stride, dilation, out_shape))
    return channels_last(shape, x.dtype), channels_last(shape, index_dtype(prod(x.shape[2:])))


def max_pool_backward(g: Array, index: Array, x_shape: Shape) -> Array:
    return channels_last(x_shape, g.dtype)


def avg_pool_forward(
    x: Array, kernel: Shape, stride: Shape, padding: Shape, divisors: Sequence[Any],
    slope: float | None = None, out: Array | None = None, signs: Array | None = None,
) -> Array:  # fmt: skip
    return channels_last((*x.shape[:2], *[len(d) for d in divisors]), x.dtype) if out is None else out


def avg_pool_backward(
    g: Array, x_shape: Shape, kernel: Shape, stride: Shape, padding: Shape, divisors: Sequence[Any],
    signs: Array | None = None, slope: float | None = None,
) -> Array:  # fmt: skip
    return channels_last((*g.shape[:2], *x_shape[2:]), g.dtype)


def sum_pool_forward(x: Array, kernel: Shape, stride: Shape) -> Array:
    sizes = pool_sizes(x.shape[2:], kernel, stride, (1,) * len(kernel), None)
    return channels_last((*x.shape[:2], *sizes), x.dtype)


def sum_pool_backward(g: Array, x_shape: Shape, kernel: Shape, stride: Shape) -> Array:
    return channels_last((*g.shape[:2], *x_shape[2:]), g.dtype)


def put_at(values: Array, places: Array, shape: Shape) -> Array:
    return channels_last(shape, values.dtype)


def take_at(x: Array, places: Array) -> Array:
    return channels_last(places.shape, x.dtype)


# ---- normalisation: statistics are real zeros


def sample_moments(x: Array) -> tuple[Array, Array]:
    return np.zeros(x.shape[:2]), np.zeros(x.shape[:2])


def channel_moments(x: Array) -> tuple[Array, Array]:
    return np.zeros(x.shape[1]), np.zeros(x.shape[1])


def group_moments(x: Array, groups: int) -> tuple[Array, Array]:
    return np.zeros((x.shape[0], groups)), np.zeros((x.shape[0], groups))


def channel_sums(x: Array) -> Array:
    return np.zeros(x.shape[1], x.dtype)


def channel_normalize(
    x: Array, mean: Array, inv_std: Array, weight: Array | None = None, bias: Array | None = None,
    slope: float | None = None, out: Array | None = None,
) -> Array:  # fmt: skip
    return channels_last(x.shape, x.dtype) if out is None else out


def channel_grad_sums(
    g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None = None, bias: Array | None = None,
    slope: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    return np.zeros(mean.shape), np.zeros(mean.shape)


def channel_grad_input(
    g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array, s2_mean: Array,
    bias: Array | None = None, slope: float | None = None,
) -> Array:  # fmt: skip
    return channels_last(x.shape, x.dtype)


def row_moments(x: Array) -> tuple[Array, Array]:
    return np.zeros(x.shape[0]), np.zeros(x.shape[0])


def row_squares(x: Array) -> Array:
    return np.zeros(x.shape[0])


def row_normalize(
    x: Array, mean: Array, inv_std: Array, weight: Array | None = None, bias: Array | None = None
) -> Array:
    return empty(x.shape, x.dtype)


def row_grad_sums(
    g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    rows, width = x.shape
    return np.zeros(rows), np.zeros(rows), np.zeros(width), np.zeros(width)


def row_grad_input(
    g: Array, x: Array, mean: Array, inv_std: Array, weight: Array | None, s1_mean: Array, s2_mean: Array
) -> Array:
    return empty(x.shape, x.dtype)


# ---- elementwise and softmax


def _alike(first: Array, *others: Any, out: Array | None = None, **options: Any) -> Array:
    return empty_as(first) if out is None else out


leaky_relu = leaky_relu_backward = gelu = gelu_backward = sigmoid = sigmoid_backward = tanh = tanh_backward = _alike
silu = silu_backward = swiglu = apply_mask = rotate_pairs = _alike
softmax = softmax_backward = log_softmax = log_softmax_backward = _alike


def swiglu_backward(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    return empty_as(gate), empty_as(gate)


def cross_entropy_forward(logits: Array, target: Array) -> tuple[Array, Array]:
    return empty(target.shape, logits.dtype), empty(target.shape, logits.dtype)


def cross_entropy_backward(
    logits: Array, target: Array, lse: Array, soft: Array, hard: Array, smooth: Array | None = None,
    class_weight: Array | None = None,
) -> Array:  # fmt: skip
    return channels_last(logits.shape, logits.dtype)


# ---- tables


def take_rows(table: Array, index: Array) -> Array:
    return empty((*index.shape, table.shape[1]), table.dtype)


def add_rows(g: Array, index: Array, rows: int) -> Array:
    return empty((rows, g.shape[index.ndim]), g.dtype)


# ---- attention


def _heads(shape: Shape, dtype: Any) -> Array:
    n, h, length, e = shape
    return empty((n, length, h, e), dtype).transpose(0, 2, 1, 3)


def attention_forward(
    query: Array, key: Array, value: Array, scale: float, visible: Any, dropout: Any = None,
    compute_dtype: str = "float32",
) -> tuple[Array, Array]:  # fmt: skip
    check_attention(query, key, value)
    shape = (*query.shape[:3], value.shape[3])
    return _heads(shape, query.dtype), empty(shape[:3], work_dtype(query))


def attention_merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    return out_a, lse_a


def attention_backward(
    g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float, visible: Any,
    dropout: Any = None, mask_gradient: bool = False, compute_dtype: str = "float32",
) -> tuple[Array, ...]:  # fmt: skip
    gradients = tuple(_heads(a.shape, a.dtype) for a in (query, key, value))
    return (*gradients, empty(visible.mask.shape, work_dtype(query))) if mask_gradient else gradients


def window_attention_forward(
    query: Array, key: Array, value: Array, scale: float, bias: Array | None = None, regions: Array | None = None,
    compute_dtype: str = "float32",
) -> tuple[Array, Array]:  # fmt: skip
    shape = (*query.shape[:3], value.shape[3])
    return _heads(shape, query.dtype), empty(shape[:3], query.dtype)


def window_attention_backward(
    g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float,
    bias: Array | None = None, regions: Array | None = None, compute_dtype: str = "float32",
) -> tuple[Array | None, ...]:  # fmt: skip
    gradients = tuple(_heads(a.shape, a.dtype) for a in (query, key, value))
    return (*gradients, None if bias is None else empty(bias.shape, bias.dtype))


# ---- random numbers


def _box(shape: Shape, box: Any) -> tuple[int, ...]:
    return tuple(shape) if box is None else tuple(hi - lo for lo, hi in box)


def random_uniform(
    seed: int, stream: int, shape_global: Shape, box: Any = None, dtype: Any = np.float64, like: Array = None
) -> Array:
    return channels_last(_box(shape_global, box), dtype)


random_normal = random_uniform


def dropout_mask(seed: int, stream: int, shape_global: Shape, box: Any, p: float, like: Array = None) -> Array:
    return channels_last(_box(shape_global, box), bool)


# ---- optimizers work in place


def _nothing(*arrays: Any, **options: Any) -> None:
    return None


sgd_step = adam_step = adamw_step = add_into = _nothing
