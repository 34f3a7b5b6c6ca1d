"""Products of bfloat16 operands, summed in float32: where the processor has them, and their rounding.

bfloat16 is the upper half of float32: 8 bits of exponent, 8 of precision. A product of two is exact in float32, so
instructions for float32 make the same products of operands rounded before, and are taken where they are faster.
"""

from __future__ import annotations

import math

import numpy as np

from . import registry
from .arrays import Array, is_device

#: What a kernel may be asked to multiply in; "float32" leaves float64 arrays in float64.
COMPUTE_DTYPES = ("float32", "bfloat16")

#: Largest relative error of a rounded number.
ROUNDING = 2.0**-9


def missing_instructions(dtype: str, features: str) -> str:
    """Why this machine does not multiply in a dtype, which takes one of the features; empty where it does."""
    if not registry.available("onednn"):
        return "it needs oneDNN: install it by pip install 'hpcpar[cpu]'"
    from .cpu.onednn.library import load

    library = load()
    if getattr(library, dtype):
        return ""
    return f"it needs a processor with {features}, and oneDNN runs with {library.isa()} here"


def bfloat16_missing() -> str:
    """Why this machine does not multiply bfloat16, in words; empty where it does."""
    return missing_instructions("bfloat16", "avx512_bf16 or amx_bf16")


def bfloat16_by_float32() -> bool:
    """Whether rounded operands are multiplied by instructions for float32, which are faster on this processor."""
    if bfloat16_missing():
        return False
    from .cpu.onednn.library import load

    return load().bfloat16_by_float32


def require_bfloat16() -> None:
    """Raise RuntimeError where this machine does not multiply bfloat16: it is never emulated instead."""
    missing = bfloat16_missing()
    if missing:
        raise RuntimeError(f"bfloat16 compute is not available: {missing}; compute in float32")


def round_to_bfloat16(a: Array) -> Array:
    """Return a float32 array with its numbers rounded to the nearest bfloat16, ties to even; a NaN stays one."""
    bits = a.view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(a), a, kept.view(np.float32))


def operands(compute_dtype: str, first: Array, second: Array) -> tuple[Array, Array]:
    """Return the operands as the reference multiplies them: rounded, if the products are of bfloat16.

    Raises
    ------
    ValueError
        For an unknown dtype, or bfloat16 of arrays other than float32.
    RuntimeError
        For bfloat16 where the processor does not have it, and on a GPU.
    """
    if compute_dtype == "float32":
        return first, second
    if compute_dtype != "bfloat16":
        raise ValueError(f"compute_dtype is one of {', '.join(COMPUTE_DTYPES)}, got {compute_dtype!r}")
    if first.dtype != np.float32 or second.dtype != np.float32:
        raise ValueError(f"bfloat16 compute takes float32 arrays, got {first.dtype} and {second.dtype}")
    if is_device(first):
        raise RuntimeError("bfloat16 compute is not available on a GPU; compute in float32")
    require_bfloat16()
    if math.prod(first.shape) == 0 or math.prod(second.shape) == 0:
        return first, second
    registry.notice("oneDNN does not serve a convolution in bfloat16; its rounded operands are multiplied in float32")
    return round_to_bfloat16(first), round_to_bfloat16(second)
