"""Results of chosen operations that are not kept for backward but made again from their operands.

A result that may be made again carries a recipe. An operation that would save it saves the recipe instead, so that the
array goes when forward is done with it. In backward the first who asks makes it, and it stays until the operation
itself is visited, which is always after all that use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar import autograd
from hpcpar.primitives.repartition import move, plan
from hpcpar.signature import Signature
from hpcpar.sources import Later, Saved, Source, whole

if TYPE_CHECKING:
    from hpcpar.ops.core import Op, Rule
    from hpcpar.tensors import Tensor

OPERATIONS = (
    "add", "batch_norm", "cos", "div", "dropout", "embedding", "exp", "gelu", "group_norm", "layer_norm", "leaky_relu",
    "log_softmax", "mul", "relu", "rms_norm", "rotary", "sigmoid", "silu", "sin", "softmax", "sqrt", "sub", "swiglu",
    "tanh",
)  # fmt: skip
"""Operations whose results are cheap to make again."""

chosen: frozenset[str] = frozenset()
"""The operations whose results are not kept now."""

ever = False
"""Whether any were chosen in this program: else no operand has a recipe, and nobody need look."""


@contextmanager
def choosing(operations: Sequence[str]) -> Iterator[None]:
    """Within the block, do not keep results of these operations, besides those chosen outside of it."""
    global chosen, ever
    before, chosen = chosen, chosen | checked("recompute", operations)
    ever = True
    try:
        yield
    finally:
        chosen = before


def checked(who: str, operations: Sequence[str]) -> frozenset[str]:
    """Return names of operations as a set, all of them known ("relu" is the operation "leaky_relu").

    Raises
    ------
    ValueError
        One is not known.
    """
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or isinstance(operations, str):
        raise ValueError(f"{who}: operations are names among {', '.join(OPERATIONS)}, got {operations!r}")
    return frozenset("leaky_relu" if name == "relu" else name for name in operations)


class Recipe:
    """How one result is made again.

    Attributes
    ----------
    operands : tuple
        Arrays as the operation had them, or what fetches them.
    """

    __slots__ = ("__weakref__", "_made", "_moved", "extra", "op", "operands", "rule")

    def __init__(self, op: Op, rule: Rule, operands: tuple, extra: Any) -> None:
        self.op, self.rule, self.operands, self.extra = op, rule, operands, extra
        self._made: tuple[Any, Any] | None = None
        self._moved: dict[Signature, Any] = {}

    def make(self) -> tuple[Any, Any]:
        """Return the result and what the operation saved with it; made once until `clear`."""
        if self._made is None:
            arrays = [item.fetch() if isinstance(item, Later) else item for item in self.operands]
            with autograd.second_run():
                data, saved = self.op.forward(self.rule, arrays, self.extra)
            if not self.rule.out.shape and isinstance(data, np.generic):
                data = np.asarray(data)
            self._made = data, saved
        return self._made

    def moved(self, target: Signature) -> Any:
        """Return the result under another signature; moved once until `clear`. Collective."""
        if target not in self._moved:
            self._moved[target] = move(self.make()[0], self.rule.out, target)
        return self._moved[target]

    def clear(self) -> None:
        """Drop what was made."""
        self._made = None
        self._moved.clear()


class Remade(Later):
    """The result of a recipe, moved to another signature where one is given."""

    __slots__ = ("recipe", "target")

    def __init__(self, recipe: Recipe, target: Signature | None) -> None:
        self.recipe, self.target = recipe, target

    def fetch(self) -> Any:
        return self.recipe.make()[0] if self.target is None else self.recipe.moved(self.target)


class Own(Later):
    """What an operation saved whose result is made again: kept where it is little, else made with the result."""

    __slots__ = ("recipe", "saved")

    def __init__(self, recipe: Recipe, saved: Any) -> None:
        little = recipe.op.saves_little or saved is None
        # where it is little, the recipe lives for those who use the result alone
        self.recipe = weakref.ref(recipe) if little else recipe
        self.saved = saved if little else None

    def fetch(self) -> Any:
        recipe = self.recipe if isinstance(self.recipe, Recipe) else self.recipe()
        saved = recipe.make()[1] if recipe is self.recipe else whole(self.saved)
        if recipe is not None:
            recipe.clear()
        return saved


def recorded(
    op: Op, rule: Rule, tensors: Sequence[Tensor], arrays: Sequence[Any], extra: Any, saved: Any, out: Tensor
) -> Any:
    """Return what the tape is to save for an operation: recipes for operands that have one, and its own if chosen.

    `saved` is what the operation saved, moved operands perhaps already by their source.
    """
    moves = rule.moves or (None,) * len(arrays)
    recipes = {
        id(array): Remade(tensor.recipe, target)
        for tensor, target, array in zip(tensors, moves, arrays, strict=True)
        if tensor.recipe is not None
    }
    if recipes and isinstance(saved, tuple) and any(id(item) in recipes for item in saved):
        saved = Saved(recipes.get(id(item), item) for item in saved)
    if op.name not in chosen:
        return saved
    operands = []
    for tensor, target, array in zip(tensors, moves, arrays, strict=True):
        if tensor.recipe is not None:
            operands.append(recipes[id(array)])
        elif target is not None and tensor.keep == "source" and plan(tensor.sig, target).sends:
            operands.append(Source(tensor._data, tensor.sig, target, None if tensor.ahead is None else tensor))
        else:
            operands.append(array)
    out.recipe = Recipe(op, rule, tuple(operands), extra)
    return Own(out.recipe, saved)
