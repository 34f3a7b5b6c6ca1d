"""Operations that only move elements along split dims: slices with steps, pad, crop, flip, roll.

All are one operation: each dim has a gather map from positions of the result to positions of x, and the halo exchange
of these maps is the result. Its adjoint is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcpar.layout.index_maps import flip_map, pad_map, roll_map, slice_map
from hpcpar.layout.layout import Layout
from hpcpar.layout.maps import Map, interval_map
from hpcpar.layout.plan import block_plan
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.spatial import own_part, per_dim
from hpcpar.primitives.halo import HaloExchange
from hpcpar.primitives.stencil import split_halo
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor
from hpcpar.transport.device import is_device


class Move(NamedTuple):
    """What happens along one dim: a constructor of maps, the length of the result, and the constructor's arguments."""

    builder: Callable[..., Map]
    out: int
    arguments: tuple = ()


class Gathering:
    """The exchange of gather maps along any dims of an array with any number of dims.

    Parameters
    ----------
    source : Signature
        Of the array that elements are taken from, without partial axes.
    moves : sequence of Move or None
        One for each dim; None keeps it.
    """

    __slots__ = ("inverse", "lengths", "mesh", "order", "part", "plans", "stacks")

    def __init__(self, source: Signature, moves: Sequence[Move | None]) -> None:
        self.mesh, ndim = source.mesh, len(source.shape)
        given = [m or Move(interval_map, n) for m, n in zip(moves, source.shape, strict=True)]
        plans = [
            block_plan(m.builder, n, source.parts(d), source.part_index(d, self.mesh.coords), m.out, *m.arguments)
            for d, (m, n) in enumerate(zip(given, source.shape, strict=True))
        ]
        self.part = own_part(plans)
        self.lengths = source.local_shape
        # images and volumes lie channels last; the order of dims is that of messages, so all ranks must agree on it
        self.order = (0, *range(2, ndim), 1) if ndim > 3 else tuple(range(ndim))
        self.inverse = tuple(self.order.index(d) for d in range(ndim))
        self.plans = tuple(plans[d] for d in self.order)
        self.stacks = tuple(source.dims[d] for d in self.order)

    def exchange(self, array: Any) -> HaloExchange:
        """Return the exchange for arrays of this dtype and place."""
        return split_halo(self.mesh, self.stacks, self.plans, (1, 1), array.dtype, device=is_device(array))

    def __call__(self, array: Any, fill: Any = 0) -> Any:
        """Return this rank's block of the result; a view where it is a part of the own block."""
        if self.part is not None:
            return array[self.part]
        return self.exchange(array)(array.transpose(self.order)[None, None], fill)[0, 0].transpose(self.inverse)

    def adjoint(self, g: Any) -> Any:
        """Return the sum, on the owners, of the gradient of the result."""
        if self.part is None:
            return self.exchange(g).adjoint(g.transpose(self.order)[None, None])[0, 0].transpose(self.inverse)
        if g.shape == self.lengths:
            return g
        dx = np.zeros_like(g, shape=[self.lengths[d] for d in self.order], order="C").transpose(self.inverse)
        dx[self.part] = g
        return dx


