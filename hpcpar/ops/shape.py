"""Operations that only rearrange: reshape, permute, index, expand."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hpcpar.layout.blocks import owned
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.broadcast import unbroadcast
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.gather import slice_dims
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class Reshape(Op):
    """Free where, in every group of dims that are merged or parted, only the slowest is split, at borders that stay."""

    name = "reshape"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], shape: tuple[int, ...]) -> Rule:
        sig = sigs[0]
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for old, new in reshape_groups(sig.shape, shape):
            split = [d for d in old if sig.dims[d]]
            if not split:
                continue
            if [sig.shape[d] for d in old if sig.shape[d] != 1] == [shape[d] for d in new if shape[d] != 1]:
                _carry(sig, old, new, shape, dims)
                continue
            first = next(d for d in old if sig.shape[d] != 1)
            into = next(d for d in new if shape[d] != 1)
            inner = prod(sig.shape[d] for d in old[old.index(first) + 1 :])
            new_inner = prod(shape[d] for d in new[new.index(into) + 1 :])
            p = sig.parts(first)
            same = all(
                owned(sig.shape[first], p, r)[0] * inner == owned(shape[into], p, r)[0] * new_inner for r in range(p)
            )
            if split != [first] or not same:
                raise LayoutError(
                    f"reshape of {sig!r} to {shape}: dims {tuple(split)} are split inside a group that changes, so "
                    f"blocks would cross ranks; keep the dims apart, repartition first, or say reshape(..., layout=...)"
                )
            dims[into] = sig.dims[first]
        out = signature(sig.mesh, shape, Layout(*dims, partial=sig.partial))
        return Rule(out, [sig], [sig.resolved], sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return arrays[0].reshape(rule.out.local_shape), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g.reshape(rule.grads[0].local_shape),)


def _carry(sig: Signature, old: list[int], new: list[int], shape: tuple[int, ...], dims: list) -> None:
    """A group that only gains or loses dims of length 1: its other dims keep their axes."""
    kept_old = [d for d in old if sig.shape[d] != 1]
    kept_new = [d for d in new if shape[d] != 1]
    for a, b in zip(kept_old, kept_new, strict=True):
        dims[b] = sig.dims[a]
    lost = [d for d in old if sig.shape[d] == 1 and sig.dims[d]]
    if lost:
        raise LayoutError(f"reshape of {sig!r} to {shape}: dim {lost[0]} of length 1 is split; repartition it first")


def reshape_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of dims with equal products on both sides, in order."""
    if prod(old) == 0:
        if old == new:
            return [([d], [d]) for d in range(len(old))]
        return [(list(range(len(old))), list(range(len(new))))]
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        if i < len(old):
            a, left, i = old[i], [i], i + 1
        if j < len(new):
            b, right, j = new[j], [j], j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
                left.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                right.append(j - 1)
        while i < len(old) and old[i] == 1:
            left.append(i)
            i += 1
        while j < len(new) and new[j] == 1:
            right.append(j)
            j += 1
        groups.append((left, right))
    return groups


class Permute(Op):
    """Dims in another order; a view, without message."""

    name = "permute"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], order: tuple[int, ...]) -> Rule:
        sig = sigs[0]
        shape = tuple(sig.shape[d] for d in order)
        out = signature(sig.mesh, shape, Layout(*[sig.dims[d] for d in order], partial=sig.partial))
        return Rule(out, [sig], [sig.resolved], sigs, (order, tuple(int(i) for i in np.argsort(order))))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return arrays[0].transpose(rule.plan[0]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g.transpose(rule.plan[1]),)


class Expand(Op):
    """Dims of length 1 (and new leading dims) repeated; a view."""

    name = "expand"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], shape: tuple[int, ...]) -> Rule:
        sig = sigs[0]
        offset = len(shape) - len(sig.shape)
        grown = [d for d, n in enumerate(sig.shape) if n == 1 and shape[offset + d] != 1]
        kept = [() if d in grown else stack for d, stack in enumerate(sig.dims)]
        needed = sig.with_layout(Layout(*kept, partial=sig.partial))
        out = signature(sig.mesh, shape, Layout(*[()] * offset, *needed.dims, partial=sig.partial))
        how = (offset, tuple(grown)) if offset or grown else None
        return Rule(out, [needed], [needed.resolved], sigs, how)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return np.broadcast_to(arrays[0], rule.out.local_shape), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (unbroadcast(g, rule.plan),)


