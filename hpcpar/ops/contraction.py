"""The local mathematics of einsum: one or two arrays, as one (batched) matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from hpcpar import kernels

SMALL = 1 << 20
"""Multiplications below which NumPy's product is called at once: choosing a kernel would take a part of its time."""


@dataclass(frozen=True, eq=False)
class Equation:
    """An einsum equation, taken apart: the labels of each operand and of the result.

    `parse` returns the same object for the same text, so that equations are compared by identity, which is fast.
    """

    operands: tuple[str, ...]
    result: str
    compute_dtype: str = "float32"  # in which operands are multiplied, see `hpcpar.kernels.matmul`

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}"


@lru_cache(maxsize=1024)
def parse(equation: str, ndims: tuple[int, ...], compute_dtype: str = "float32") -> Equation:
    """Return the labels of an explicit equation (``"nk,ok->no"``); no repeated label in one operand, no ``...``."""
    text = equation.replace(" ", "")
    left, arrow, result = text.partition("->")
    operands = tuple(left.split(","))
    if not arrow or not all(part.isalpha() or not part for part in (*operands, result)):
        raise ValueError(f"einsum takes explicit equations of letters such as 'nk,ok->no', got {equation!r}")
    if len(operands) != len(ndims):
        raise ValueError(f"einsum {equation!r} has {len(operands)} operands, {len(ndims)} were given")
    if len(operands) > 2:
        raise ValueError(f"einsum {equation!r}: at most two operands; apply it pairwise")
    for labels, ndim in zip(operands, ndims, strict=True):
        if len(labels) != ndim:
            raise ValueError(f"einsum {equation!r}: {labels!r} stands for {len(labels)} dims, the operand has {ndim}")
    for labels in (*operands, result):
        if len(set(labels)) != len(labels):
            raise ValueError(f"einsum {equation!r}: a label appears twice in {labels!r}")
    unknown = set(result) - set("".join(operands))
    if unknown:
        raise ValueError(f"einsum {equation!r}: the result names {min(unknown)!r}, no operand has it")
    if compute_dtype not in kernels.COMPUTE_DTYPES:
        raise ValueError(
            f"einsum {equation!r}: compute_dtype is one of {', '.join(kernels.COMPUTE_DTYPES)}, got {compute_dtype!r}"
        )
    return Equation(operands, result, compute_dtype)


class Contraction:
    """Evaluates one equation on local arrays by transposing, reshaping and one matrix product.

    Labels are sorted once: those of both operands and the result are a batch of products, `left` and `right` are the
    rows and columns that survive, `inner` is summed in the product, and a label of one operand alone is summed before.
    """

    def __init__(self, equation: Equation) -> None:
        self.equation = equation
        first, second = (*equation.operands, "")[:2]
        out = equation.result
        self.alone = tuple(
            tuple(labels.index(c) for c in labels if c not in out and c not in other)
            for labels, other in ((first, second), (second, first))
        )
        a = "".join(c for c in first if c in out or c in second)
        b = "".join(c for c in second if c in out or c in first)
        batch = [c for c in a if c in b and c in out]
        left = [c for c in a if c not in b]
        inner = [c for c in a if c in b and c not in out]
        right = [c for c in b if c not in a]
        self.counts = len(batch), len(left), len(inner)
        whole = not batch and not any(self.alone)
        self.is_float32 = equation.compute_dtype == "float32"
        self.is_matrix_product = whole and len(left) == len(inner) == len(right) == 1
        self.single = len(equation.operands) == 1
        self.order_a = _order(a, a if self.single else [*batch, *left, *inner])
        self.order_b = _order(b, [*batch, *inner, *right])
        self.order_out = _order([*batch, *left, *right], out)

    def __call__(self, a: Any, b: Any = None) -> Any:
        if self.is_matrix_product:
            a, b = a if self.order_a is None else a.T, b if self.order_b is None else b.T
            if self.is_float32 and a.size * b.shape[-1] < SMALL:
                product = a.dot(b)
            else:
                product = kernels.matmul(a, b, self.equation.compute_dtype)
            return product if self.order_out is None else product.T
        if self.alone[0]:
            a = a.sum(axis=self.alone[0])
        if self.single:
            return _turned(a, self.order_out)
        if self.alone[1]:
            b = b.sum(axis=self.alone[1])
        if self.order_a is not None:
            a = a.transpose(self.order_a)
        if self.order_b is not None:
            b = b.transpose(self.order_b)
        nb, nl, ni = self.counts
        batch, left, inner, right = a.shape[:nb], a.shape[nb : nb + nl], a.shape[nb + nl :], b.shape[nb + ni :]
        m, k, n = prod(left), prod(inner), prod(right)
        if nb:
            a, b = a.reshape(prod(batch), m, k), b.reshape(prod(batch), k, n)
        else:
            a, b = a.reshape(m, k), b.reshape(k, n)
        out = _product(a, b, self.equation.compute_dtype)
        return _turned(out.reshape((*batch, *left, *right)), self.order_out)


def _product(a: Any, b: Any, compute_dtype: str) -> Any:
    """The product of matrices, or of as many pairs of them."""
    if compute_dtype == "float32" and a.size * b.shape[-1] < SMALL:
        return a.dot(b) if a.ndim == 2 else np.matmul(a, b)
    return kernels.matmul(a, b, compute_dtype)


def _order(have: Sequence[str], want: Sequence[str]) -> tuple[int, ...] | None:
    """The permutation from one order of labels to another; None where there is nothing to do."""
    order = tuple(list(have).index(c) for c in want)
    return None if order == tuple(range(len(order))) else order


def _turned(array: Any, order: tuple[int, ...] | None) -> Any:
    return array if order is None else array.transpose(order)


class ContractionGradient:
    """The gradient of one operand: g times the other operand, repeated along dims that were only summed."""

    def __init__(self, equation: Equation, operand: int) -> None:
        labels = equation.operands[operand]
        self.other = 1 - operand if len(equation.operands) == 2 else None
        other = equation.operands[self.other] if self.other is not None else ""
        reachable = "".join(c for c in labels if c in equation.result or c in other)
        sources = (equation.result, other) if self.other is not None else (equation.result,)
        self.product = Contraction(Equation(sources, reachable, equation.compute_dtype))
        self.repeated = tuple(d for d, c in enumerate(labels) if c not in reachable)

    def __call__(self, g: Any, arrays: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
        grad = self.product(g, arrays[self.other]) if self.other is not None else self.product(g)
        if self.repeated:
            grad = np.broadcast_to(np.expand_dims(grad, self.repeated), shape)
        return grad