class Gather(Op):
    """Every dim through a gather map; positions that show nothing are zero. Partial values stay partial."""

    name = "gather"
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], moves: tuple[Move | None, ...]) -> Rule:
        x = self.needed(sigs[0])
        shape = tuple(n if m is None else m.out for m, n in zip(moves, x.shape, strict=True))
        out = signature(x.mesh, shape, Layout(*x.dims, partial=x.partial))
        return Rule(out, [x], [x.resolved], sigs, Gathering(x.resolved, moves))

    def needed(self, x: Signature) -> Signature:
        """How the operand must lie."""
        return x

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return rule.plan(arrays[0]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (rule.plan.adjoint(g),)


class GatherFilled(Gather):
    """As `Gather`, with a value other than zero (`extra`) at positions that show nothing."""

    name = "pad"
    linear = None

    def needed(self, x: Signature) -> Signature:
        return x.resolved

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return rule.plan(arrays[0], extra), None


_gather, _gather_filled = Gather(), GatherFilled()


def gather_moves(x: Tensor, moves: dict[int, Move]) -> Tensor:
    """Return x with `moves` applied to some of its dims."""
    return _gather((x,), (tuple(moves.get(d) for d in range(x.ndim)),)) if moves else x


def slice_dims(x: Tensor, slices: dict[int, tuple[int, int, int]]) -> Tensor:
    """Return x with dims cut to (start, count, step), all inside; steps may be negative."""
    moves = {d: Move(slice_map, count, (start, step)) for d, (start, count, step) in slices.items()}
    return gather_moves(x, moves)


def flip(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Return x with the order of elements reversed along `dims`, split or not."""
    given = _dims("flip", x, [dims] if isinstance(dims, int) else dims)
    return gather_moves(x, {d: Move(flip_map, x.shape[d]) for d in given})


def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """Return x with elements moved forward along `dims`, split or not; what leaves at the end comes in at the start.

    Without `dims` the flattened array is rolled, which `reshape` refuses where it would move blocks between ranks.
    """
    if dims is None:
        from hpcpar.ops.shape import flatten, reshape

        return x if x.ndim == 0 else reshape(roll(flatten(x), shifts, 0), x.shape)
    moved = [dims] if isinstance(dims, int) else list(dims)
    steps = per_dim("roll", "shifts", shifts, 1) if isinstance(shifts, int) else tuple(shifts)
    if len(steps) != len(moved):
        raise ValueError(f"roll: {len(steps)} shifts for {len(moved)} dims")
    total: dict[int, int] = {}
    for d, step in zip(moved, steps, strict=True):
        (d,) = _dims("roll", x, [d])
        total[d] = total.get(d, 0) + int(step)
    return gather_moves(x, {d: Move(roll_map, n, (total[d] % n,)) for d, n in enumerate(x.shape) if total.get(d) and n})


def _dims(name: str, x: Tensor, dims: Sequence[int]) -> list[int]:
    wrong = [d for d in dims if not -x.ndim <= d < x.ndim]
    if wrong:
        raise IndexError(f"{name}: dim {wrong[0]} of a tensor with {x.ndim} dims")
    found = [d % x.ndim for d in dims]
    if name == "flip" and len(set(found)) != len(found):
        raise ValueError(f"{name}: a dim appears twice in {tuple(dims)}")
    return found


def crop(x: Tensor, size: int | Sequence[int], start: Sequence[int] | None = None) -> Tensor:
    """Return the part of the last dims that has lengths `size` and begins at `start`.

    Parameters
    ----------
    x : Tensor
        Any dims split.
    size : int or sequence of int
        For each of the last dims; one integer for all but the first two.
    start : sequence of int, optional
        By default the part lies in the middle (one element nearer to the start where it cannot).
    """
    count = x.ndim - 2 if isinstance(size, int) else len(size)
    sizes = per_dim("crop", "size", size, count)
    lengths = x.shape[x.ndim - count :]
    begin = [(n - m) // 2 for n, m in zip(lengths, sizes, strict=True)] if start is None else list(start)
    if len(begin) != count or any(a < 0 or m < 0 or a + m > n for a, m, n in zip(begin, sizes, lengths, strict=True)):
        raise ValueError(f"crop: {sizes} from {tuple(begin)} is not inside {lengths}")
    cuts = {x.ndim - count + i: (a, m, 1) for i, (a, m) in enumerate(zip(begin, sizes, strict=True)) if m != lengths[i]}
    return slice_dims(x, cuts)


PAD_WIDTHS = ("constant", "reflect", "replicate", "circular")


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Return x with elements added at, or taken from, the ends of dims.

    Parameters
    ----------
    x : Tensor
        Any dims split: padding is at the ends of the whole array.
    pad : sequence of int
        Pairs (before, after), the last dim first, as in torch; negative ones crop.
    mode : {"constant", "reflect", "replicate", "circular"}
        All but constant are for dims behind (N, C).
    value : float, optional
        Of constant padding; 0 by default, which keeps a partial x partial.

    Raises
    ------
    ValueError
        Widths that do not fit: reflection needs more elements than it repeats, wrapping at least as many.
    """
    widths = tuple(int(w) for w in pad)
    if mode not in PAD_WIDTHS:
        raise ValueError(f"pad: mode is one of {', '.join(PAD_WIDTHS)}, got {mode!r}")
    if len(widths) % 2 or len(widths) > 2 * x.ndim:
        raise ValueError(f"pad: pairs for at most {x.ndim} dims, got {widths}")
    if mode != "constant" and value:
        raise ValueError(f"pad: mode {mode!r} takes no value, got {value}")
    if mode != "constant" and len(widths) // 2 not in (x.ndim - 2, x.ndim - 1):
        raise ValueError(f"pad: mode {mode!r} takes pairs for all dims behind (N, C) or C, got {widths} for {x.shape}")
    moves = {}
    for i in range(len(widths) // 2):
        lo, hi = widths[2 * i : 2 * i + 2]
        d = x.ndim - 1 - i
        _check_widths(x.shape[d], lo, hi, mode)
        if lo or hi:
            moves[d] = Move(pad_map, x.shape[d] + lo + hi, (lo, hi, mode))
    if mode == "constant" and value and moves:
        return _gather_filled((x,), (tuple(moves.get(d) for d in range(x.ndim)),), value)
    return gather_moves(x, moves)


def _check_widths(n: int, lo: int, hi: int, mode: str) -> None:
    most = {"reflect": n - 1, "circular": n}.get(mode)
    left = n + min(lo, 0) + min(hi, 0)
    if n + lo + hi < 0 or (mode == "circular" and left < 1 and n + lo + hi > 0):
        raise ValueError(f"pad: {(lo, hi)} takes more than there is of a dim of length {n}")
    if most is not None and max(lo, hi) > most:
        raise ValueError(f"pad: {(lo, hi)} is too wide for mode {mode!r} on a dim of length {n}")
