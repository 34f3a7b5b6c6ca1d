"""In which dtype products are made: float32, or operands rounded to bfloat16 or float16 with sums in float32.

A product of two rounded numbers is exact in float32. bfloat16 has the range of float32; float16 has 3 bits more and
ends at 65504, so that gradients want a scaled loss (`hpcpar.optim.GradScaler`).
"""

from __future__ import annotations

import math

import numpy as np

from . import registry
from .arrays import Array, array_module, is_device
from .bfloat16 import bfloat16_missing, missing_instructions, round_to_bfloat16

#: What matrix products and attention may be asked to multiply in; "float32" leaves float64 arrays in float64.
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")

#: Largest relative error of a rounded number.
ROUNDINGS = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-11}


def compute_missing(compute_dtype: str) -> str:
    """Why this machine's processor does not multiply in a dtype, in words; empty where it does."""
    if compute_dtype == "bfloat16":
        return bfloat16_missing()
    return "" if compute_dtype == "float32" else missing_instructions("float16", "avx512_fp16")


def check_compute(compute_dtype: str, first: Array, second: Array) -> None:
    """Raise where products of two arrays are not made in a dtype: they are never emulated instead.

    Raises
    ------
    ValueError
        For an unknown dtype, or arrays other than float32 with a narrower one.
    RuntimeError
        Where the processor does not have it.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype is one of {', '.join(COMPUTE_DTYPES)}, got {compute_dtype!r}")
    if compute_dtype == "float32":
        return
    if first.dtype != np.float32 or second.dtype != np.float32:
        raise ValueError(f"{compute_dtype} compute takes float32 arrays, got {first.dtype} and {second.dtype}")
    missing = "" if is_device(first) else compute_missing(compute_dtype)
    if missing:
        raise RuntimeError(f"{compute_dtype} compute is not available: {missing}; compute in float32")


def allow_rounding(what: str, compute_dtype: str, first: Array, second: Array) -> None:
    """Check that products of two arrays may be made in a dtype, and say that NumPy makes them by `product`."""
    check_compute(compute_dtype, first, second)
    if compute_dtype != "float32" and first.size and second.size:
        registry.notice(f"{what} in {compute_dtype} has no kernel here; its rounded operands are multiplied in float32")


def product(a: Array, b: Array, compute_dtype: str) -> Array:
    """``a @ b`` of operands rounded to a dtype, summed in float32."""
    return np.matmul(rounded(a, compute_dtype), rounded(b, compute_dtype))


def rounded(a: Array, compute_dtype: str) -> Array:
    """A float32 array with its numbers rounded to a dtype; what float16 cannot hold becomes infinite."""
    if compute_dtype == "float32" or math.prod(a.shape) == 0:
        return a
    if compute_dtype == "bfloat16":
        return round_to_bfloat16(array_module(a).ascontiguousarray(a))
    with np.errstate(over="ignore"):
        return a.astype(np.float16).astype(np.float32)
