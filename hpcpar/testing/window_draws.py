"""Random arguments of windowed operations, as torch accepts them: convolution and pooling.

Shapes are small, so that kernels longer than a block, strides longer than the kernel, empty blocks and windows that
hang over an end are common.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar.testing.cases import Array
from hpcpar.testing.drawing import Drawn, Family, Rng, lengths, one_or_all, some, spatial_shape


def fitting(shape: tuple[int, ...], kernel: Any, dilation: Any, padding: Any) -> tuple[int, ...]:
    """Return the shape with spatial lengths grown, where they must be, to hold one window."""
    spatial = [max(n, d * (k - 1) + 1 - 2 * p) for n, k, d, p in zip(shape[2:], kernel, dilation, padding, strict=True)]
    return (*shape[:2], *spatial)


def draw_conv(rng: Rng) -> Drawn:
    """Convolutions of 1 to 3 dims with every argument."""
    ndim = int(rng.integers(1, 4))
    groups = int(rng.choice([1, 1, 2, 3]))
    channels, out = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
    shape = (int(rng.integers(1, 4)), channels, *spatial_shape(rng, ndim)[2:])
    kernel, dilation = lengths(rng, ndim, 1, 6 if ndim == 1 else 5), lengths(rng, ndim, 1, 3)
    mode = str(rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"]))
    arguments: dict[str, Any] = {"groups": groups, "dilation": one_or_all(rng, dilation), "padding_mode": mode}
    if rng.random() < 0.15:
        arguments["padding"] = str(rng.choice(["same", "valid"]))
    else:
        most = np.array(shape[2:]) - (1 if mode == "reflect" else 0)
        padding = np.minimum(rng.integers(0, 4, ndim), most if mode in ("reflect", "circular") else 3)
        arguments["padding"] = tuple(int(p) for p in padding)
        arguments["stride"] = one_or_all(rng, lengths(rng, ndim, 1, 5))
    pads = arguments["padding"] if isinstance(arguments["padding"], tuple) else (0,) * ndim
    spread = (dilation[0],) * ndim if isinstance(arguments["dilation"], int) else dilation
    shape = fitting(shape, kernel, spread, pads)
    arrays = [Array(shape), Array((out, channels // groups, *kernel), parameter=True)]
    if rng.random() < 0.5:
        arrays.append(Array((out,), parameter=True))
    return f"conv{ndim}d", arrays, arguments


def draw_conv_transpose(rng: Rng) -> Drawn:
    """Transposed convolutions of 1 to 3 dims with every argument."""
    ndim = int(rng.integers(1, 4))
    groups = int(rng.choice([1, 1, 2, 3]))
    channels, out = groups * int(rng.integers(1, 4)), int(rng.integers(1, 4))
    shape = (int(rng.integers(1, 4)), channels, *spatial_shape(rng, ndim, 9 if ndim == 1 else 6)[2:])
    kernel, dilation, stride = lengths(rng, ndim, 1, 5), lengths(rng, ndim, 1, 3), lengths(rng, ndim, 1, 5)
    reach = [(n - 1) * s + d * (k - 1) for n, s, d, k in zip(shape[2:], stride, dilation, kernel, strict=True)]
    arguments = {
        "stride": stride,
        "padding": tuple(min(p, r // 2) for p, r in zip(lengths(rng, ndim, 0, 4), reach, strict=True)),
        "output_padding": tuple(int(rng.integers(0, max(s, d))) for s, d in zip(stride, dilation, strict=True)),
        "groups": groups,
        "dilation": dilation,
    }
    arrays = [Array(shape), Array((channels, out, *kernel), parameter=True)]
    if rng.random() < 0.5:
        arrays.append(Array((out * groups,), parameter=True))
    return f"conv_transpose{ndim}d", arrays, arguments


def draw_max_pool(rng: Rng) -> Drawn:
    """Max pooling with every argument, values with ties, with and without indices."""
    ndim = int(rng.integers(1, 4))
    kernel, dilation = lengths(rng, ndim, 1, 5), lengths(rng, ndim, 1, 3)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    arguments = some(
        rng,
        {
            "stride": one_or_all(rng, lengths(rng, ndim, 1, 6)),
            "padding": tuple(int(rng.integers(0, r // 2 + 1)) for r in reach),
            "ceil_mode": bool(rng.integers(2)),
            "return_indices": bool(rng.integers(2)),
        },
    )
    arguments |= {"kernel_size": kernel, "dilation": dilation}
    shape = fitting(spatial_shape(rng, ndim), kernel, dilation, arguments.get("padding", (0,) * ndim))
    return f"max_pool{ndim}d", [Array(shape, values=str(rng.choice(["normal", "ties"])))], arguments


def draw_avg_pool(rng: Rng) -> Drawn:
    """Average pooling with every argument."""
    ndim = int(rng.integers(1, 4))
    kernel = lengths(rng, ndim, 1, 5)
    optional = {
        "stride": one_or_all(rng, lengths(rng, ndim, 1, 6)),
        "padding": tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel),
        "ceil_mode": bool(rng.integers(2)),
        "count_include_pad": bool(rng.integers(2)),
    }
    if ndim > 1 and rng.random() < 0.3:
        optional["divisor_override"] = int(rng.integers(1, 9))
    arguments = some(rng, optional) | {"kernel_size": kernel}
    shape = fitting(spatial_shape(rng, ndim), kernel, (1,) * ndim, arguments.get("padding", (0,) * ndim))
    return f"avg_pool{ndim}d", [Array(shape)], arguments


WINDOWS: dict[str, Family] = {
    "conv": Family(draw_conv, 3),
    "conv_transpose": Family(draw_conv_transpose, 2),
    "max_pool": Family(draw_max_pool, 2),
    "avg_pool": Family(draw_avg_pool, 2),
}
