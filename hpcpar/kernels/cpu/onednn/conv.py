"""Convolution by oneDNN: float32 arrays, channels last, all three passes.

Products are of float32, or of operands rounded to bfloat16 first; sums and results are float32 either way.

Arrays are dense: the fast implementations read no views with gaps, so those are copied first (a cut along the
slowest dim of one sample has none). Weights stay in their plain array and are brought into each pass's own format at
each use, which costs less than a hundredth of the convolution. oneDNN asks for sizes and paddings that fit together
exactly; the padding after the input follows from the sizes, and what a negative padding cuts off is cut off first.
Calls that are not served here are declined, by NotImplemented.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays import Array, empty_channels_last, is_channels_last, to_channels_last, zeros_channels_last
from ...generic.conv import check
from ...registry import notice
from .library import Library, OneDNNError, load
from .operands import way
from .primitive import (
    ARGUMENT,
    F32,
    Attributes,
    Descriptor,
    Dims,
    Primitive,
    PrimitiveDescriptor,
    address,
    reorder,
    thread,
)

#: Names of implementations that are some 100 times slower, and the multiplications from which they are refused.
SLOW = ("ref",)
REFUSE_ABOVE = 1e6

_FORWARD_TRAINING, _DIRECT = 64, 1

Padding = Sequence[tuple[int, int]]


def conv_forward(x: Array, w: Array, bias: Array | None, stride: Sequence[int], padding: Padding,
                 dilation: Sequence[int], groups: int = 1, out: Array | None = None, slope: float | None = None,
                 accumulate: bool = False, compute_dtype: str = "float32") -> Array:
    """See the reference, `hpcpar.kernels.generic.conv.conv_forward`."""
    shape = (x.shape[0], w.shape[0], *check(x, w, stride, padding, dilation, groups))
    if not _served(x, w, compute_dtype) or (out is not None and out.shape != shape):
        return NotImplemented
    cut, before, after = fit(x.shape[2:], w.shape[2:], shape[2:], tuple(stride), tuple(lo for lo, _ in padding),
                             tuple(dilation))
    source = to_channels_last(x if cut is None else x[cut])
    if 0 in shape or 0 in source.shape or 0 in w.shape:
        return NotImplemented
    dense = out is not None and out.dtype == np.float32 and is_channels_last(out)
    if accumulate and not dense:
        return NotImplemented
    number, rounded, weight = way(compute_dtype)
    if number == F32 and groups == 1 and (out is None or dense):
        parts = channel_parts(w.shape[1], w.shape[0], math.prod(shape[2:]))
        if len(parts) > 1:
            geometry = (stride, padding, dilation)
            return _forward_by_parts(x, w, bias, geometry, out, slope, accumulate, compute_dtype, parts)
    w = weight(w)
    pass_ = _prepare("forward", source.shape, w, shape, stride, before, after, dilation, groups, bias is not None,
                     slope, accumulate, number=number)
    if pass_ is None:
        return NotImplemented
    source = rounded(source)
    y = out if dense else empty_channels_last(shape, np.float32)
    if bias is None:
        pass_.primitive(address(source), pass_.weights(w), address(y))
    else:
        bias = np.ascontiguousarray(bias, np.float32)
        pass_.primitive(address(source), pass_.weights(w), address(bias), address(y))
    if out is None or dense:
        return y
    out[...] = y
    return out


@functools.lru_cache(4096)
def channel_parts(channels: int, filters: int, positions: int) -> tuple[tuple[int, int], ...]:
    """The ranges of input channels to convolve one after another.

    oneDNN 3.2 (``brgconv:avx512_core``) falls to some 100 GFLOP/s, where it has 160 otherwise, for these numbers of
    filters and more than 128 channels at 4000 positions and more. At 1000 parts are as fast as the whole or somewhat
    faster (measured with kernels of 3^3).
    """
    slow = channels >= 192 and 64 <= filters < 160 and positions >= 1 << 10
    count = -(-channels // 128) if slow else 1
    return tuple((i * channels // count, (i + 1) * channels // count) for i in range(count))


def _forward_by_parts(x: Array, w: Array, bias: Array | None, geometry: tuple, out: Array | None, slope: float | None,
                      accumulate: bool, compute_dtype: str, parts: Sequence[tuple[int, int]]) -> Array:
    """The convolutions of ranges of channels, added up where the result lies; all are served or the first is not."""
    for a, b in parts:
        last = b == w.shape[1]
        out = conv_forward(x[:, a:b], w[:, a:b], bias if a == 0 else None, *geometry, 1, out, slope if last else None,
                           accumulate or a > 0, compute_dtype)
        if out is NotImplemented:
            break
    return out


def conv_backward_data(dy: Array, w: Array, x_shape: Sequence[int], stride: Sequence[int], padding: Padding,
                       dilation: Sequence[int], groups: int = 1, compute_dtype: str = "float32") -> Array:
    """See the reference, `hpcpar.kernels.generic.conv.conv_backward_data`."""
    x_shape = tuple(x_shape)
    if not _served(dy, w, compute_dtype) or 0 in dy.shape or 0 in x_shape or 0 in w.shape:
        return NotImplemented
    cut, before, after = fit(x_shape[2:], w.shape[2:], dy.shape[2:], tuple(stride), tuple(lo for lo, _ in padding),
                             tuple(dilation))
    inner = x_shape if cut is None else (*x_shape[:2], *(s.stop - s.start for s in cut[2:]))
    if 0 in inner:
        return NotImplemented
    source = to_channels_last(dy)
    number, rounded, weight = way(compute_dtype)
    w = weight(w)
    pass_ = _prepare("backward_data", source.shape, w, inner, stride, before, after, dilation, groups, number=number)
    if pass_ is None:
        return NotImplemented
    source = rounded(source)
    part = empty_channels_last(inner, np.float32)
    pass_.primitive(address(source), pass_.weights(w), address(part))
    if cut is None:
        return part
    dx = zeros_channels_last(x_shape, np.float32)
    dx[cut] = part
    return dx


def conv_backward_weight(x: Array, dy: Array, w_shape: Sequence[int], stride: Sequence[int], padding: Padding,
                         dilation: Sequence[int], groups: int = 1, compute_dtype: str = "float32") -> Array:
    """See the reference, `hpcpar.kernels.generic.conv.conv_backward_weight`."""
    w_shape = tuple(w_shape)
    if not _served(x, dy, compute_dtype) or 0 in dy.shape or 0 in x.shape or 0 in w_shape:
        return NotImplemented
    cut, before, after = fit(x.shape[2:], w_shape[2:], dy.shape[2:], tuple(stride), tuple(lo for lo, _ in padding),
                             tuple(dilation))
    source, grad = to_channels_last(x if cut is None else x[cut]), to_channels_last(dy)
    if 0 in source.shape:
        return NotImplemented
    doubtful = _doubtful(source.shape[2:], w_shape[2:], tuple(stride), tuple(dilation), before, after)
    if any(doubtful):
        source, before, after = _padded(source, doubtful, before, after)
    nd = x.ndim - 2
    dw = np.empty((*w_shape[2:], w_shape[1], w_shape[0]), np.float32).transpose(nd + 1, nd, *range(nd))
    number, rounded, _ = way(compute_dtype)
    pass_ = _prepare("backward_weights", source.shape, dw, grad.shape, stride, before, after, dilation, groups,
                     number=number)
    if pass_ is None:
        return NotImplemented
    source, grad = rounded(source), rounded(grad)
    if pass_.convert is None:
        pass_.primitive(address(source), address(grad), address(dw))
    else:
        own = thread().buffer("weights", pass_.nbytes)
        pass_.primitive(address(source), address(grad), own)
        pass_.convert(own, address(dw))
    return dw


def _served(first: Array, second: Array, compute_dtype: str) -> bool:
    """Whether products of these operands are made here: of float32 arrays, in a dtype that the processor has."""
    return first.dtype == second.dtype == np.float32 and (
        compute_dtype == "float32" or (compute_dtype == "bfloat16" and load().bfloat16))


@functools.lru_cache(4096)
def fit(spatial: tuple[int, ...], kernel: tuple[int, ...], out: tuple[int, ...], stride: tuple[int, ...],
        lo: tuple[int, ...], dilation: tuple[int, ...],
        ) -> tuple[tuple[slice, ...] | None, tuple[int, ...], tuple[int, ...]]:
    """How the input must be cut for oneDNN (None: not at all), and the paddings with which the sizes fit exactly.

    A negative padding after the input is kept where it is smaller than a stride: oneDNN knows unused last inputs.
    """
    cuts, before, after = [], [], []
    for n, k, o, s, b, d in zip(spatial, kernel, out, stride, lo, dilation, strict=True):
        start = min(n, max(0, -b))
        need = (o - 1) * s + (k - 1) * d + 1 - max(0, b)  # inputs from `start` on up to the last one read
        stop = n if need - (n - start) > -s else start + max(0, need)
        cuts.append(slice(start, stop))
        before.append(max(0, b))
        after.append(need - (stop - start))
    whole = all(c.start == 0 and c.stop == n for c, n in zip(cuts, spatial, strict=True))
    return None if whole else (slice(None), slice(None), *cuts), tuple(before), tuple(after)


@functools.lru_cache(4096)
def _doubtful(spatial: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...],
              before: tuple[int, ...], after: tuple[int, ...]) -> tuple[bool, ...]:
    """The dims whose padding oneDNN (3.2, its ``jit`` kernels) may get wrong in the gradient of the weight.

    Taps come out wrong, or are not written, where a window hangs over both ends of the input, and with a stride where
    the padding is wider than half of the kernel.
    """
    found = []
    for n, k, s, d, b, a in zip(spatial, kernel, stride, dilation, before, after, strict=True):
        extent = (k - 1) * d + 1
        found.append(max(a, b) > 0 and (n < extent or (s > 1 and max(a, b) > extent // 2)))
    return tuple(found)


def _padded(source: Array, dims: Sequence[bool], before: Sequence[int], after: Sequence[int],
            ) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """The input with the zeros of its padding in memory in some dims, and the paddings that are left."""
    inside = [(b, max(0, a)) if there else (0, 0) for there, b, a in zip(dims, before, after, strict=True)]
    sizes = tuple(n + b + a for n, (b, a) in zip(source.shape[2:], inside, strict=True))
    whole = zeros_channels_last((*source.shape[:2], *sizes), source.dtype)
    whole[(..., *(slice(b, b + n) for n, (b, _) in zip(source.shape[2:], inside, strict=True)))] = source
    left = [(b - i, a - j) for b, a, (i, j) in zip(before, after, inside, strict=True)]
    return whole, tuple(b for b, _ in left), tuple(a for _, a in left)


class _Pass:
    """One pass of one layer: its primitive, and the primitive that converts the weights if the formats differ."""

    def __init__(self, primitive: Primitive, convert: Primitive | None, nbytes: int) -> None:
        self.primitive, self.convert, self.nbytes = primitive, convert, nbytes

    def weights(self, w: Array) -> int:
        """Address of the weights in the primitive's format."""
        if self.convert is None:
            return address(w)
        own = thread().buffer("weights", self.nbytes)
        self.convert(address(w), own)
        return own


