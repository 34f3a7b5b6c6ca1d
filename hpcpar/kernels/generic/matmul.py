"""Matrix products."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..precision import allow_rounding, product


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
    if compute_dtype == "float32":
        return np.matmul(a, b)
    allow_rounding("a product", compute_dtype, a, b)
    return product(a, b, compute_dtype)
