"""Matrix products of rounded operands on a device: cuBLAS multiplies two bytes and sums in float32."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, array_module
from ..precision import check_compute, rounded

_CUDA_R_32F = 0
_TYPES = {"float16": 2, "bfloat16": 14}  # CUDA_R_16F, CUDA_R_16BF
_COMPUTE_32F, _ALGORITHM_TENSOR_OP = 68, 99


def matmul(a: Array, b: Array, compute_dtype: str = "float32") -> Array:
    if compute_dtype not in _TYPES:
        return NotImplemented
    check_compute(compute_dtype, a, b)
    if a.size == 0 or b.size == 0:
        return NotImplemented
    a, b = (bits(x, compute_dtype) for x in (a, b))
    out = array_module(a).empty((*a.shape[:-1], b.shape[-1]), np.float32)
    pairs = [(a, b, out)] if a.ndim == 2 else zip(a, b, out, strict=True)
    for pair in pairs:
        _multiply(*pair, _TYPES[compute_dtype])
    return out


def bits(a: Array, compute_dtype: str) -> Array:
    """A copy in C order, rounded to a dtype; bfloat16 as the upper halves of its numbers in float32."""
    xp = array_module(a)
    if compute_dtype == "float16":
        return xp.ascontiguousarray(a).astype(np.float16)
    whole = rounded(xp.ascontiguousarray(a), "bfloat16").view(np.uint32)
    return (whole >> np.uint32(16)).astype(np.uint16)


def _multiply(a: Array, b: Array, out: Array, kind: int) -> None:
    """One product; in cuBLAS's column order it is that of the transposes, b.T times a.T."""
    from cupy.cuda import cublas, device

    (m, k), n = a.shape, b.shape[1]
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    handle = device.get_cublas_handle()
    before = cublas.getPointerMode(handle)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    try:
        cublas.gemmEx(handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, m, k, one.ctypes.data, b.data.ptr, kind, n,
                      a.data.ptr, kind, k, zero.ctypes.data, out.data.ptr, _CUDA_R_32F, n, _COMPUTE_32F,
                      _ALGORITHM_TENSOR_OP)
    finally:
        cublas.setPointerMode(handle, before)
