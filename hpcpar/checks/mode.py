"""Watches operations, gradients, moves and messages while the checked mode is on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from hpcpar import autograd, scope
from hpcpar.autograd import Node
from hpcpar.checks import messages
from hpcpar.checks.log import Log, Record
from hpcpar.checks.logical import inner_products, inspect, same_logical_array
from hpcpar.checks.values import CheckError, Value, agree, tolerance
from hpcpar.ops import core
from hpcpar.ops.core import Op, Rule
from hpcpar.primitives import repartition
from hpcpar.signature import Signature
from hpcpar.sources import whole
from hpcpar.tensors import Tensor
from hpcpar.transport import comm as transport
from hpcpar.transport.system import world


class Checker:
    """The checks; one instance is on at a time.

    Attributes
    ----------
    log : Log
        Fingerprints of all results and gradients; moves leave none, as another layout needs others.
    count : int
        Operations seen so far, for messages.
    """

    def __init__(self, log: Log | None = None) -> None:
        self.log = Log() if log is None else log
        self.count = 0

    # ---- forward

    def before(self, op: Op, rule: Rule, tensors: tuple[Tensor, ...]) -> None:
        """All ranks of the mesh apply this operation, to operands of these signatures."""
        self.count += 1
        mesh = rule.out.mesh
        if mesh.virtual:
            return
        operands = ", ".join(f"{t.sig!r} {t.dtype}" for t in tensors)
        everyone = mesh.world.gather_objects((messages.OPERATION, f"{_name(op)} on {operands}"))
        messages.same_call(f"operation {self.count} differs", everyone)

    def after(
        self, op: Op, rule: Rule, tensors: tuple[Tensor, ...], arrays: list[Any], out: Tensor, extra: Any
    ) -> None:
        """The result is equal on replicas; it is kept with the operands until the gradient comes."""
        if rule.out.mesh.virtual:
            return
        value = inspect(f"result of operation {self.count}, {_name(op)}", out._data, out.sig)
        if op.logged:
            self._record(_name(op), out._data, out.sig, value)
        if out.node is not None:
            moves = rule.moves or (None,) * len(tensors)
            needed = [t.sig if m is None else m for m, t in zip(moves, tensors, strict=True)]
            out.node.note = _Note(self.count, arrays, needed, out._data, extra)

    # ---- backward

    def backward(self, node: Node, gradient: Any, gradients: Any) -> None:
        """The gradients are equal on replicas, and adjoint to the operation."""
        note = getattr(node, "note", None)
        if note is None or node.sig.mesh.virtual:
            return
        op, rule = node.op, node.rule
        where = f"operation {note.number}, {op.name}"
        value = inspect(f"gradient of the result of {where}", gradient, rule.out.resolved)
        if op.logged:
            self._record(f"gradient of {op.name}", gradient, rule.out.resolved, value)
        for i, (grad, sig) in enumerate(zip(gradients, rule.grads, strict=True)):
            if grad is not None:
                inspect(f"gradient of operand {i} of {where}", grad, sig)
        if op.linear is not None:
            _check_adjoint(where, node, note, gradient, gradients)

    # ---- moves

    def move(self, array: Any, source: Signature, moved: Any, target: Signature) -> None:
        """A move keeps the logical array, and replicas equal."""
        if source.mesh.virtual:
            return
        what = f"move of {source!r} to {target.layout!r}, after operation {self.count}"
        before, after = same_logical_array(array, source, moved, target)
        if not agree(before, after, tolerance(array.dtype)):
            raise CheckError(f"{what}: the array is not the same: fingerprint {before.value!r} became {after.value!r}")
        inspect(what, moved, target)

    def _record(self, what: str, array: Any, sig: Signature, value: Value) -> None:
        self.log.add(Record(what, sig.shape, str(array.dtype), value.value, value.scale))


class _Note(NamedTuple):
    """What the check of a gradient needs of the operation: operands as moved, their signatures, and the result."""

    number: int
    arrays: list[Any]
    sigs: list[Signature]
    result: Any
    extra: Any


def _check_adjoint(where: str, node: Node, note: _Note, g: Any, gradients: Any) -> None:
    """Compare ``<g, y>`` with ``<dx, x>`` for the operands that `Op.linear` names."""
    op, rule, count = node.op, node.rule, len(note.arrays)
    together = {"sum": range(count), "value": (), "joined": range(1, count)}.get(op.linear, range(2, count))
    if any(gradients[i] is None for i in together):  # of an operand that needs none
        gradients = op.backward(rule, whole(node.saved), g, (True,) * count)
    seed = rule.out.resolved
    known = [i for i in range(count) if gradients[i] is not None]
    pairs = [(g, seed, note.result, rule.out), (g, seed, np.ones_like(g), seed)]
    pairs += [(gradients[i], rule.grads[i], note.arrays[i], note.sigs[i]) for i in known]
    left, ones, *products = inner_products(pairs)
    right = dict(zip(known, products, strict=True))
    added = _sum([right[i] for i in together])
    within = max(tolerance(*(a.dtype for a in (g, note.result, *note.arrays))), op.rounding(rule) ** 0.6)
    if op.linear == "sum":
        _must_agree(where, "all operands together", left, added, within)
    elif op.linear == "value":
        if 2 in right:
            _must_agree(where, "the value", left, right[2], within)
    elif op.linear == "joined":
        _must_agree(where, "all parts together", left, added, within)
        if 0 in right:
            _must_agree(where, "operand 0", left, right[0], within)
    elif op.linear == "shift":
        number = Value(ones.value * note.extra, ones.scale * abs(note.extra))
        _must_agree(where, "operand 0 and the number added", left, _sum([right[0], number]), within)
    else:
        for i in {0, 1} & right.keys():
            _must_agree(where, f"operand {i}", left, _sum([right[i], added]), within)


def _name(op: Op) -> str:
    return f"{scope.current()}.{op.name}" if scope.current() else op.name


def _sum(values: list[Value]) -> Value:
    return Value(sum(v.value for v in values), sum(v.scale**2 for v in values) ** 0.5)


def _must_agree(where: str, operand: str, left: Value, right: Value, within: float) -> None:
    if not agree(left, right, within):
        ratio = right.value / left.value if left.value else float("inf")
        raise CheckError(
            f"gradient of {operand} of {where}: <dx, x> = {right.value!r}, but <g, y> = {left.value!r}: "
            f"a factor of {ratio:.6g}"
        )


def check_gradient_layouts(parameters: Iterable[Tensor | tuple[str, Tensor]]) -> None:
    """After the gradient synchronisation: each gradient lies exactly as its parameter does.

    Parameters
    ----------
    parameters : iterable of Parameter, or of (name, Parameter)
        Those without a gradient are passed over.

    Raises
    ------
    CheckError
        Names every gradient that lies otherwise.
    """
    wrong = []
    for number, item in enumerate(parameters):
        name, parameter = item if isinstance(item, tuple) else (f"parameter {number}", item)
        if parameter.grad is not None and parameter.grad.sig is not parameter.sig:
            wrong.append(f"{name} lies as {parameter.layout!r}, its gradient as {parameter.grad.layout!r}")
    if wrong:
        raise CheckError("; ".join(wrong))


_checkers: list[Checker] = []


def enable(log: Log | None = None) -> Checker:
    """Turn the checked mode on until `disable`; the same on every rank."""
    if not _checkers:
        checker = Checker(log)
        _checkers.append(checker)
        core.observers.append(checker)
        autograd.observers.append(checker.backward)
        repartition.observers.append(checker.move)
        transport.inspector = messages.compare
    return _checkers[0]


def disable() -> None:
    """Turn the checked mode off."""
    if _checkers:
        checker = _checkers.pop()
        core.observers.remove(checker)
        autograd.observers.remove(checker.backward)
        repartition.observers.remove(checker.move)
        transport.inspector = None


def enable_from_environment() -> None:
    """Turn the checked mode on if ``HPCPAR_CHECK=1``; with ``HPCPAR_CHECK_LOG=FILE`` rank 0 writes the log there."""
    path = os.environ.get("HPCPAR_CHECK_LOG")
    enable(Log(path if path and world()[0] == 0 else None))


@contextmanager
def checked(log: Log | None = None) -> Iterator[Checker]:
    """Turn the checked mode on inside a block; yields the `Checker`, whose log can be compared with another run's.

    Examples
    --------
    >>> with hp.checked() as first:
    ...     train_step(serial_mesh)
    >>> with hp.checked() as second:
    ...     train_step(mesh)
    >>> hp.checks.first_difference(first.log, second.log)
    """
    outer = _checkers[0] if _checkers else None
    if outer is not None:
        disable()
    checker = enable(log)
    try:
        yield checker
    finally:
        disable()
        if outer is not None:
            _restore(outer)


def _restore(checker: Checker) -> None:
    enable(checker.log)
    _checkers[0].count = checker.count
