"""The layout rule of operations that act element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.ops.core import Rule, split_conflict
from hpcpar.signature import Signature, signature


def elementwise_rule(name: str, sigs: Sequence[Signature], keeps_partial: bool = False) -> Rule:
    """Return the rule of an elementwise operation.

    Per dim of the result the longest stack of axes wins; an operand with a prefix of it is sliced, one with another
    stack is an error. A dim of length 1 that is broadcast carries no axis.

    Parameters
    ----------
    keeps_partial : bool
        The operation is a sum of its operands: a partial operand stays so, and the others then count on index 0 only.
        Otherwise partial operands are resolved first.
    """
    mesh = sigs[0].mesh
    shape = broadcast_shape(name, sigs)
    ndim = len(shape)
    dims: list[tuple[str, ...]] = [()] * ndim
    for sig in sigs:
        for d, stack in _aligned(sig, ndim):
            if not (sig.shape[d - ndim] == 1 and shape[d] != 1) and len(stack) > len(dims[d]):
                dims[d] = stack
    hint = "repartition one of them to the layout of the other"
    for sig in sigs:
        for d, stack in _aligned(sig, ndim):
            if sig.shape[d - ndim] == shape[d] and dims[d][: len(stack)] != stack:
                raise split_conflict(name, sigs, hint)
    used = [a for stack in dims for a in stack]
    if len(set(used)) != len(used):
        raise split_conflict(name, sigs, hint)
    partial: tuple[str, ...] = ()
    if keeps_partial:
        partial = mesh.sort({a for s in sigs for a in s.partial} - set(used))
    out = signature(mesh, shape, Layout(*dims, partial=partial))
    moves, grads = [], []
    for sig in sigs:
        offset = ndim - len(sig.shape)
        own = [dims[offset + d] if n == shape[offset + d] else () for d, n in enumerate(sig.shape)]
        moves.append(signature(mesh, sig.shape, Layout(*own, partial=partial)))
        # summing a gradient over a broadcast dim that is split leaves it partial: the easiest line to forget
        lost = {a for d in range(ndim) for a in dims[d] if d < offset or sig.shape[d - offset] != shape[d]}
        grads.append(signature(mesh, sig.shape, Layout(*own, partial=mesh.sort(lost))))
    plan = tuple(_reduced_dims(sig.shape, shape) for sig in sigs)
    return Rule(out, moves, grads, sigs, plan)


def broadcast_shape(name: str, sigs: Sequence[Signature]) -> tuple[int, ...]:
    """Return the common shape, with an error that names the operation and the shapes."""
    try:
        return np.broadcast_shapes(*[s.shape for s in sigs])
    except ValueError:
        shapes = " and ".join(str(s.shape) for s in sigs)
        raise ValueError(f"{name}: shapes {shapes} cannot be broadcast together") from None


def _aligned(sig: Signature, ndim: int) -> list[tuple[int, tuple[str, ...]]]:
    return [(d + ndim - len(sig.shape), stack) for d, stack in enumerate(sig.dims)]


def _reduced_dims(shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Return how to sum a gradient back: leading dims to drop, dims of length 1 to keep; None when there is nothing."""
    offset = len(full) - len(shape)
    kept = tuple(d for d, n in enumerate(shape) if n == 1 and full[offset + d] != 1)
    return (offset, kept) if offset or kept else None


def unbroadcast(g: Any, how: tuple[int, tuple[int, ...]] | None) -> Any:
    """Sum a gradient over the dims that broadcasting made; `how` comes from the rule's plan."""
    if how is None:
        return g
    offset, kept = how
    if offset:
        g = g.sum(axis=tuple(range(offset)), keepdims=True).reshape(g.shape[offset:])
    return g.sum(axis=kept, keepdims=True) if kept else g
