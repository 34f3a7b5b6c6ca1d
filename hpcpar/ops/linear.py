"""Einsum under any layouts, and with it matmul and linear layers.

An einsum is completely described by one label (or none) for each mesh axis: an operand that carries the label is split
by it, the others are replicated; the result is split, or partial where the label is contracted; the gradient of an
operand is split on the labels it has and partial over the others. Everything else is a repartition before and after.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from hpcpar import scope
from hpcpar.kernels import ROUNDINGS
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh
from hpcpar.ops.contraction import SMALL, Contraction, ContractionGradient, Equation, parse
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.repartition import repartition
from hpcpar.ops.shape import expand, squeeze, unsqueeze
from hpcpar.primitives.repartition import total_words
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor

AxisMap = dict[str, str | None]

_log = logging.getLogger("hpcpar.layout")


class Einsum(Op):
    """One contraction of one or two operands."""

    name = "einsum"
    linear = "each"

    def rule(
        self, sigs: tuple[Signature, ...], equation: Equation, out: Layout | None, parameters: tuple[bool, ...]
    ) -> Rule:
        mesh = sigs[0].mesh
        lengths = label_lengths(equation, sigs)
        shape = tuple(lengths[c] for c in equation.result)
        if out is not None:
            out = signature(mesh, shape, out).layout
        chosen = choose_labels(mesh, equation, sigs, out, parameters)
        stacks = label_stacks(mesh, equation, sigs, out, chosen)
        moves, grads = [], []
        for sig, labels in zip(sigs, equation.operands, strict=True):
            needed = sig.with_layout(Layout(*[stacks[c] for c in labels]))
            lost = [a for c, stack in stacks.items() if c not in labels for a in stack]
            moves.append(needed)
            grads.append(needed.with_partial(mesh.sort(lost)))
        summed = mesh.sort([a for c, stack in stacks.items() if c not in equation.result for a in stack])
        result = signature(mesh, shape, Layout(*[stacks[c] for c in equation.result], partial=summed))
        gradients = [ContractionGradient(equation, i) for i in range(len(sigs))]
        flops = 2 * prod(lengths.values()) if len(sigs) > 1 else 0
        return Rule(result, moves, grads, sigs, (Contraction(equation), gradients, flops))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return rule.plan[0](*arrays), tuple(arrays)

    def flops(self, rule: Rule) -> int:
        return rule.plan[2]

    def rounding(self, rule: Rule) -> float:
        return ROUNDINGS[rule.plan[0].equation.compute_dtype]

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        gradients = rule.plan[1]
        return tuple(gradients[i](g, saved, a.shape) if needs[i] else None for i, a in enumerate(saved))


class Biased(Einsum):
    """A contraction of two operands, to which a bias over the last label of the result is added.

    The bias counts once: where the product is partial, on index 0 of these axes alone.
    """

    name = "linear"

    def rule(
        self, sigs: tuple[Signature, ...], equation: Equation, out: Layout | None, parameters: tuple[bool, ...]
    ) -> Rule:
        product = super().rule(sigs[:2], equation, out, parameters)
        result = product.out
        bias = sigs[2].with_layout(Layout(result.dims[-1], partial=result.partial))
        if bias.shape != result.shape[-1:]:
            raise ValueError(f"linear: a bias of shape {bias.shape} does not fit a result of shape {result.shape}")
        lost = result.mesh.sort([a for stack in result.dims[:-1] for a in stack])
        moves = [s if m is None else m for s, m in zip(sigs, product.moves or (None, None), strict=False)]
        rows = tuple(range(len(result.shape) - 1))
        contraction = product.plan[0]
        orders = contraction.order_a is None and contraction.order_b is not None and contraction.order_out is None
        small = moves[0].local_size * moves[1].local_shape[0] < SMALL
        # where nothing is left to decide at each call
        direct = contraction.is_matrix_product and contraction.is_float32 and orders and small
        plan = (*product.plan, rows, direct)
        return Rule(result, [*moves, bias], [*product.grads, bias.with_partial(lost)], sigs, plan)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x, weight, bias = arrays
        y = x.dot(weight.T) if rule.plan[4] else rule.plan[0](x, weight)
        if y.dtype is bias.dtype:
            y += bias
        else:
            y = y + bias
        return y, (x, weight)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        _, (of_x, of_weight), _, rows, direct = rule.plan
        if direct:
            x, weight = saved
            return (
                g.dot(weight) if needs[0] else None,
                g.T.dot(x) if needs[1] else None,
                np.add.reduce(g, rows) if needs[2] else None,
            )
        return (
            of_x(g, saved, saved[0].shape) if needs[0] else None,
            of_weight(g, saved, saved[1].shape) if needs[1] else None,
            np.add.reduce(g, rows) if needs[2] else None,
        )


def label_lengths(equation: Equation, sigs: Sequence[Signature]) -> dict[str, int]:
    """Return the global length of each label; operands must agree."""
    lengths: dict[str, int] = {}
    for labels, sig in zip(equation.operands, sigs, strict=True):
        for c, n in zip(labels, sig.shape, strict=True):
            if lengths.setdefault(c, n) != n:
                raise ValueError(f"einsum {equation}: label {c!r} is {lengths[c]} long in one operand, {n} in another")
    return lengths


def choose_labels(
    mesh: Mesh, equation: Equation, sigs: Sequence[Signature], out: Layout | None, parameters: tuple[bool, ...]
) -> AxisMap:
    """Return for each axis the label it splits, from layouts alone.

    The label on which the operands agree; if nobody is split, the one that `out` splits; in a conflict the one that
    `out` names (a contracted one where `out` is partial, of several that which moves least); without `out` a parameter
    is gathered on use, if the activation's label is not one of its own. Anything else is a LayoutError.
    """
    wanted = {a: c for d, c in enumerate(equation.result) for a in (out.entry(d) if out else ())}
    used = {axis: _labels_of(axis, equation, sigs) for axis in mesh.axes}
    chosen: AxisMap = {}
    for axis in mesh.axes:
        candidates = sorted(set(used[axis].values()))
        if not candidates:
            chosen[axis] = wanted.get(axis)
            continue
        if len(candidates) > 1 and out is None:
            fitting = _gathered_on_use(axis, equation, used[axis], parameters)
        elif len(candidates) > 1 and axis in out.partial:
            contracted = [c for c in candidates if c not in equation.result]
            # all of them give that layout; which one moves least is the same on every rank
            fitting = sorted(contracted, key=lambda c: _moved_for(axis, c, mesh, equation, sigs))[:1]
        elif len(candidates) > 1:
            fitting = [c for c in candidates if c == wanted.get(axis)]
        else:
            fitting = candidates
        if len(fitting) != 1:
            raise _conflict(axis, mesh, equation, sigs, used)
        chosen[axis] = fitting[0]
    return chosen


def _labels_of(axis: str, equation: Equation, sigs: Sequence[Signature]) -> dict[int, str]:
    """Which label `axis` splits in each operand."""
    return {
        i: c
        for i, (labels, sig) in enumerate(zip(equation.operands, sigs, strict=True))
        for c, stack in zip(labels, sig.dims, strict=True)
        if axis in stack
    }


def _gathered_on_use(
    axis: str, equation: Equation, used: dict[int, str], parameters: tuple[bool, ...]
) -> list[str]:
    """The activation's label, where the other operand is a parameter that does not have it."""
    for i, label in used.items():
        others = [j for j in used if j != i]
        if not parameters[i] and all(parameters[j] and label not in equation.operands[j] for j in others):
            _log.info("%seinsum %s: the parameter is gathered over %r where it is used", _place(), equation, axis)
            return [label]
    return []


