"""What an operation is: a layout rule, a local kernel and a gradient rule; and how it is applied.

The rule is a pure function of signatures and static arguments, so every rank comes to the same one, and it is made
once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from hpcpar import autograd, remaking
from hpcpar.autograd import Node
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.signature import Signature, signature, two_meshes
from hpcpar.sources import by_source
from hpcpar.tensors import Tensor
from hpcpar.transport.device import like as place

# in the one function that runs for every operation, mapping these costs half of a comprehension
_sig, _data, _requires_grad, _node = (attrgetter(name) for name in ("sig", "_data", "requires_grad", "node"))

RULES_KEPT = 10_000
"""How many rules are remembered for operations on first operands of one signature."""


class Observer(Protocol):
    """What watches operations from outside, as the checked mode does."""

    def before(self, op: Op, rule: Rule, tensors: tuple[Tensor, ...]) -> None:
        """Called before an operand is moved, hence before any message."""

    def after(
        self, op: Op, rule: Rule, tensors: tuple[Tensor, ...], arrays: list[Any], out: Tensor, extra: Any
    ) -> None:
        """Called with the operands as they were moved, and the result."""


observers: list[Observer] = []


class Rule:
    """How one operation runs on operands of given signatures.

    Attributes
    ----------
    out : Signature
        Of the result (of the first one, where there are several).
    moves : tuple of Signature or None
        Under which signature each operand is needed, None where it lies right; None when all do.
    grads : tuple of Signature
        Under which signature the gradient rule returns the gradient of each operand.
    plan : object
        Whatever the kernel needs: counts, halo exchanges, communicators.
    """

    __slots__ = ("grads", "moves", "out", "plan")

    def __init__(
        self,
        out: Signature,
        moves: Sequence[Signature],
        grads: Sequence[Signature],
        sigs: Sequence[Signature],
        plan: Any = None,
    ) -> None:
        self.out = out
        needed = tuple(m if m is not s else None for m, s in zip(moves, sigs, strict=True))
        self.moves = needed if any(m is not None for m in needed) else None
        self.grads = tuple(grads)
        self.plan = plan


class Op:
    """Base of all operations; an instance without state serves every call.

    A subclass gives `rule`, `forward` and `backward`. `linear` says in which operands it is linear (for the checked
    mode): in each of the first two on its own, while further ones are added to their product, as a bias is
    (``"each"``); in the first, and in all others together (``"joined"``); in all together (``"sum"``); in the one
    operand up to a number, the call's `extra`, that is added (``"shift"``); in operand 2 alone, the value of attention
    (``"value"``); or in none (``None``).
    """

    name = "op"
    linear: str | None = None
    passes_gradient = False
    logged = True  # in the checked mode; False where it depends on layouts whether the operation is there at all
    expands = False
    saves_little = False  # whether what forward saves, but for operands, is small beside the result
    gives_early = False  # `backward_early` gives the gradient of the first operand before that of the others is there

    def rule(self, sigs: tuple[Signature, ...], *static: Hashable) -> Rule:
        """Return the rule for operands of the given signatures; raises LayoutError before any message."""
        raise NotImplementedError(self.name)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        """Return this rank's result, and what `backward` needs."""
        raise NotImplementedError(self.name)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        """Return the gradient of each operand (None where it is not needed) from that of the result.

        `g` is this rank's shard of the gradient under ``rule.out.resolved``; it may be shared and is not changed. What
        is returned is new, or `g` itself, or a view of `g`: never an array that is kept elsewhere.
        """
        raise NotImplementedError(self.name)

    def expand(self, saved: Any, contributions: Any, owned: Any) -> list[Node]:
        """Of an operation that `expands`, in place of `backward`: where the walk goes on among operations made now.

        `contributions` is the gradient as it came, under any layouts, None where none did; `owned` as in `Node`.
        """
        raise NotImplementedError(self.name)

    def rounding(self, rule: Rule) -> float:
        """Return by which part operands are rounded before they are multiplied; 0 where they are taken as they are."""
        return 0.0

    def flops(self, rule: Rule) -> int:
        """Return the additions and multiplications of the forward pass on all ranks, of products only; 0 for others."""
        return 0

    def __call__(self, tensors: tuple[Tensor, ...], static: tuple = (), extra: Any = None) -> Tensor:
        """Apply the operation; `static` takes part in the rule, `extra` does not."""
        rules = tensors[0].sig.rules
        key = (self, static, *map(_sig, tensors))
        rule = rules.get(key)
        if rule is None:
            rule = self._make_rule(key, tensors, static)
        if observers:
            for observer in observers:
                observer.before(self, rule, tensors)
        moves = rule.moves
        if moves is None:
            arrays = list(map(_data, tensors))
        else:
            arrays = [t._data if m is None else t.moved(m) for t, m in zip(tensors, moves, strict=True)]
        data, saved = self.forward(rule, arrays, extra)
        if not rule.out.shape and isinstance(data, np.generic):  # what NumPy makes of arithmetic on 0-dim arrays
            data = np.asarray(data)
        out = Tensor(data, rule.out)
        if autograd._enabled:
            needs = tuple(map(_requires_grad, tensors))
            if True in needs:
                if moves is not None and not autograd.recomputing():  # else they are needed at once
                    saved = by_source(saved, tensors, moves, arrays)
                if remaking.ever:
                    saved = remaking.recorded(self, rule, tensors, arrays, extra, saved, out)
                out.requires_grad = True
                out.node = Node(rule.out, self, rule, tuple(map(_node, tensors)), needs, saved)
        if observers:
            for observer in observers:
                observer.after(self, rule, tensors, arrays, out, extra)
        return out

    def _make_rule(self, key: Hashable, tensors: tuple[Tensor, ...], static: tuple) -> Rule:
        sigs = tuple(t.sig for t in tensors)
        for i, sig in enumerate(sigs[1:], 1):
            if sig.mesh is not sigs[0].mesh:
                words = two_meshes(f"operand 0, {sigs[0]!r},", sigs[0].mesh, f"operand {i}, {sig!r},", sig.mesh)
                raise LayoutError(f"{self.name}: operands are on two meshes: {words}")
        rules = sigs[0].rules
        if len(rules) >= RULES_KEPT:  # slices at positions that never come back
            rules.clear()
        rule = rules[key] = self.rule(sigs, *static)
        return rule


def as_tensor(value: Any, like: Tensor, dtype: np.dtype | None = None) -> Tensor:
    """Return `value` as a tensor on the mesh of `like`: a tensor as it is, an array or number as a replicated one.

    It gets the dtype of `like`, or `dtype`, unless that loses what it is: 0.5 beside integers stays 0.5.
    """
    if isinstance(value, Tensor):
        return value
    array = value if hasattr(value, "__array_function__") else np.asarray(value)
    wanted = like.dtype if dtype is None else dtype
    if np.can_cast(array.dtype, wanted, "same_kind"):
        array = array.astype(wanted, copy=False)
    array = place(array, like._data)
    return Tensor(array, signature(like.mesh, tuple(array.shape), Layout()))


def split_conflict(name: str, sigs: Sequence[Signature], hint: str) -> LayoutError:
    """Return the error of operands that are split differently: both layouts and the call that would help."""
    shown = " and ".join(repr(s) for s in sigs)
    return LayoutError(f"{name}: operands lie differently: {shown}; {hint}")
