"""Matrix products."""

from __future__ import annotations

import math

import numpy as np

from .. import registry
from ..arrays import Array
from ..precision import check_compute, rounded


def matmul(a: Array, b: Array, compute_dtype: str = "float32") -> Array:
    """Product of matrices, or of as many pairs of them.

    Parameters
    ----------
    a, b : arrays (M, K) and (K, N), or (B, M, K) and (B, K, N)
        Any strides and sizes.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which operands of float32 are multiplied: rounded to it. Sums and the result are float32. Other arrays are
        multiplied as they are, by "float32".

    Returns
    -------
    array (M, N) or (B, M, N), C order.

    Raises
    ------
    ValueError
        For an unknown dtype, or arrays other than float32 with a narrower one.
    RuntimeError
        Where the processor does not multiply in that dtype: it is never emulated instead.
    """
    if compute_dtype != "float32":
        check_compute(compute_dtype, a, b)
        if math.prod(a.shape) and math.prod(b.shape):
            registry.notice(f"a product in {compute_dtype} has no kernel here; its rounded operands are multiplied in "
                            f"float32")
        a, b = rounded(a, compute_dtype), rounded(b, compute_dtype)
    return np.matmul(a, b)
