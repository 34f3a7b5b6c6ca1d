"""The local mathematics of einsum: one or two arrays, as one (batched) matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Equation:
    """An einsum equation, taken apart: the labels of each operand and of the result."""

    operands: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}"


@lru_cache(maxsize=1024)
def parse(equation: str, ndims: tuple[int, ...]) -> Equation:
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
    return Equation(operands, result)


class Contraction:
    """Evaluates one equation on local arrays by transposing, reshaping and one matrix product."""

    def __init__(self, equation: Equation) -> None:
        self.equation = equation
        a, b = (*equation.operands, "")[:2]
        out = equation.result
        self.alone = [[labels.index(c) for c in labels if c not in out and c not in other] for labels, other in ((a, b), (b, a))]
        a = "".join(c for c in a if c in out or c in b)
        b = "".join(c for c in b if c in out or c in equation.operands[0])
        self.batch = [c for c in a if c in b and c in out]
        self.left = [c for c in a if c not in b]
        self.inner = [c for c in a if c in b and c not in out]
        self.right = [c for c in b if c not in a]
        self.order_a = [a.index(c) for c in (*self.batch, *self.left, *self.inner)]
        self.order_b = [b.index(c) for c in (*self.batch, *self.inner, *self.right)]
        natural = [*self.batch, *self.left, *self.right]
        self.order_out = [natural.index(c) for c in out]

    def __call__(self, *arrays: Any) -> Any:
        a = arrays[0].sum(axis=tuple(self.alone[0])) if self.alone[0] else arrays[0]
        if len(arrays) == 1:
            return a.transpose(self.order_out_single(a))
        b = arrays[1].sum(axis=tuple(self.alone[1])) if self.alone[1] else arrays[1]
        a, b = a.transpose(self.order_a), b.transpose(self.order_b)
        nb, nl, ni = len(self.batch), len(self.left), len(self.inner)
        batch, left, inner, right = a.shape[:nb], a.shape[nb : nb + nl], a.shape[nb + nl :], b.shape[nb + ni :]
        m, k, n = prod(left), prod(inner), prod(right)
        if nb:
            out = np.matmul(a.reshape(prod(batch), m, k), b.reshape(prod(batch), k, n))
        else:
            out = np.matmul(a.reshape(m, k), b.reshape(k, n))
        return out.reshape((*batch, *left, *right)).transpose(self.order_out)

    def order_out_single(self, array: Any) -> list[int]:
        """Return the order of dims for an equation of one operand."""
        kept = [c for c in self.equation.operands[0] if c in self.equation.result]
        return [kept.index(c) for c in self.equation.result]


class ContractionGradient:
    """The gradient of one operand: the product of g with the other operand, repeated along dims that were only summed."""

    def __init__(self, equation: Equation, operand: int) -> None:
        labels = equation.operands[operand]
        self.other = 1 - operand if len(equation.operands) == 2 else None
        other = equation.operands[self.other] if self.other is not None else ""
        reachable = "".join(c for c in labels if c in equation.result or c in other)
        sources = (equation.result, other) if self.other is not None else (equation.result,)
        self.product = Contraction(Equation(sources, reachable))
        self.repeated = [d for d, c in enumerate(labels) if c not in reachable]

    def __call__(self, g: Any, arrays: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
        grad = self.product(g, arrays[self.other]) if self.other is not None else self.product(g)
        if self.repeated:
            grad = np.broadcast_to(np.expand_dims(grad, tuple(self.repeated)), shape)
        return grad
