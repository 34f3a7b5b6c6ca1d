"""Matrix products by oneDNN: of float32, or of operands rounded to bfloat16 or float16; sums and results are float32.

Small products of float32 are left to NumPy's library, which is called faster. With several threads in a process
products are then made by the pool of threads that convolutions use: two pools would wait for each other.
"""

from __future__ import annotations

import math

import numpy as np

from ...arrays import Array
from ...precision import COMPUTE_DTYPES, check_compute
from .library import OneDNNError, load
from .operands import way
from .primitive import ARGUMENT, F32, Attributes, Descriptor, Primitive, PrimitiveDescriptor, address, thread

#: Multiplications from which a product of float32 is made here.
LEAST_WORK = 1 << 20
LEAST_SIDE = 4  # fewer rows or columns are vectors, in which memory decides

_SLOW = ("ref",)


def matmul(a: Array, b: Array, compute_dtype: str = "float32") -> Array:
    """See the reference, `hpcpar.kernels.generic.matmul.matmul`."""
    if a.dtype != np.float32 or b.dtype != np.float32 or a.ndim != b.ndim or compute_dtype not in COMPUTE_DTYPES:
        return NotImplemented
    work = math.prod(a.shape) * b.shape[-1]
    if compute_dtype == "float32":
        if work < LEAST_WORK or min(a.shape[-2], b.shape[-1]) < LEAST_SIDE:
            return NotImplemented
        number = F32
    else:
        check_compute(compute_dtype, a, b)
        if work == 0:
            return NotImplemented
        number, rounded, _ = way(compute_dtype)
        a, b = rounded(a), rounded(b)
    if number == F32:
        a, b = _plain(a), _plain(b)
    product = thread().cached(("matmul", number, a.shape, a.strides, b.shape, b.strides),
                              lambda: _build(number, a, b))
    if product is None:
        return NotImplemented
    out = np.empty((*a.shape[:-1], b.shape[-1]), np.float32)
    product(address(a), address(b), address(out))
    return out


def _plain(a: Array) -> Array:
    """The array, or a copy of it if neither rows nor columns lie together, or matrices overlap."""
    rows, columns = a.shape[-2:]
    down, across = a.strides[-2:]
    item = a.itemsize
    dense = (across == item and down >= item * columns) or (down == item and across >= item * rows)
    return a if dense and (a.ndim == 2 or a.strides[0] > 0) else np.ascontiguousarray(a)


def _build(operand: int, a: Array, b: Array) -> Primitive | None:
    """The primitive for arrays that lie like these; None where oneDNN has only its slow reference."""
    library = load()
    shape = (*a.shape[:-1], b.shape[-1])
    strides = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    left, right = (Descriptor(library, x.shape, [s // x.itemsize for s in x.strides], operand) for x in (a, b))
    result = Descriptor(library, shape, strides)
    try:
        descriptor = PrimitiveDescriptor(library, "dnnl_matmul_primitive_desc_create", library.engine, left, right,
                                         None, result, Attributes(library))
    except OneDNNError:
        return None
    if descriptor.implementation.startswith(_SLOW) and math.prod(shape) * a.shape[-1] > LEAST_WORK:
        return None
    arguments = zip(("src", "weights", "dst"), (left, right, result), strict=True)
    return Primitive(library, descriptor, [(ARGUMENT[name], d.handle) for name, d in arguments])
