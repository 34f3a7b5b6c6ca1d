"""All operations under one name, as torch.nn.functional and torch have them."""

from hpcpar.ops.activation import dropout, gelu, leaky_relu, log_softmax, relu, sigmoid, silu, softmax, swiglu
from hpcpar.ops.adaptive import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
)
from hpcpar.ops.attention import scaled_dot_product_attention
from hpcpar.ops.conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from hpcpar.ops.elementwise import (
    abs,
    add,
    clamp,
    cos,
    div,
    exp,
    log,
    maximum,
    minimum,
    mul,
    neg,
    pow,
    sin,
    sqrt,
    sub,
    tanh,
    to,
    where,
)  # fmt: skip
from hpcpar.ops.embedding import embedding
from hpcpar.ops.gather import crop, flip, pad, roll
from hpcpar.ops.grid_attention import grid_attention
from hpcpar.ops.join import cat, stack
from hpcpar.ops.layer_norm import layer_norm
from hpcpar.ops.linear import einsum, linear, matmul
from hpcpar.ops.loss import cross_entropy, dice_loss, l1_loss, mse_loss, overlap_sums
from hpcpar.ops.norm import batch_norm, group_norm, instance_norm
from hpcpar.ops.norm_rows import local_response_norm, rms_norm
from hpcpar.ops.pool import (
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    lp_pool1d,
    lp_pool2d,
    lp_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from hpcpar.ops.reduction import amax, amin, argmax, argmin, logsumexp, mean, std, sum, var
from hpcpar.ops.repartition import explain, repartition, resolve
from hpcpar.ops.resample import interpolate, upsample
from hpcpar.ops.rotary import rotary
from hpcpar.ops.shape import chunk, expand, flatten, narrow, permute, reshape, split, squeeze, transpose, unsqueeze
from hpcpar.ops.shuffle import pixel_shuffle, pixel_unshuffle
from hpcpar.ops.unpool import max_unpool1d, max_unpool2d, max_unpool3d
from hpcpar.ops.window_attention import window_attention
from hpcpar.ops.windows import window_merge, window_partition

__all__ = [name for name in dir() if not name.startswith("_")]
