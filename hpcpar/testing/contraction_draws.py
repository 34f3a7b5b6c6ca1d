"""Random products: einsum, linear, matmul and embedding, with layouts that agree, disagree, or need a hint."""

from __future__ import annotations

from typing import Any

from hpcpar.layout.layout import Layout
from hpcpar.testing.cases import Array
from hpcpar.testing.drawing import Drawn, Family, Rng, some
from hpcpar.testing.layouts import draw_layout

Mesh = dict[str, int]
Stacks = list[dict[str, list[str]]]

EQUATIONS = (
    "mk,kn->mn", "nk,ok->no", "mk,kn->nm", "bmk,bkn->bmn", "bmk,nk->bmn", "i,j->ij", "ij,ij->", "ij,j->i", "ij,k->ijk",
    "bic,bjc->bij", "nsc,hec->nshe", "nshe,che->nsc", "nshe,nthe->nhst", "nhst,nthe->nshe", "ncdhw,ocdhw->no",
    "bmk,kn->mn", "ijk,kj->", "ij->ji", "bij->j", "ij->",
)  # fmt: skip


def draw_einsum(rng: Rng) -> Drawn:
    """Equations of one and two operands: batches, several summed labels, labels of one operand alone."""
    equation = EQUATIONS[int(rng.integers(len(EQUATIONS)))]
    labels = [c for c in dict.fromkeys(equation) if c.isalpha()]  # not a set: its order differs between processes
    length = {c: int(rng.choice([0, 1, 2, 3, 4, 5, 7], p=[0.02, 0.1, *[0.176] * 5])) for c in labels}
    arrays = [Array(tuple(length[c] for c in operand)) for operand in equation.partition("->")[0].split(",")]
    return "einsum", _with_parameter(rng, arrays), {"equation": equation}


def draw_linear(rng: Rng) -> Drawn:
    """Linear layers on 1 to 4 dims; one in four as a plan with overlaps runs it, in pieces where it is long."""
    inner, outer = int(rng.integers(1, 8)), int(rng.choice([1, 3, 4, 6, 40]))
    rows = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(0, 4))))
    if len(rows) and rng.random() < 0.05:
        rows = (0, *rows[1:])
    arrays = [Array((*rows, inner)), Array((outer, inner), parameter=True)]
    if rng.random() < 0.6:
        arrays.append(Array((outer,), parameter=True))
    return ("overlapped_linear" if rng.random() < 0.25 else "linear"), arrays, {}


def draw_matmul(rng: Rng) -> Drawn:
    """Vectors, matrices and batches of them that broadcast."""
    m, k, n = (int(v) for v in rng.integers(1, 7, 3))
    batch = [int(v) for v in rng.integers(1, 4, int(rng.integers(0, 3)))]
    shapes = []
    for vector, matrix in (((k,), (m, k)), ((k,), (k, n))):
        mine = [1 if rng.random() < 0.2 else v for v in batch[int(rng.integers(len(batch) + 1)) :]]
        shapes.append(vector if rng.random() < 0.15 else (*mine, *matrix))
    return "matmul", _with_parameter(rng, [Array(shape) for shape in shapes]), {}


def draw_embedding(rng: Rng) -> Drawn:
    """Tables with repeated indices, with and without a row of padding."""
    rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    shape = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(1, 4))))
    arguments = some(rng, {"padding_idx": int(rng.integers(-rows, rows))}, 0.3)
    arrays = [Array(shape, values=f"indices {rows}"), Array((rows, columns), parameter=bool(rng.integers(2)))]
    return "embedding", arrays, arguments


def _with_parameter(rng: Rng, arrays: list[Array]) -> list[Array]:
    if len(arrays) == 2 and rng.random() < 0.5:
        arrays[1] = Array(arrays[1].shape, parameter=True)
    return arrays


