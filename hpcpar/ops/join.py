"""Joining tensors along dims, split or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar.layout.index_maps import piece_map
from hpcpar.layout.layout import Layout
from hpcpar.ops.core import Op, Rule, split_conflict
from hpcpar.ops.elementwise import to
from hpcpar.ops.gather import Gathering, Move
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class Concat(Op):
    """Join along a dim. Where it is split every rank fetches the pieces of its block of the result, in one phase."""

    name = "cat"
    linear = "sum"

    def rule(self, sigs: tuple[Signature, ...], dim: int) -> Rule:
        mesh, ndim = sigs[0].mesh, len(sigs[0].shape)
        for sig in sigs:
            if len(sig.shape) != ndim or any(d != dim and n != sigs[0].shape[d] for d, n in enumerate(sig.shape)):
                raise ValueError(f"cat along dim {dim}: shapes {[s.shape for s in sigs]} differ elsewhere")
        dims = [max((s.dims[d] for s in sigs), key=len) for d in range(ndim)]
        used = [a for stack in dims for a in stack]
        agree = all(dims[d][: len(s.dims[d])] == s.dims[d] for s in sigs for d in range(ndim))
        if not agree or len(set(used)) != len(used):
            raise split_conflict("cat", sigs, "repartition one of them to the layout of the other")
        partial = mesh.sort({a for s in sigs for a in s.partial} - set(used))
        moves = [s.with_layout(Layout(*dims, partial=partial)) for s in sigs]
        starts = np.cumsum([0, *[s.shape[dim] for s in sigs]]).tolist()
        shape = tuple(starts[-1] if d == dim else n for d, n in enumerate(sigs[0].shape))
        out = signature(mesh, shape, Layout(*dims, partial=partial))
        pieces = None
        if out.dims[dim]:
            pieces = [
                Gathering(m.resolved, [Move(piece_map, shape[dim], (a,)) if d == dim else None for d in range(ndim)])
                for m, a in zip(moves, starts, strict=False)
            ]
        a0, a1 = out.box[dim]
        cuts = [
            (min(max(a - a0, 0), a1 - a0), max(min(b - a0, a1 - a0), 0))
            for a, b in zip(starts, starts[1:], strict=False)
        ]
        return Rule(out, moves, [m.resolved for m in moves], sigs, (dim, cuts, pieces))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        from hpcpar.kernels import empty_channels_last

        dim, cuts, pieces = rule.plan
        parts = arrays if pieces is None else [p(a) for p, a in zip(pieces, arrays, strict=True)]
        first = arrays[0]
        if first.ndim < 3:
            return np.concatenate(parts, axis=dim), None
        out = empty_channels_last(rule.out.local_shape, np.result_type(*arrays), first)
        where: list[Any] = [slice(None)] * first.ndim
        for part, (a, b) in zip(parts, cuts, strict=True):
            if a < b:
                where[dim] = slice(a, b)
                out[tuple(where)] = part
        return out, None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        dim, cuts, pieces = rule.plan
        where: list[Any] = [slice(None)] * g.ndim
        grads = []
        for i, (need, (a, b)) in enumerate(zip(needs, cuts, strict=True)):
            where[dim] = slice(a, max(a, b))
            part = g[tuple(where)] if need else None
            grads.append(part if part is None or pieces is None else pieces[i].adjoint(part))
        return tuple(grads)


_cat = Concat()


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors joined along `dim`.

    Parameters
    ----------
    tensors : sequence of Tensor
        Equal in shape but for `dim`. A tensor that is split less than another is sliced; where `dim` is split, the
        result is split likewise, and blocks are fetched from where they are.

    Raises
    ------
    LayoutError
        Tensors that are split by different axes.
    """
    if not tensors:
        raise ValueError("cat of no tensors")
    if not -tensors[0].ndim <= dim < tensors[0].ndim:
        raise IndexError(f"cat: dim {dim} of tensors with {tensors[0].ndim} dims")
    common = np.result_type(*[t.dtype for t in tensors])
    return _cat(tuple(to(t, common) for t in tensors), (dim % tensors[0].ndim,))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors joined along a new dim, which is not split; the others may be."""
    from hpcpar.ops.shape import unsqueeze

    if not tensors:
        raise ValueError("stack of no tensors")
    return cat([unsqueeze(t, dim % (t.ndim + 1)) for t in tensors], dim % (tensors[0].ndim + 1))
