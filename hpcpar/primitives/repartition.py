"""Repartition: the same logical array under another layout, as a cached plan of simple steps.

A plan first slices (no message), then sums what is partial (a reduce-scatter where the target splits by the axis, an
all-reduce else), then gathers or exchanges blocks, and last makes partial what the target wants partial. An array
without partial axes moves exactly the words that a rank needs and does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.primitives.steps import AllGather, AllReduce, Embed, Exchange, Index, Mask, Plan, ReduceScatter, Slice
from hpcpar.signature import Signature, signature, two_meshes

Box = tuple[tuple[int, int], ...]

observers: list[Callable[[Any, Signature, Any, Signature], None]] = []
"""Called as ``observer(array, source, moved, target)`` after each move (the checked mode does)."""


def move(array: Any, source: Signature, target: Signature) -> Any:
    """Return this rank's shard of the logical array under `target`. Collective over the axes that differ.

    Adjoint: `move` from the target's resolved signature to the source's, as a gradient is a logical array too.
    """
    if source is target:
        return array
    moved = plan(source, target)(array)
    if observers:
        for observer in observers:
            observer(array, source, moved, target)
    return moved


def plan(source: Signature, target: Signature) -> Plan:
    """Return the plan, kept with the source; pure arithmetic except that communicators are looked up."""
    found = source.plans.get(target)
    if found is None:
        found = source.plans[target] = _make_plan(source, target)
    return found


def _make_plan(source: Signature, target: Signature) -> Plan:
    if source.mesh is not target.mesh:
        words = two_meshes(f"{source!r}", source.mesh, f"the target {target!r}", target.mesh)
        raise LayoutError(f"a repartition keeps the mesh: {words}")
    if source.shape != target.shape:
        raise ValueError(f"a repartition keeps the shape: {source!r} to {target!r}")
    steps: list[Any] = []
    at = _narrow(source, target, steps)
    at = _reduce(at, target, steps)
    at = _embed(at, target, steps)
    at = _widen(at, target, steps)
    new = tuple(a for a in target.partial if a not in at.partial)
    if new:
        steps.append(Mask(all(target.mesh.index(a) == 0 for a in new)))
    return Plan(tuple(steps), sum(s.words for s in steps))


def total_words(source: Signature, target: Signature) -> int:
    """Return how many elements all ranks together receive in a move between layouts without partial axes."""
    mesh, total = source.mesh, 0
    for index in np.ndindex(*mesh.shape.values()):
        coords = dict(zip(mesh.axes, index, strict=True))
        need = target.box_at(coords)
        held = _meet(need, source.box_at(coords))
        total += prod(b - a for a, b in need) - (prod(b - a for a, b in held) if held else 0)
    return total


def _relative(outer: Box, inner: Box) -> Index:
    return tuple(slice(b0 - a0, b1 - a0) for (a0, _), (b0, b1) in zip(outer, inner, strict=True))


def _step_to(at: Signature, dims: list[tuple[str, ...]], partial: tuple[str, ...]) -> Signature:
    return signature(at.mesh, at.shape, Layout(*dims, partial=partial))


def _narrow(at: Signature, target: Signature, steps: list[Any]) -> Signature:
    """Slice by the axes that the target adds at the end of a stack and that are replicated so far."""
    dims = list(at.dims)
    for d, (have, want) in enumerate(zip(at.dims, target.dims, strict=True)):
        if want[: len(have)] == have:
            for axis in want[len(have) :]:
                if axis in at.partial or axis in at.split_axes:
                    break
                dims[d] = (*dims[d], axis)
    new = _step_to(at, dims, at.partial)
    if new is not at:
        steps.append(Slice(_relative(at.box, new.box)))
    return new


def _reduce(at: Signature, target: Signature, steps: list[Any]) -> Signature:
    """Sum over partial axes: those by which the target splits at the end of a stack by a reduce-scatter each."""
    mesh = at.mesh
    for d, want in enumerate(target.dims):
        for axis in want:
            if axis not in at.partial or at.dims[d] != want[: want.index(axis)]:
                continue
            dims = list(at.dims)
            dims[d] = (*dims[d], axis)
            new = _step_to(at, dims, tuple(a for a in at.partial if a != axis))
            pieces = tuple(_relative(at.box, new.box_at({**mesh.coords, axis: r})) for r in range(mesh.shape[axis]))
            steps.append(ReduceScatter(mesh.comm(axis), d, pieces, at.local_size - new.local_size))
            at = _narrow(new, target, steps)
    left = tuple(a for a in at.partial if a not in target.partial)
    if left:
        comm = mesh.comm(*left)
        steps.append(AllReduce(comm, 2 * (comm.size - 1) / comm.size * at.local_size))
        at = _step_to(at, list(at.dims), tuple(a for a in at.partial if a in target.partial))
        at = _narrow(at, target, steps)
    return at


def _embed(at: Signature, target: Signature, steps: list[Any]) -> Signature:
    """Split axes that the target has as partial: the block among zeros."""
    axes = [a for a in target.partial if a in at.split_axes]
    dims = list(at.dims)
    for d, have in enumerate(at.dims):
        keep = have
        while keep and keep[-1] in axes:
            keep = keep[:-1]
        if any(a in axes for a in keep):  # the axis is inside the stack: bring it out first
            keep_first = tuple(a for a in keep if a not in axes)
            middle_dims = list(dims)
            middle_dims[d] = keep_first
            middle = _step_to(at, middle_dims, at.partial)
            _blocks_to(at, middle, steps)
            at = middle
            keep = keep_first
        dims[d] = keep
    now = [a for a in axes if a in at.split_axes]
    new = _step_to(at, dims, at.mesh.sort([*at.partial, *now]))
    if new is not at:
        steps.append(Embed(new.local_shape, _relative(new.box, at.box)))
    return new


def _widen(at: Signature, target: Signature, steps: list[Any]) -> Signature:
    """Gather, or exchange blocks, until the dims are the target's."""
    if any(have[: len(want)] != want for have, want in zip(at.dims, target.dims, strict=True)):
        new = _step_to(at, list(target.dims), at.partial)
        _blocks_to(at, new, steps)
        return new
    for d, want in enumerate(target.dims):
        dropped = at.dims[d][len(want) :]
        if not dropped:
            continue
        dims = list(at.dims)
        dims[d] = want
        new = _step_to(at, dims, at.partial)
        if at.mesh.sort(dropped) == dropped:
            comm = at.mesh.comm(*dropped)
            shapes = tuple(tuple(b - a for a, b in at.box_at(c)) for c in _peers(at, comm.size, dropped))
            steps.append(AllGather(comm, d, shapes, new.local_size - at.local_size))
        else:  # the stack is not in mesh order, so ranks are not in block order
            _blocks_to(at, new, steps)
        at = new
    return at


