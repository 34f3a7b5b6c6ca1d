"""Modules: parameters and buffers with names, shapes and defaults as in torch, under layouts.

Weights are functions of (seed, stream, global index), so a model starts alike under every layout and on every number of
ranks. A module with a `layout` brings its input there; what that moved is listed by `relayouts`.
"""

from hpcpar.nn import init
from hpcpar.nn.activation import (
    GELU,
    Dropout,
    Flatten,
    Identity,
    LeakyReLU,
    LogSoftmax,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from hpcpar.nn.compute import set_compute_dtype
from hpcpar.nn.container import ModuleDict, ModuleList, Sequential
from hpcpar.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from hpcpar.nn.defaults import default_dtype, get_default_dtype, set_default_dtype
from hpcpar.nn.embedding import Embedding
from hpcpar.nn.linear import Linear
from hpcpar.nn.loss import CrossEntropyLoss, DiceLoss, L1Loss, MSELoss
from hpcpar.nn.module import Module, Removable, relayouts
from hpcpar.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
)
from hpcpar.nn.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    Upsample,
)
from hpcpar.nn.recompute import recompute
from hpcpar.nn.spatial import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    CircularPad1d,
    CircularPad2d,
    CircularPad3d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    LocalResponseNorm,
    LPPool1d,
    LPPool2d,
    LPPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    PixelShuffle,
    PixelUnshuffle,
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
    RMSNorm,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
)
from hpcpar.tensors import Parameter

__all__ = [
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
    "CircularPad1d", "CircularPad2d", "CircularPad3d", "ConstantPad1d", "ConstantPad2d", "ConstantPad3d", "Conv1d",
    "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "CrossEntropyLoss", "DiceLoss",
    "Dropout", "Embedding", "Flatten", "GELU", "GroupNorm", "Identity", "InstanceNorm1d", "InstanceNorm2d",
    "InstanceNorm3d", "L1Loss", "LPPool1d", "LPPool2d", "LPPool3d", "LayerNorm", "LeakyReLU", "Linear",
    "LocalResponseNorm", "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d", "MaxPool3d", "MaxUnpool1d", "MaxUnpool2d",
    "MaxUnpool3d", "Module", "ModuleDict", "ModuleList", "Parameter", "PixelShuffle", "PixelUnshuffle", "RMSNorm",
    "ReLU", "ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "Removable", "ReplicationPad1d",
    "ReplicationPad2d", "ReplicationPad3d", "Sequential", "SiLU", "Sigmoid", "Softmax", "Tanh", "Upsample", "ZeroPad1d",
    "ZeroPad2d", "ZeroPad3d", "default_dtype", "get_default_dtype", "init", "recompute", "relayouts",
    "set_compute_dtype", "set_default_dtype",
]  # fmt: skip
