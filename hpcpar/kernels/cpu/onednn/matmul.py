"""Matrix products by oneDNN: of float32, or of operands rounded to bfloat16 or float16; sums and results are float32.

Small products of float32 are left to NumPy's library, which is called faster. With several threads in a process
products are then made by the pool of threads that convolutions use: two pools would wait for each other.
"""

from __future__ import annotations

import math

import numpy as np

from ...arrays import Array, memory_view
from ...precision import check_compute
from .library import OneDNNError, load
from .primitive import ARGUMENT, BF16, F16, F32, Attributes, Descriptor, Primitive, PrimitiveDescriptor, address, thread

#: Multiplications from which a product of float32 is made here.
LEAST_WORK = 1 << 20
LEAST_SIDE = 4  # fewer rows or columns are vectors, in which memory decides

_NUMBERS = {"float32": F32, "bfloat16": BF16, "float16": F16}
_SLOW = ("ref",)


def matmul(a: Array, b: Array, compute_dtype: str = "float32") -> Array:
    """See the reference, `hpcpar.kernels.generic.matmul.matmul`."""
    if a.dtype != np.float32 or b.dtype != np.float32 or a.ndim != b.ndim or compute_dtype not in _NUMBERS:
        return NotImplemented
    work = math.prod(a.shape) * b.shape[-1]
    if compute_dtype == "float32":
        if work < LEAST_WORK or min(a.shape[-2], b.shape[-1]) < LEAST_SIDE:
            return NotImplemented
        a, b = _plain(a), _plain(b)
    else:
        check_compute(compute_dtype, a, b)
        if work == 0:
            return NotImplemented
        a, b = (_narrowed(x, compute_dtype) for x in (a, b))
    product = thread().cached(("matmul", compute_dtype, a.shape, a.strides, b.shape, b.strides),
                              lambda: _build(compute_dtype, a, b))
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


def _narrowed(a: Array, compute_dtype: str) -> Array:
    """A copy rounded to a dtype, its bits held as uint16, in the same memory order."""
    if memory_view(a) is None:
        a = np.ascontiguousarray(a)
    made = np.empty_like(a, np.uint16)
    convert = thread().cached((compute_dtype, a.size), lambda: _conversion(compute_dtype, a.size))
    convert(address(a), address(made))
    return made


def _conversion(compute_dtype: str, size: int) -> Primitive:
    library = load()
    source, target = (Descriptor(library, (size,), (1,), number) for number in (F32, _NUMBERS[compute_dtype]))
    descriptor = PrimitiveDescriptor(library, "dnnl_reorder_primitive_desc_create", source, library.engine, target,
                                     library.engine, Attributes(library))
    return Primitive(library, descriptor, [(ARGUMENT["src"], source.handle), (ARGUMENT["dst"], target.handle)])


def _build(compute_dtype: str, a: Array, b: Array) -> Primitive | None:
    """The primitive for arrays that lie like these; None where oneDNN has only its slow reference."""
    library = load()
    shape = (*a.shape[:-1], b.shape[-1])
    strides = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    operand = _NUMBERS[compute_dtype]
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
