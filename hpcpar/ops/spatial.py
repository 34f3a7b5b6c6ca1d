"""What operations on spatial dims share: arguments per dim, and the halo exchange behind a signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from hpcpar.kernels.arrays import zeros_channels_last
from hpcpar.layout.maps import Map, Run
from hpcpar.layout.plan import DimPlan, block_plan
from hpcpar.primitives.channel import Pending
from hpcpar.primitives.halo import HaloExchange
from hpcpar.primitives.stencil import split_halo
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor
from hpcpar.transport.device import is_device

Lengths = int | Sequence[int]


def per_dim(name: str, what: str, value: Lengths, count: int) -> tuple[int, ...]:
    """Return `value` as one integer for each of `count` spatial dims."""
    values = (int(value),) * count if isinstance(value, (int, np.integer)) else tuple(int(v) for v in value)
    if len(values) == 1:
        values *= count
    if len(values) != count:
        raise ValueError(f"{name}: {what} is an integer or {count} of them, got {value!r}")
    return values


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the results of a pure function are kept, where its arguments can be keys (lists cannot)."""
    kept = lru_cache(1024)(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return kept(*arguments)
        except TypeError:
            return function(*arguments)

    return call


def check_spatial(name: str, x: Tensor | Signature, ndim: int) -> None:
    """Raise ValueError unless x is (N, C, `ndim` spatial dims)."""
    if len(x.shape) != ndim + 2:
        raise ValueError(f"{name} takes x of shape (N, C, {ndim} spatial dims), got {x.shape}")


def with_batch(ndim: int, x: Tensor, call: Callable[[Tensor], Any]) -> Any:
    """Return ``call(x)``; a single sample (C, `ndim` spatial dims) gets a batch dim, and its results lose it again."""
    if x.ndim != ndim + 1:
        return call(x)
    from hpcpar.ops.shape import squeeze, unsqueeze

    results = call(unsqueeze(x, 0))
    return tuple(squeeze(y, 0) for y in results) if isinstance(results, tuple) else squeeze(results, 0)


class Halo:
    """The halo exchange of one operand: plans made with the rule, buffers looked up by batch, channels and dtype.

    Parameters
    ----------
    source : Signature
        (N, C, *spatial) of the array whose elements are needed, resolved.
    outs : sequence of int
        Length of each spatial dim of what is computed; its blocks follow from the block rule.
    builders, arguments
        For each spatial dim the constructor of the map, and what it takes behind ``(n, o0, o1)``.
    pads : {"fill", "kernel"}
        See `HaloExchange`.
    """

    __slots__ = ("mesh", "pads", "part", "plans", "stacks", "trivial")

    def __init__(
        self,
        source: Signature,
        outs: Sequence[int],
        builders: Sequence[Callable[..., Map]],
        arguments: Sequence[tuple],
        pads: str = "fill",
    ) -> None:
        self.mesh = source.mesh
        self.stacks = source.dims[2:]
        self.pads = pads
        dims = range(2, len(source.shape))
        self.plans = tuple(
            block_plan(builder, source.shape[d], source.parts(d), source.part_index(d, self.mesh.coords), out, *args)
            for d, out, builder, args in zip(dims, outs, builders, arguments, strict=True)
        )
        shown = [p.without_padding if pads == "kernel" else p for p in self.plans]
        self.part = own_part(shown)
        self.trivial = self.part is not None and all(plan.is_identity for plan in shown)

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Per spatial dim, what is left to the kernel."""
        return tuple(p.without_padding.padding if self.pads == "kernel" else (0, 0) for p in self.plans)

    def exchange(self, array: Any, lead: tuple[int, int] | None = None) -> HaloExchange:
        """Return the exchange for arrays like `array` (N, C and dtype count)."""
        options = {"pads": self.pads, "device": is_device(array)}
        return split_halo(self.mesh, self.stacks, self.plans, lead or array.shape[:2], array.dtype, **options)

    def __call__(self, array: Any, fill: Any = 0) -> Any:
        """Return the buffer: what this rank needs of the array; a view where that is a part of its own block."""
        if self.part is not None:
            return array if self.trivial else array[(..., *self.part)]
        return self.exchange(array)(array, fill)

    def start(self, array: Any, fill: Any = 0) -> Pending:
        """Start the exchange; `Pending.wait` returns the buffer."""
        return Pending(self(array, fill)) if self.part is not None else self.exchange(array).start(array, fill)

    def start_adjoint(self, g: Any, give: bool = False) -> Pending:
        """Start the adjoint; `Pending.wait` returns the sum."""
        return Pending(self.adjoint(g)) if self.part is not None else self.exchange(g).start_adjoint(g, give)

    def adjoint(self, g: Any, give: bool = False) -> Any:
        """Return the sum, on the owners, of the gradient of the buffer; `give` it if it may be changed."""
        if self.trivial:
            return g
        if self.part is None:
            return self.exchange(g).adjoint(g, give)
        dx = zeros_channels_last((*g.shape[:2], *(plan.length for plan in self.plans)), g.dtype, g)
        dx[(..., *self.part)] = g
        return dx

    def __str__(self) -> str:
        return "\n".join(f"dim {d + 2}: {plan}" for d, plan in enumerate(self.plans))


def own_part(plans: Sequence[DimPlan]) -> tuple[slice, ...] | None:
    """Return the part of the own block that is the whole buffer, or None where it takes messages, filling or copies."""
    part = []
    for plan in plans:
        if not {plan.coord}.issuperset(plan.recv) or not {plan.coord}.issuperset(plan.send):
            return None
        if plan.size == 0:
            part.append(slice(0, 0))
            continue
        run = plan.own[0] if plan.own else Run(0, 0, 0)
        if run.length != plan.size or run.step != 1:
            return None
        part.append(slice(run.src, run.src + run.length))
    return tuple(part)


def global_positions(index: Any, size: Sequence[int], begin: Sequence[int], spatial: Sequence[int]) -> Any:
    """Return flat positions in a buffer as flat positions in the whole spatial box, int64; -1 stays -1.

    Parameters
    ----------
    size, begin : sequence of int
        Lengths of the buffer, and the global coordinates at which it begins.
    spatial : sequence of int
        Lengths of the whole box.
    """
    rest = index.astype(np.int64)
    if tuple(size) == tuple(spatial) and not any(begin):
        return rest
    found, flat, scale = rest >= 0, np.zeros_like(rest), 1
    for length, first, n in zip(size[::-1], begin[::-1], spatial[::-1], strict=True):
        flat += (rest % max(length, 1) + first) * scale
        rest = rest // max(length, 1)
        scale *= n
    return np.where(found, flat, -1)


def local_positions(index: Any, size: Sequence[int], begin: Sequence[int], spatial: Sequence[int]) -> Any:
    """Return flat positions in the whole spatial box as flat positions in a buffer; -1 for those outside of it."""
    if tuple(size) == tuple(spatial) and not any(begin):
        return index
    rest, inside = index, index >= 0
    flat, scale = np.zeros_like(index), 1
    for length, first, n in zip(size[::-1], begin[::-1], spatial[::-1], strict=True):
        at = rest % n - first
        inside = inside & (at >= 0) & (at < length)
        flat += at * scale
        rest = rest // n
        scale *= length
    return np.where(inside, flat, -1)
