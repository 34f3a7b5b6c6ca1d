"""What operations on spatial dims share: arguments per dim, and the halo exchange behind a signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcpar.layout.maps import Map
from hpcpar.layout.plan import block_plan
from hpcpar.primitives.halo import HaloExchange
from hpcpar.primitives.stencil import split_halo
from hpcpar.signature import Signature
from hpcpar.transport.device import is_device


def per_dim(name: str, what: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return `value` as one integer for each of `count` spatial dims."""
    values = (value,) * count if isinstance(value, int) else tuple(int(v) for v in value)
    if len(values) == 1:
        values *= count
    if len(values) != count:
        raise ValueError(f"{name}: {what} is an integer or {count} of them, got {value!r}")
    return values


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

    __slots__ = ("mesh", "pads", "plans", "stacks", "trivial")

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
        self.plans = tuple(
            block_plan(builder, n, source.parts(d), source.part_index(d, self.mesh.coords), out, *args)
            for d, n, out, builder, args in zip(range(2, len(source.shape)), source.shape[2:], outs, builders, arguments, strict=True)
        )
        shown = [p.without_padding if pads == "kernel" else p for p in self.plans]
        self.trivial = all(p.parts == 1 and q.is_identity for p, q in zip(self.plans, shown, strict=True))

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Per spatial dim, what is left to the kernel."""
        return tuple(p.without_padding.padding if self.pads == "kernel" else (0, 0) for p in self.plans)

    def exchange(self, array: Any, lead: tuple[int, int] | None = None) -> HaloExchange:
        """Return the exchange for arrays like `array` (N, C and dtype count)."""
        return split_halo(
            self.mesh, self.stacks, self.plans, lead or array.shape[:2], array.dtype, pads=self.pads, device=is_device(array)
        )

    def __call__(self, array: Any, fill: Any = 0) -> Any:
        """Return the buffer: what this rank needs of the array."""
        return array if self.trivial else self.exchange(array)(array, fill)

    def adjoint(self, g: Any) -> Any:
        """Return the sum, on the owners, of the gradient of the buffer."""
        return g if self.trivial else self.exchange(g).adjoint(g)

    def __str__(self) -> str:
        return "\n".join(f"dim {d + 2}: {plan}" for d, plan in enumerate(self.plans))
