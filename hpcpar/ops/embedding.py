"""Embedding: rows of a table by index, the table split by rows, by columns, or not at all.

It is the product of one-hot rows with the table, so its layouts are those of an einsum: indices carry the labels of
their own dims, the table those of rows (which are summed over) and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.ops.contraction import Equation, parse
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.linear import choose_labels, label_stacks
from hpcpar.ops.repartition import repartition
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


@cache
def _equation(ndim: int) -> Equation:
    positions = "abcdefgh"[:ndim]
    return parse(f"{positions},yz->{positions}z", (ndim, 2))


class Embedding(Op):
    """Look up what this rank owns; the result is partial over the axes that split the rows of the table."""

    name = "embedding"
    saves_little = True

    def __init__(self, padded: bool) -> None:
        # the row of the padding index gets no gradient, which is not the adjoint
        self.linear = None if padded else "each"

    def rule(self, sigs: tuple[Signature, ...], out: Layout | None, parameter: bool) -> Rule:
        index, table = sigs
        mesh, equation = index.mesh, _equation(len(index.shape))
        shape = (*index.shape, table.shape[1])
        if out is not None:
            out = signature(mesh, shape, out).layout
        chosen = choose_labels(mesh, equation, sigs, out, (False, parameter))
        stacks = label_stacks(mesh, equation, sigs, out, chosen)
        positions = [stacks[c] for c in equation.operands[0]]
        needed_index = index.with_layout(Layout(*positions))
        needed_table = table.with_layout(Layout(stacks["y"], stacks["z"]))
        result = signature(mesh, shape, Layout(*positions, stacks["z"], partial=mesh.sort(stacks["y"])))
        lost = mesh.sort([a for stack in positions for a in stack])
        # indices are looked at as they came, before they move, so that all ranks know of one that is wrong
        moves = [needed_index, needed_table]
        grads = [needed_index, needed_table.with_partial(lost)]
        return Rule(result, moves, grads, sigs, (needed_table.box[0], table.shape[0], mesh.comm(*lost)))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        index, table = arrays
        (first, _), rows, along = rule.plan
        _check_index(index, rows, along)
        local = index - first if first else index
        return kernels.take_rows(table, local), (local, table.shape[0], None if extra is None else extra - first)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        local, rows, padding = saved
        if padding is not None:
            local = np.where(local == padding, -1, local)
        return None, kernels.add_rows(g, local, rows)


def _check_index(index: Any, rows: int, along: Any) -> None:
    """An index outside the table ends in one error on all ranks."""
    wrong = (index < 0) | (index >= rows)
    found = along.all_reduce(np.array([int(index[wrong].max(initial=-1)) if wrong.any() else -(2**62)]), "max")
    if int(found[0]) != -(2**62):
        raise IndexError(f"embedding: an index is {int(found[0])}, the table has the rows 0 to {rows - 1}")


_embedding, _embedding_padded = Embedding(padded=False), Embedding(padded=True)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, out: Layout | None = None) -> Tensor:
    """Return the rows of `weight` at the indices `input`.

    Parameters
    ----------
    input : Tensor
        Integers of any shape, any dims split.
    weight : Tensor
        (rows, columns). Where rows are split, each rank looks up what it owns and the result is partial over these
        axes; split columns split the last dim of the result. No message but the check of the indices.
    padding_idx : int, optional
        A row that gets no gradient; may count from the end.
    out : Layout, optional
        Layout of the result (..., columns); a partial result becomes split by one reduce-scatter. It also decides where
        one axis splits both indices and rows, as in `einsum`.

    Raises
    ------
    IndexError
        On all ranks: an index outside of the table.
    LayoutError
        An axis splits both operands, and `out` does not say which split the result keeps. (A `Parameter` is then
        gathered where it is used.)

    Notes
    -----
    The gradient of `weight` is dense, and partial over the axes that split `input`; rows that occur several times are
    summed in a fixed order.
    """
    if weight.ndim != 2 or input.dtype.kind not in "iu":
        raise ValueError(
            f"embedding takes integers and a table (rows, columns), got {input.dtype} and shape {weight.shape}"
        )
    rows = weight.shape[0]
    if padding_idx is not None:
        if not -rows <= padding_idx < rows:
            raise ValueError(f"embedding: padding_idx is {padding_idx}, the table has {rows} rows")
        padding_idx %= rows
    op = _embedding if padding_idx is None else _embedding_padded
    result = op((input, weight), (out, weight.is_parameter), padding_idx)
    return result if out is None else repartition(result, out)
