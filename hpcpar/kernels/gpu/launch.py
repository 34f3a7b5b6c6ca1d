"""Compiling and launching the CUDA kernels of this folder.

Each kernel is a loop over independent work items, ``EACH(i, n)``, strided by the number of threads: it is right for any
grid, also for one thread on a CPU, which is how the tests run these sources where there is no device. T is the dtype of
the arrays. No kernel adds atomically: results do not depend on the order of threads.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

THREADS = 256
MOST_BLOCKS = 1 << 16

#: What every source starts with.
PRELUDE = r"""
typedef long long index_t;
#define EACH(i, n) for (index_t i = blockIdx.x * (index_t)blockDim.x + threadIdx.x; i < (n); \
                        i += (index_t)blockDim.x * gridDim.x)
"""

C_TYPES = {"f": "float", "d": "double"}


def served(*arrays: Any) -> bool:
    """Whether all arrays are of one dtype that has kernels."""
    return arrays[0].dtype.char in C_TYPES and all(a.dtype == arrays[0].dtype for a in arrays)


@functools.cache
def module(source: str, kind: str) -> Any:
    """The compiled module of a source for a dtype; CuPy keeps compiled code on disk."""
    import cupy

    return cupy.RawModule(code=code(source, kind), options=("--std=c++14",))


def code(source: str, kind: str) -> str:
    """The whole text for one dtype."""
    return f"typedef {C_TYPES[kind]} T;{PRELUDE}{source}"


def launch(source: str, name: str, dtype: np.dtype, items: int, *arguments: Any) -> None:
    """Run a kernel over a number of work items, passed as its last argument.

    Python ints become 64-bit integers, floats numbers of the dtype; arrays pass their address, so they must be dense.
    """
    if items == 0:
        return
    typed = tuple(np.int64(a) if isinstance(a, int) else dtype.type(a) if isinstance(a, float) else a
                  for a in arguments)
    blocks = min(MOST_BLOCKS, -(-items // THREADS))
    module(source, dtype.char).get_function(name)((blocks,), (THREADS,), (*typed, np.int64(items)))