class Unsqueeze(Op):
    """A new dim of length 1, not split; a view."""

    name = "unsqueeze"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], at: int) -> Rule:
        sig = sigs[0]
        shape, dims = (*sig.shape[:at], 1, *sig.shape[at:]), (*sig.dims[:at], (), *sig.dims[at:])
        where = (slice(None),) * at
        return Rule(sig.with_shape(shape, dims), [sig], [sig.resolved], sigs, ((*where, None), (*where, 0)))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return arrays[0][rule.plan[0]], None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g[(*rule.plan[1], ...)],)


class Index(Op):
    """Basic slicing: numbers along any dims, slices with positive steps along dims that are not split.

    The element at a number in a split dim is known to one block alone: the result is partial over the dim's axes.
    """

    name = "getitem"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], items: tuple[tuple[int, int, int] | int, ...]) -> Rule:
        sig = sigs[0]
        shape, stacks, summed, local, mine = [], [], list(sig.partial), [], True
        for d, item in enumerate(items):
            a, b = sig.box[d]
            if isinstance(item, int):
                summed += sig.dims[d]
                mine = mine and a <= item < b
                local.append(item - a)
                continue
            whole = item == (0, sig.shape[d], 1)
            assert whole or not sig.dims[d], f"slices of the split dim {d} of {sig!r} are gathered before"
            local.append(slice(None) if whole else slice(*item))
            shape.append(len(range(*item)))
            stacks.append(sig.dims[d])
        out = signature(sig.mesh, tuple(shape), Layout(*stacks, partial=sig.mesh.sort(summed)))
        return Rule(out, [sig], [sig.resolved], sigs, tuple(local) if mine else None)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        if rule.plan is None:
            return np.zeros_like(arrays[0], shape=rule.out.local_shape), None
        part = arrays[0][rule.plan]
        return (np.asarray(part) if isinstance(arrays[0], np.ndarray) else part), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        from hpcpar.kernels import empty_channels_last

        dx = empty_channels_last(rule.grads[0].local_shape, g.dtype, g)
        dx[...] = 0
        if rule.plan is not None:
            dx[rule.plan] = g
        return (dx,)


_reshape, _permute, _expand, _unsqueeze, _index = Reshape(), Permute(), Expand(), Unsqueeze(), Index()


def reshape(x: Tensor, *shape: Any, layout: Layout | None = None) -> Tensor:
    """Return x in another shape; one length may be -1.

    Parameters
    ----------
    layout : Layout, optional
        The explicit way out where blocks would cross ranks: the dims are gathered as far as needed, reshaped, and split
        as asked for. Without it such a reshape is a LayoutError.
    """
    given = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    full = _full_shape(given, x)
    if full == x.shape and layout is None:
        return x
    if layout is None:
        return _reshape((x,), (full,))
    from hpcpar.ops.repartition import repartition

    return repartition(_reshape((repartition(x, _reshapable(x, full)),), (full,)), layout)


def _reshapable(x: Tensor, shape: tuple[int, ...]) -> Layout:
    """The layout of x with the dims gathered whose group would not survive the reshape."""
    stacks = list(x.sig.dims)
    for old, new in reshape_groups(x.shape, shape):
        if [x.shape[d] for d in old] != [shape[d] for d in new]:
            for d in old:
                stacks[d] = ()
    return Layout(*stacks, partial=x.sig.partial)


