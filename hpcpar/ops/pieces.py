"""Products in pieces, so that messages move underneath: for layers whose plan overlaps.

Messages progress only inside MPI calls; between two pieces all moves under way get a chance. Libraries round a cut
product otherwise than a whole one, so the cut belongs to the plan and not to whether anything is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcpar.kernels import array_module
from hpcpar.ops.contraction import Equation
from hpcpar.ops.core import Rule
from hpcpar.ops.linear import Biased, Einsum
from hpcpar.primitives import under_way

PIECES = 8
"""Into how many pieces, at most, a product is cut."""
LEAST = 16
"""Rows of the result in a piece, at least."""


class PiecewiseEinsum(Einsum):
    """An einsum of two operands in pieces, that gives the gradient of the first operand before it computes the other.

    The first is the activation: the message that completes its gradient travels under the product that makes the
    gradient of the weight.
    """

    gives_early = True

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        contraction = rule.plan[0]
        return in_pieces(contraction, contraction.equation, *arrays), tuple(arrays)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return self.backward_early(rule, saved, g, needs, lambda grad: None)

    def backward_early(
        self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...], early: Callable[[Any], None]
    ) -> tuple:
        """As `backward`; calls ``early`` with the gradient of operand 0 when that is known."""
        first = second = None
        if needs[0]:
            first = _gradient(rule, saved, g, 0)
            early(first)
        if needs[1]:
            second = _gradient(rule, saved, g, 1)
        return first, second


class PiecewiseBiased(PiecewiseEinsum, Biased):
    """The same with a bias, which is added to the whole product."""

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        product, saved = super().forward(rule, arrays[:2], extra)
        return product + arrays[2], saved

    def backward_early(
        self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...], early: Callable[[Any], None]
    ) -> tuple:
        grads = super().backward_early(rule, saved, g, needs, early)
        return (*grads, np.add.reduce(g, rule.plan[3]) if needs[2] else None)


def _gradient(rule: Rule, saved: Any, g: Any, operand: int) -> Any:
    gradient = rule.plan[1][operand]
    if gradient.repeated:
        return gradient(g, saved, saved[operand].shape)
    return in_pieces(gradient.product, gradient.product.equation, g, saved[gradient.other])


def in_pieces(product: Callable[[Any, Any], Any], equation: Equation, a: Any, b: Any) -> Any:
    """Return ``product(a, b)``, computed in pieces of its longest dim that one operand alone has."""
    arrays = {0: a, 1: b}
    lengths = {c: n for i in (0, 1) for c, n in zip(equation.operands[i], arrays[i].shape, strict=True)}
    owners = {c: [i for i in (0, 1) if c in equation.operands[i]] for c in equation.result}
    label = max((c for c in equation.result if len(owners[c]) == 1), key=lengths.__getitem__, default=None)
    count = 0 if label is None else min(PIECES, lengths[label] // LEAST)
    if count < 2:
        made = product(a, b)
        _between()
        return made
    (owner,) = owners[label]
    before = (slice(None),) * equation.operands[owner].index(label)
    into = (slice(None),) * equation.result.index(label)
    edges = [i * lengths[label] // count for i in range(count + 1)]
    out = None
    for lo, hi in zip(edges, edges[1:], strict=False):
        part = arrays[owner][(*before, slice(lo, hi))]
        piece = product(part, b) if owner == 0 else product(a, part)
        if out is None:
            out = array_module(piece).empty(tuple(lengths[c] for c in equation.result), piece.dtype)
        out[(*into, slice(lo, hi))] = piece
        _between()
    return out


def _between() -> None:
    under_way.notify("piece", None)
    under_way.progress()


piecewise_einsum, piecewise_biased = PiecewiseEinsum(), PiecewiseBiased()
