"""Repartition: the same tensor under another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcpar.layout.layout import Layout
from hpcpar.ops.core import Op, Rule
from hpcpar.primitives.repartition import plan
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class Repartition(Op):
    """The identity; its gradient passes on in whatever layout it has."""

    name = "repartition"
    linear = "each"
    passes_gradient = True
    logged = False

    def rule(self, sigs: tuple[Signature, ...], layout: Layout) -> Rule:
        target = signature(sigs[0].mesh, sigs[0].shape, layout)
        return Rule(target, [target], [target.resolved], sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return arrays[0], None


_repartition = Repartition()


def repartition(x: Tensor, layout: Layout) -> Tensor:
    """Return x under another layout. Collective over the axes that differ.

    Parameters
    ----------
    layout : Layout
        Trailing dims default to not split. A partial value becomes split by one reduce-scatter, replicated by one
        all-reduce; blocks move by a slice, an all-gather or an all-to-all.
    """
    if signature(x.mesh, x.shape, layout) is x.sig:
        return x
    return _repartition((x,), (layout,))


def resolve(x: Tensor) -> Tensor:
    """Return x without partial axes (one all-reduce), x itself when it has none."""
    return repartition(x, x.layout.resolved()) if x.sig.partial else x


def explain(x: Tensor, layout: Layout) -> str:
    """Return the steps that `repartition` would take, in words, with the elements that this rank receives."""
    steps = plan(x.sig, signature(x.mesh, x.shape, layout))
    return f"{x.layout!r} -> {layout!r}: {steps}, {steps.words:g} elements received"