def _prepare(kind: str, source: tuple[int, ...], w: Array, other: tuple[int, ...], stride: Sequence[int],
             before: tuple[int, ...], after: tuple[int, ...], dilation: Sequence[int], groups: int,
             bias: bool = False, slope: float | None = None, accumulate: bool = False,
             number: int = F32) -> _Pass | None:
    """The pass for arrays of these shapes, from the thread's cache; None where oneDNN has no fast implementation.

    ``source`` is x, or dY for the gradient of x; ``other`` is dY for the gradient of the weight, or the result.
    """
    key = (kind, source, w.shape, w.strides, other, tuple(stride), before, after, tuple(dilation), groups, bias, slope,
           accumulate, number)
    return thread().cached(key, lambda: _build(*key))


def _build(kind, source, w_shape, w_strides, other, stride, before, after, dilation, groups, bias, slope,
           accumulate, number) -> _Pass | None:
    library = load()
    gradient = kind == "backward_weights"
    first = Descriptor(library, source, _dense(source), number)
    second = Descriptor(library, other, _dense(other), number if gradient else F32)
    x, y = (second, first) if kind == "backward_data" else (first, second)
    sizes, strides = w_shape, tuple(s // 4 for s in w_strides)
    if groups > 1:
        sizes = (groups, w_shape[0] // groups, *w_shape[1:])
        strides = (strides[0] * sizes[1], *strides)
    plain, wanted = Descriptor(library, sizes, strides), Descriptor(library, sizes, None, F32 if gradient else number)
    shift = Descriptor(library, (w_shape[0],), (1,)) if bias else None
    geometry = (Dims(*stride), Dims(*(d - 1 for d in dilation)), Dims(*before), Dims(*after))
    try:
        ahead = (x, wanted, shift, y)
        if number != F32 and kind != "forward":  # the forward pass that belongs to this one, whose result is float32
            (x_shape, y_shape) = (other, source) if kind == "backward_data" else (source, other)
            ahead = (Descriptor(library, x_shape, _dense(x_shape), number), Descriptor(library, sizes, None, number),
                     None, Descriptor(library, y_shape, _dense(y_shape)))
        forward = PrimitiveDescriptor(
            library, "dnnl_convolution_forward_primitive_desc_create", library.engine, _FORWARD_TRAINING, _DIRECT,
            *ahead, *geometry, Attributes(library, slope, accumulate))
        descriptor = forward if kind == "forward" else PrimitiveDescriptor(
            library, f"dnnl_convolution_{kind}_primitive_desc_create", library.engine, _DIRECT, x, wanted,
            *((shift, y) if gradient else (y,)), *geometry, forward, Attributes(library))
    except OneDNNError:
        return None
    work = source[0] * math.prod(min(a, b) for a, b in zip(source[2:], other[2:], strict=True)) * math.prod(w_shape)
    if descriptor.implementation.startswith(SLOW) and work > REFUSE_ABOVE:
        notice(f"oneDNN {library.version} has only the slow implementation {descriptor.implementation!r} for the "
               f"{kind} pass of a convolution of {source} with weights {w_shape}; it runs in NumPy")
        return None
    return _finish(library, kind, descriptor, first, second, plain, shift)


def _finish(library: Library, kind: str, descriptor: PrimitiveDescriptor, first: Descriptor, second: Descriptor,
            plain: Descriptor, shift: Descriptor | None) -> _Pass:
    """The primitives of a pass; their arguments are (source, second source or weights, [bias], result)."""
    role = "diff_weights" if kind == "backward_weights" else "weights"
    native: Any = descriptor.memory(role)
    names = {"forward": ("src", "weights", "dst"), "backward_data": ("diff_dst", "weights", "diff_src"),
             "backward_weights": ("src", "diff_dst", "diff_weights")}[kind]
    handles = [first.handle, second.handle, native] if kind == "backward_weights" else [
        first.handle, native, second.handle]
    arguments = [(ARGUMENT[name], handle) for name, handle in zip(names, handles, strict=True)]
    if shift is not None:
        arguments.insert(2, (ARGUMENT["bias"], shift.handle))
    convert = None
    if not library.c.dnnl_memory_desc_equal(plain.handle, native):
        pair = (native, plain.handle) if kind == "backward_weights" else (plain.handle, native)
        convert = reorder(library, *pair)
    return _Pass(Primitive(library, descriptor, arguments), convert, descriptor.size(role))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a dense channels-last array."""
    n, c, *spatial = shape
    steps, step = [], c
    for size in reversed(spatial):
        steps.append(step)
        step *= size
    return (step, 1, *reversed(steps))