def place_einsum(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Lay operands out by labels."""
    left, _, result = arguments["equation"].partition("->")
    place_by_labels(rng, arrays, arguments, mesh, left.split(","), result)


def place_linear(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Lay input, weight and bias out; the bias whole, or as the outputs are split."""
    rows = "abc"[: len(arrays[0].shape) - 1]
    place_by_labels(rng, arrays[:2], arguments, mesh, [f"{rows}y", "zy"], f"{rows}z", arrays)
    if len(arrays) == 3 and rng.random() < 0.6 and "out" not in arguments:
        taken = {a for d in range(len(rows)) for a in arrays[0].layout.entry(d)}
        stack = tuple(a for a in arrays[1].layout.entry(0) if a not in taken)
        if stack == arrays[1].layout.entry(0):
            arrays[2] = Array(arrays[2].shape, Layout(stack), parameter=True)


def place_matmul(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Lay operands out by rows, columns and batches; dims of length 1, which may be broadcast, whole."""
    ndim = max(len(a.shape) for a in arrays)
    names = ["abcd"[ndim - len(a.shape) : ndim - 2] if len(a.shape) > 1 else "" for a in arrays]
    first = names[0] + ("xy" if len(arrays[0].shape) > 1 else "y")
    second = names[1] + ("yz" if len(arrays[1].shape) > 1 else "y")
    result = "".join(sorted(set(names[0] + names[1]))) + ("x" if "x" in first else "") + ("z" if "z" in second else "")
    place_by_labels(rng, arrays, arguments, mesh, [first, second], result, forbid_ones=True)


def place_embedding(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Lay indices and table out: rows are what is summed, columns the last dim of the result."""
    places = "nst"[: len(arrays[0].shape)]
    place_by_labels(rng, arrays, arguments, mesh, [places, "vc"], f"{places}c", partial=False)


def place_by_labels(
    rng: Rng,
    operands: list[Array],
    arguments: dict[str, Any],
    mesh: Mesh,
    labels: list[str],
    result: str,
    into: list[Array] | None = None,
    forbid_ones: bool = False,
    partial: bool = True,
) -> None:
    """Give each axis a label, which most operands that carry it are split by; sometimes two, and a hint which wins.

    Writes layouts into `into` (the operands by default), and now and then ``out`` into the arguments.
    """
    into = operands if into is None else into
    lengths: dict[str, int] = {}
    for text, array in zip(labels, operands, strict=True):
        lengths.update({c: max(n, lengths.get(c, 0)) for c, n in zip(text, array.shape, strict=True)})
    ones = {c for t, a in zip(labels, operands, strict=True) for c, n in zip(t, a.shape, strict=True) if n == 1}
    free = [c for c in lengths if not (forbid_ones and c in ones)]
    stacks: Stacks = [{c: [] for c in text} for text in labels]
    summed: list[list[str]] = [[] for _ in labels]
    wanted: dict[str, str] = {}
    for axis in [str(a) for a in rng.permutation(list(mesh))]:
        how = rng.random()
        if how < 0.15 or not free:
            continue
        if how < 0.22 and partial:
            summed[int(rng.integers(len(labels)))].append(axis)
        elif how < 0.4 and len(labels) == 2:
            _disagree(rng, axis, stacks, free, wanted)
        else:
            label = free[int(rng.integers(len(free)))]
            for held in stacks:
                if label in held and rng.random() < 0.8:
                    held[label].append(axis)
    for i, (text, array) in enumerate(zip(labels, operands, strict=True)):
        layout = Layout(*[tuple(stacks[i][c]) for c in text], partial=tuple(summed[i]))
        into[i] = Array(array.shape, layout, array.values, array.parameter)
    if wanted or rng.random() < 0.3:
        arguments["out"] = _result_layout(rng, mesh, result, lengths, wanted, forbid_ones)


def _disagree(rng: Rng, axis: str, stacks: Stacks, free: list[str], wanted: dict[str, str]) -> None:
    """Let an axis split one label in the first operand, another in the second; and draw which the result keeps."""
    sides = [[c for c in held if c in free] for held in stacks]
    if not all(sides):
        return
    first, second = (side[int(rng.integers(len(side)))] for side in sides)
    stacks[0][first].append(axis)
    stacks[1][second].append(axis)
    wanted[axis] = (first, second)[int(rng.integers(2))]


def _result_layout(
    rng: Rng, mesh: Mesh, result: str, lengths: dict[str, int], wanted: dict[str, str], forbid_ones: bool
) -> Layout:
    """A random layout of the result; the axes of `wanted` split their label, or are partial where that is gone."""
    shape = [lengths[c] for c in result]
    forbid = [d for d, n in enumerate(shape) if n == 1] if forbid_ones else []
    drawn = draw_layout(rng, shape, {a: n for a, n in mesh.items() if a not in wanted}, True, forbid) if shape else None
    dims = [list(drawn.entry(d)) if drawn else [] for d in range(len(shape))]
    partial = list(drawn.partial) if drawn else []
    for axis, label in wanted.items():
        if label in result:
            dims[result.index(label)].append(axis)
        else:
            partial.append(axis)
    return Layout(*[tuple(entry) for entry in dims], partial=tuple(partial))


PRODUCTS: dict[str, Family] = {
    "einsum": Family(draw_einsum, 2, place_einsum),
    "linear": Family(draw_linear, 1.5, place_linear),
    "matmul": Family(draw_matmul, 1, place_matmul),
    "embedding": Family(draw_embedding, 1, place_embedding),
}
