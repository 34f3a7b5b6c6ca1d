"""How operands are brought into the dtype in which oneDNN is to multiply them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ... import registry, round_to_bfloat16
from ...arrays import Array, memory_view
from .library import load
from .primitive import BF16, F16, F32, Descriptor, Primitive, address, reorder, thread


class Way(NamedTuple):
    """The number of oneDNN's dtype, and what is done to activations and to weights before they are given to it.

    oneDNN narrows weights by itself where it brings them into its own format.
    """

    number: int
    activation: Callable[[Array], Array]
    weight: Callable[[Array], Array]


def way(compute_dtype: str) -> Way:
    """How products are made in "float32", "bfloat16" or "float16", which the processor has."""
    if compute_dtype == "bfloat16" and load().bfloat16_by_float32:
        registry.notice("numbers rounded to bfloat16 are multiplied by instructions for float32, which are faster than "
                        "those for bfloat16 on this processor (HPCPAR_BFLOAT16=native takes the latter)")
        return _BY_FLOAT32
    return _WAYS[compute_dtype]


def _same(a: Array) -> Array:
    return a


def _narrowed(number: int, a: Array) -> Array:
    """A copy rounded to two bytes, its bits held as uint16, in the same memory order if the array has no gaps."""
    if memory_view(a) is None:
        a = np.ascontiguousarray(a)
    made = np.empty_like(a, np.uint16)
    thread().cached((number, a.size), lambda: _conversion(number, a.size))(address(a), address(made))
    return made


def _conversion(number: int, size: int) -> Primitive:
    library = load()
    source, target = (Descriptor(library, (size,), (1,), dtype) for dtype in (F32, number))
    return reorder(library, source.handle, target.handle)


_WAYS = {"float32": Way(F32, _same, _same), "bfloat16": Way(BF16, functools.partial(_narrowed, BF16), _same),
         "float16": Way(F16, functools.partial(_narrowed, F16), _same)}
_BY_FLOAT32 = Way(F32, round_to_bfloat16, round_to_bfloat16)