def _place() -> str:
    return f"{scope.current()}: " if scope.current() else ""


def _conflict(
    axis: str, mesh: Mesh, equation: Equation, sigs: Sequence[Signature], used: dict[str, dict[int, str]]
) -> LayoutError:
    """The error that lists, for each label that could win, the `out` that says so and the elements that move."""
    settled = {a: next(iter(labels.values())) for a, labels in used.items() if len(set(labels.values())) == 1}
    least: dict[str, int] = {}
    for label in sorted(set(used[axis].values())):
        winner = {**settled, axis: label}
        kept = [tuple(a for a in mesh.axes if winner.get(a) == c) for c in equation.result]
        partial = () if label in equation.result else axis
        out, words = repr(Layout(*kept, partial=partial)), _moved_for(axis, label, mesh, equation, sigs)
        least[out] = min(words, least.get(out, words))
    choices = [f"out={out} moves {words} elements of the operands in all" for out, words in least.items()]
    shown = " and ".join(repr(s) for s in sigs)
    split = " and ".join(sorted(set(used[axis].values())))
    return LayoutError(
        f"einsum {equation}: axis {axis!r} splits {split} in {shown}; "
        f"say which one the result keeps: {'; '.join(choices)}"
    )


def _moved_for(axis: str, label: str, mesh: Mesh, equation: Equation, sigs: Sequence[Signature]) -> int:
    """Return how many elements of the operands move if `axis` splits `label` and no other."""
    words = 0
    for labels, sig in zip(equation.operands, sigs, strict=True):
        dims = [tuple(a for a in s if a != axis or c == label) for c, s in zip(labels, sig.dims, strict=True)]
        words += total_words(sig.resolved, signature(mesh, sig.shape, Layout(*dims)))
    return words


