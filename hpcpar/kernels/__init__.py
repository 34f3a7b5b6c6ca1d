"""Local mathematics on the arrays of one rank: no messages, no layouts.

Arrays are logical (N, C, *spatial) with 1 to 3 spatial dims, any strides, any of them empty; results lie channels last
in memory. NumPy and CuPy arrays are served alike; float32 has the fast kernels, float64 the exact ones. Which library
runs an operation is decided by the `registry` and shown by `describe`.
"""

from __future__ import annotations

from . import memory, outline
from .arrays import array_module, empty_channels_last, is_channels_last, last, memory_view, to_channels_last
from .bfloat16 import bfloat16_missing, require_bfloat16
from .bfloat16 import round_to_bfloat16 as _round_to_bfloat16
from .generic import attention as _attention
from .generic import conv as _conv
from .generic import elementwise as _elementwise
from .generic import embedding as _embedding
from .generic import matmul as _matmul
from .generic import norm as _norm
from .generic import optimizer as _optimizer
from .generic import pool as _pool
from .generic import random as _random
from .generic import resample as _resample
from .generic import rotary as _rotary
from .generic import rows as _rows
from .generic import softmax as _softmax
from .generic import windows as _windows
from .generic.norm import merge_equal, merge_moments
from .generic.pool import lowest
from .generic.special import erf
from .precision import COMPUTE_DTYPES, ROUNDINGS, compute_missing
from .registry import KernelWarning, available, describe, operation, use
from .signs import empty_signs, pack_signs, unpack_signs
from .visible import AttentionDropout, Visible

memory.raise_malloc_thresholds()

conv_forward = operation("conv", _conv.conv_forward)
conv_backward_data = operation("conv", _conv.conv_backward_data)
conv_backward_weight = operation("conv", _conv.conv_backward_weight)

matmul = operation("matmul", _matmul.matmul)

round_to_bfloat16 = operation("elementwise", _round_to_bfloat16)

max_pool_forward = operation("pool", _pool.max_pool_forward)
max_pool_backward = operation("pool", _pool.max_pool_backward)
avg_pool_forward = operation("pool", _pool.avg_pool_forward)
avg_pool_backward = operation("pool", _pool.avg_pool_backward)
sum_pool_forward = operation("pool", _pool.sum_pool_forward)
sum_pool_backward = operation("pool", _pool.sum_pool_backward)

tap_sums = operation("pool", _resample.tap_sums)
window_means = operation("pool", _resample.window_means)
window_means_backward = operation("pool", _resample.window_means_backward)
window_maxima = operation("pool", _resample.window_maxima)
put_at = operation("pool", _resample.put_at)
take_at = operation("pool", _resample.take_at)

sample_moments = operation("norm", _norm.sample_moments)
channel_moments = operation("norm", _norm.channel_moments)
group_moments = operation("norm", _norm.group_moments)
channel_sums = operation("norm", _norm.channel_sums)
channel_normalize = operation("norm", _norm.channel_normalize)
channel_grad_sums = operation("norm", _norm.channel_grad_sums)
channel_grad_input = operation("norm", _norm.channel_grad_input)

row_moments = operation("rows", _rows.row_moments)
row_squares = operation("rows", _rows.row_squares)
row_normalize = operation("rows", _rows.row_normalize)
row_grad_sums = operation("rows", _rows.row_grad_sums)
row_grad_input = operation("rows", _rows.row_grad_input)

leaky_relu = operation("elementwise", _elementwise.leaky_relu)
leaky_relu_backward = operation("elementwise", _elementwise.leaky_relu_backward)
gelu = operation("elementwise", _elementwise.gelu)
gelu_backward = operation("elementwise", _elementwise.gelu_backward)
sigmoid = operation("elementwise", _elementwise.sigmoid)
sigmoid_backward = operation("elementwise", _elementwise.sigmoid_backward)
tanh = operation("elementwise", _elementwise.tanh)
tanh_backward = operation("elementwise", _elementwise.tanh_backward)
silu = operation("elementwise", _elementwise.silu)
silu_backward = operation("elementwise", _elementwise.silu_backward)
swiglu = operation("elementwise", _elementwise.swiglu)
swiglu_backward = operation("elementwise", _elementwise.swiglu_backward)
apply_mask = operation("elementwise", _elementwise.apply_mask)

take_rows = operation("embedding", _embedding.take_rows)
add_rows = operation("embedding", _embedding.add_rows)

rotate_pairs = operation("rotary", _rotary.rotate_pairs)

softmax = operation("softmax", _softmax.softmax)
softmax_backward = operation("softmax", _softmax.softmax_backward)
log_softmax = operation("softmax", _softmax.log_softmax)
log_softmax_backward = operation("softmax", _softmax.log_softmax_backward)
cross_entropy_forward = operation("softmax", _softmax.cross_entropy_forward)
cross_entropy_backward = operation("softmax", _softmax.cross_entropy_backward)

attention_forward = operation("attention", _attention.attention_forward)
attention_merge = operation("attention", _attention.attention_merge)
attention_backward = operation("attention", _attention.attention_backward)

window_attention_forward = operation("windows", _windows.window_attention_forward)
window_attention_backward = operation("windows", _windows.window_attention_backward)

random_uniform = operation("random", _random.random_uniform, array="like")
random_normal = operation("random", _random.random_normal, array="like")
dropout_mask = operation("random", _random.dropout_mask, array="like")

sgd_step = operation("optimizer", _optimizer.sgd_step)
adam_step = operation("optimizer", _optimizer.adam_step)
adamw_step = operation("optimizer", _optimizer.adamw_step)
add_into = operation("optimizer", _optimizer.add_into)
pack, unpack = _optimizer.pack, _optimizer.unpack

__all__ = [
    "KernelWarning", "available", "describe", "memory", "operation", "outline", "use",
    "array_module", "empty_channels_last", "is_channels_last", "last", "memory_view", "to_channels_last",
    "bfloat16_missing", "require_bfloat16", "round_to_bfloat16",
    "conv_forward", "conv_backward_data", "conv_backward_weight",
    "COMPUTE_DTYPES", "ROUNDINGS", "compute_missing", "matmul",
    "max_pool_forward", "max_pool_backward", "avg_pool_forward", "avg_pool_backward",
    "sum_pool_forward", "sum_pool_backward", "lowest", "empty_signs", "pack_signs", "unpack_signs",
    "tap_sums", "window_means", "window_means_backward", "window_maxima", "put_at", "take_at",
    "sample_moments", "channel_moments", "group_moments", "merge_equal", "merge_moments", "channel_sums",
    "channel_normalize", "channel_grad_sums", "channel_grad_input",
    "row_moments", "row_squares", "row_normalize", "row_grad_sums", "row_grad_input",
    "leaky_relu", "leaky_relu_backward", "gelu", "gelu_backward", "sigmoid", "sigmoid_backward", "tanh",
    "tanh_backward", "silu", "silu_backward", "swiglu", "swiglu_backward", "apply_mask", "erf",
    "take_rows", "add_rows", "rotate_pairs",
    "softmax", "softmax_backward", "log_softmax", "log_softmax_backward",
    "cross_entropy_forward", "cross_entropy_backward",
    "Visible", "AttentionDropout", "attention_forward", "attention_merge", "attention_backward",
    "window_attention_forward", "window_attention_backward",
    "random_uniform", "random_normal", "dropout_mask",
    "sgd_step", "adam_step", "adamw_step", "add_into", "pack", "unpack",
]
