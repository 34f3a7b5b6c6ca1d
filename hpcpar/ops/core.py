"""What an operation is: a layout rule, a local kernel and a gradient rule; and how it is applied.

The rule is a pure function of signatures and static arguments, so every rank comes to the same one, and it is made once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hpcpar import autograd
from hpcpar.autograd import Node
from hpcpar.layout.layout import LayoutError
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor


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

    def __init__(self, out: Signature, moves: Sequence[Signature], grads: Sequence[Signature], sigs: Sequence[Signature], plan: Any = None):
        self.out = out
        needed = tuple(m if m is not s else None for m, s in zip(moves, sigs, strict=True))
        self.moves = needed if any(m is not None for m in needed) else None
        self.grads = tuple(grads)
        self.plan = plan


class Op:
    """Base of all operations; an instance without state serves every call.

    A subclass gives `rule`, `forward` and `backward`. `linear` names the operands in which it is linear (for the
    checked mode): ``"each"`` one on its own, ``"sum"`` all together, or ``None``.
    """

    name = "op"
    linear: str | None = None
    passes_gradient = False

    def __init__(self) -> None:
        self.rules: dict[Hashable, Rule] = {}

    def rule(self, sigs: tuple[Signature, ...], *static: Hashable) -> Rule:
        """Return the rule for operands of the given signatures; raises LayoutError before any message."""
        raise NotImplementedError(self.name)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        """Return this rank's result, and what `backward` needs."""
        raise NotImplementedError(self.name)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        """Return the gradient of each operand (None where it is not needed) from that of the result.

        `g` is this rank's shard of the gradient under ``rule.out.resolved``.
        """
        raise NotImplementedError(self.name)

    def __call__(self, tensors: tuple[Tensor, ...], static: tuple = (), extra: Any = None) -> Tensor:
        """Apply the operation; `static` takes part in the rule, `extra` does not."""
        key = (static, *[t.sig for t in tensors])
        rule = self.rules.get(key)
        if rule is None:
            rule = self._make_rule(key, tensors, static)
        if rule.moves is None:
            arrays = [t._data for t in tensors]
        else:
            arrays = [t._data if m is None else t.moved(m) for t, m in zip(tensors, rule.moves, strict=True)]
        if not autograd._enabled:
            return Tensor(self.forward(rule, arrays, extra)[0], rule.out)
        data, saved = self.forward(rule, arrays, extra)
        out = Tensor(data, rule.out)
        needs = tuple([t.requires_grad for t in tensors])
        if True in needs:
            out.requires_grad = True
            out.node = Node(rule.out, self, rule, tuple([t.node for t in tensors]), needs, saved)
        return out

    def _make_rule(self, key: Hashable, tensors: tuple[Tensor, ...], static: tuple) -> Rule:
        sigs = tuple(t.sig for t in tensors)
        for sig in sigs[1:]:
            if sig.mesh is not sigs[0].mesh:
                raise LayoutError(f"{self.name}: operands lie on two meshes, {sigs[0].mesh!r} and {sig.mesh!r}")
        if len(self.rules) > 20_000:  # shapes that never come back
            self.rules.clear()
        rule = self.rules[key] = self.rule(sigs, *static)
        return rule


def as_tensor(value: Any, like: Tensor) -> Tensor:
    """Return `value` as a tensor on the mesh of `like`: a tensor as it is, an array as a replicated one."""
    if isinstance(value, Tensor):
        return value
    from hpcpar.layout.layout import Layout
    from hpcpar.signature import signature
    from hpcpar.transport.device import like as place

    import numpy as np

    array = place(np.asarray(value, dtype=like.dtype), like._data)
    return Tensor(array, signature(like.mesh, array.shape, Layout()))


def split_conflict(name: str, sigs: Sequence[Signature], hint: str) -> LayoutError:
    """Return the error of operands that are split differently: both layouts and the call that would help."""
    shown = " and ".join(repr(s) for s in sigs)
    return LayoutError(f"{name}: operands lie differently: {shown}; {hint}")