def label_stacks(
    mesh: Mesh, equation: Equation, sigs: Sequence[Signature], out: Layout | None, chosen: AxisMap
) -> dict[str, tuple[str, ...]]:
    """Return the stack of axes of each label, in the order in which an operand, or `out`, has them."""
    stacks: dict[str, tuple[str, ...]] = {}
    for c in dict.fromkeys("".join(equation.operands)):
        seen = [sig.dims[labels.index(c)] for labels, sig in zip(equation.operands, sigs, strict=True) if c in labels]
        if out is not None and c in equation.result:
            seen.append(out.entry(equation.result.index(c)))
        seen.append(mesh.axes)
        axes: dict[str, None] = {}
        for stack in sorted(seen[:-1], key=len, reverse=True) + seen[-1:]:
            axes.update({a: None for a in stack if chosen.get(a) == c and mesh.shape[a] > 1})
        stacks[c] = tuple(axes)
    return stacks


_einsum, _biased = Einsum(), Biased()


def einsum(
    equation: str, *operands: Tensor, out: Layout | None = None, compute_dtype: str = "float32"
) -> Tensor:
    """Return the sum of products that `equation` describes, under any layouts of the operands.

    Parameters
    ----------
    equation : str
        Explicit, of letters: ``"nk,ok->no"``; one or two operands.
    out : Layout, optional
        The layout of the result, and the only hint: it decides where two operands split by one axis disagree, and the
        result is repartitioned to it. Without it the result stays as it falls, possibly partial.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which two operands of float32, and those of their gradients, are multiplied: rounded to it, summed in
        float32. "float32" leaves other arrays as they are.

    Raises
    ------
    LayoutError
        In a conflict without `out`: it lists the candidates and the words each moves.
    RuntimeError
        Where the processor does not multiply in that dtype.
    """
    taken = parse(equation, tuple(x.ndim for x in operands), compute_dtype)
    apply = _in_pieces()[0] if len(operands) == 2 and operands[1].overlap else _einsum
    result = apply(tuple(operands), (taken, out, tuple(x.is_parameter for x in operands)))
    return result if out is None else repartition(result, out)