def _peers(at: Signature, size: int, axes: tuple[str, ...]) -> list[dict[str, int]]:
    """Coordinates of the ranks of the communicator along `axes`, in its rank order."""
    mesh, axes = at.mesh, at.mesh.sort(axes)
    result = []
    for r in range(size):
        coords, rest = mesh.coords, r
        for axis in reversed(axes):
            coords[axis] = rest % mesh.shape[axis]
            rest //= mesh.shape[axis]
        result.append(coords)
    return result


def _meet(a: Box, b: Box) -> Box | None:
    box = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return box if all(lo < hi for lo, hi in box) else None


def _blocks_to(source: Signature, target: Signature, steps: list[Any]) -> None:
    """Append the general exchange between two ways of splitting.

    Along axes that do not split the source its blocks are replicated; a rank then takes them from the owner that
    shares its own coordinate there, so each element arrives once and what a rank holds itself is never sent.
    """
    mesh = source.mesh
    axes = mesh.sort({*source.split_axes, *target.split_axes})
    comm = mesh.comm(*axes)
    everyone = _peers(source, comm.size, axes)
    replicated = [a for a in axes if a not in source.split_axes]
    mine = mesh.coords
    sends, receives, own, words = [], [], None, 0
    for peer, coords in enumerate(everyone):
        if any(coords[a] != mine[a] for a in replicated):
            continue
        out = _meet(source.box, target.box_at(coords))
        into = _meet(source.box_at(coords), target.box)
        if peer == comm.rank:
            if out:
                own = (_relative(target.box, out), _relative(source.box, out))
            continue
        if out:
            sends.append((peer, _relative(source.box, out)))
        if into:
            shape = tuple(b - a for a, b in into)
            receives.append((peer, _relative(target.box, into), shape))
            words += prod(shape)
    steps.append(Exchange(comm, target.local_shape, own, tuple(sends), tuple(receives), words))