def _full_shape(shape: Sequence[int], x: Tensor) -> tuple[int, ...]:
    known = prod(n for n in shape if n != -1)
    if list(shape).count(-1) > 1 or any(n < -1 for n in shape):
        raise ValueError(f"reshape: {tuple(shape)} is not a shape")
    full = tuple((x.sig.size // known if known else 0) if n == -1 else int(n) for n in shape)
    if prod(full) != x.sig.size:
        raise ValueError(f"reshape: {x.shape} has {x.sig.size} elements, {tuple(shape)} does not")
    return full


def permute(x: Tensor, *dims: Any) -> Tensor:
    """Return x with its dims in the given order; a view."""
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    order = tuple(d % x.ndim for d in order)
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"permute: {order} is not an order of {x.ndim} dims")
    return _permute((x,), (order,))


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return x with two dims exchanged; a view."""
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute((x,), (tuple(order),))


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return x with the dims from `start_dim` to `end_dim` merged; see `reshape` about split dims."""
    if x.ndim == 0:
        return reshape(x, 1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return reshape(x, (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Return x without the given dims (all by default) of length 1; partial over the axes that split one of them."""
    given = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = [d % max(x.ndim, 1) for d in given]
    gone = [d for d in dims if x.shape[d] == 1]
    # a reshape could not tell split dims of length 1 apart
    if any(stack for stack, n in zip(x.sig.dims, x.shape, strict=True) if n == 1):
        return index(x, tuple(0 if d in gone else slice(None) for d in range(x.ndim)))
    return reshape(x, tuple(n for d, n in enumerate(x.shape) if d not in gone))


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """Return x with a new dim of length 1 at `dim`, which is not split."""
    return _unsqueeze((x,), (dim % (x.ndim + 1),))


def expand(x: Tensor, *shape: Any) -> Tensor:
    """Return x with dims of length 1 (and new leading dims) repeated to `shape`; -1 keeps a length."""
    given = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    offset = len(given) - x.ndim
    full = tuple(x.shape[d - offset] if n == -1 else int(n) for d, n in enumerate(given))
    if offset < 0 or any(a not in (1, b) for a, b in zip(x.shape, full[offset:], strict=True)):
        raise ValueError(f"expand: {x.shape} cannot be repeated to {given}")
    return _expand((x,), (full,))


def index(x: Tensor, item: Any) -> Tensor:
    """Return x[item] for numbers, slices, ``...`` and None.

    A slice of a split dim is split likewise, by the block rule, and fetches what it needs; a number there leaves the
    result partial over the axes of that dim, without a message.
    """
    items = list(item) if isinstance(item, tuple) else [item]
    given = sum(i is not None and i is not Ellipsis for i in items)
    if given > x.ndim:
        raise IndexError(f"{given} indices for a tensor with {x.ndim} dims")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.ndim - given)
    else:
        items += [slice(None)] * (x.ndim - given)
    basic, new_at, d, out = [], [], 0, 0
    for i in items:
        if i is None:
            new_at.append(out)
            out += 1
            continue
        n = x.shape[d]
        if isinstance(i, slice):
            start, stop, step = i.indices(n)
            if step < 0:
                raise ValueError("getitem: steps are positive; use flip")
            basic.append((start, max(start, stop), step))
            out += 1
        elif isinstance(i, (int, np.integer)) and not isinstance(i, bool):
            if not -n <= i < n:
                raise IndexError(f"index {i} is outside dim {d} of length {n}")
            if x.sig.dims[d] and x.dtype == bool:
                raise LayoutError(f"getitem: a number in the split dim {d} of a bool tensor; convert it with .to first")
            basic.append(int(i) % n)
        else:
            raise TypeError(f"getitem takes numbers, slices, ... and None, got {type(i).__name__}")
        d += 1
    x, basic = _gathered(x, basic)
    result = x if all(b == (0, n, 1) for b, n in zip(basic, x.shape, strict=True)) else _index((x,), (tuple(basic),))
    for at in new_at:
        result = unsqueeze(result, at)
    return result


def _gathered(x: Tensor, items: list[Any]) -> tuple[Tensor, list[Any]]:
    """Slice split dims, by an exchange; return the result and what is left to do locally."""
    slices, left = {}, list(items)
    for d, item in enumerate(items):
        if not isinstance(item, int) and x.sig.dims[d] and item != (0, x.shape[d], 1):
            start, stop, step = item
            count = len(range(start, stop, step))
            slices[d], left[d] = (start, count, step), (0, count, 1)
    return slice_dims(x, slices), left


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return `length` elements of `dim`, split or not, from `start` on."""
    if not 0 <= start <= start + length <= x.shape[dim]:
        raise ValueError(f"narrow: {length} elements from {start} on are not in dim {dim} of length {x.shape[dim]}")
    items: list[Any] = [slice(None)] * x.ndim
    items[dim] = slice(start, start + length)
    return index(x, tuple(items))


def split(x: Tensor, size: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    """Return x cut along `dim` into pieces of `size` (the last may be shorter), or of the given sizes."""
    n = x.shape[dim]
    sizes = [min(size, n - a) for a in range(0, n, size)] if isinstance(size, int) else list(size)
    if sum(sizes) != n:
        raise ValueError(f"split: sizes {sizes} do not add up to {n}")
    starts = np.cumsum([0, *sizes]).tolist()
    return [narrow(x, dim, a, s) for a, s in zip(starts, sizes, strict=False)]


def chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """Return x cut along `dim` into `chunks` pieces of (nearly) equal length, as torch cuts it."""
    return split(x, -(-x.shape[dim] // chunks), dim)