@cache
def _in_pieces() -> tuple[Einsum, Biased]:
    """The operations for weights whose plan overlaps; they stand on this file."""
    from hpcpar.ops.pieces import piecewise_biased, piecewise_einsum

    return piecewise_einsum, piecewise_biased


@cache
def _linear_equation(ndim: int, compute_dtype: str) -> Equation:
    rows = "abcdefgh"[: ndim - 1]
    return parse(f"{rows}y,zy->{rows}z", (ndim, 2), compute_dtype)


@cache
def _volume_equation(ndim: int, compute_dtype: str) -> Equation:
    inner = "abcdefgh"[: ndim - 1]
    return parse(f"n{inner},o{inner}->no", (ndim, ndim), compute_dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Layout | None = None, compute_dtype: str = "float32"
) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Parameters
    ----------
    x : Tensor
        (..., in_features).
    weight : Tensor
        (out_features, in_features).
    bias : Tensor, optional
        (out_features,). Added once, whatever the layouts are.
    out, compute_dtype
        See `einsum`.
    """
    rows, columns = x.sig.shape, weight.sig.shape
    if len(columns) != 2 or not rows or rows[-1] != columns[1]:
        raise ValueError(f"linear: x of shape {rows} does not fit a weight of shape {columns}")
    return _contract(_linear_equation(len(rows), compute_dtype), x, weight, bias, out)


def volume_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Layout | None = None, compute_dtype: str = "float32"
) -> Tensor:
    """Return `linear` of flattened samples, where x (N, ...) and weight (out_features, ...) keep all their dims."""
    if x.shape[1:] != weight.shape[1:]:
        raise ValueError(f"linear: x of shape {x.shape} does not fit a weight of shape {weight.shape}")
    return _contract(_volume_equation(x.ndim, compute_dtype), x, weight, bias, out)


def _contract(equation: Equation, x: Tensor, weight: Tensor, bias: Tensor | None, out: Layout | None) -> Tensor:
    static = equation, out, (x.is_parameter, weight.is_parameter)
    if bias is None:
        y = (_in_pieces()[0] if weight.overlap else _einsum)((x, weight), static)
    else:
        y = (_in_pieces()[1] if weight.overlap else _biased)((x, weight, bias), static)
    return y if out is None else repartition(y, out)


def matmul(a: Tensor, b: Tensor, out: Layout | None = None, compute_dtype: str = "float32") -> Tensor:
    """Return the matrix product over the last two dims, with broadcasting over the others; vectors as in torch.

    `out` and `compute_dtype` as of `einsum`.
    """
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError("matmul: 0-dim operands; use *")
    if a.ndim == 1 or b.ndim == 1:
        y = _with_vectors(a, b, compute_dtype)
        return y if out is None else repartition(y, out)
    ndim = max(a.ndim, b.ndim)
    full = "abcdefgh"[: ndim - 2]
    a, b = _grown(a, b), _grown(b, a)
    first, second = full[ndim - a.ndim :], full[ndim - b.ndim :]
    return einsum(f"{first}xy,{second}yz->{full}xz", a, b, out=out, compute_dtype=compute_dtype)


def _with_vectors(a: Tensor, b: Tensor, compute_dtype: str) -> Tensor:
    if a.ndim == 1 and b.ndim == 1:
        return einsum("x,x->", a, b, compute_dtype=compute_dtype)
    if a.ndim == 1:
        return squeeze(matmul(unsqueeze(a, 0), b, compute_dtype=compute_dtype), -2)
    return squeeze(matmul(a, unsqueeze(b, 1), compute_dtype=compute_dtype), -1)


def _grown(a: Tensor, b: Tensor) -> Tensor:
    """a with its batch dims of length 1 repeated to those of b."""
    shape = list(a.shape)
    for d in range(3, min(a.ndim, b.ndim) + 1):
        if shape[-d] == 1:
            shape[-d] = b.shape[-d]
    return a if tuple(shape) == a.shape else expand(a, shape)
