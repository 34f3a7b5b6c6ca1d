"""The halo exchange: every rank gets, in one phase, the product of its gather maps of a split array; and the adjoint.

Each rank sends to every rank whose needed box meets its block one message with each needed element once. Corners are
ordinary messages, and nothing knows of left and right neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from hpcpar.kernels import array_module, outline
from hpcpar.kernels.arrays import last
from hpcpar.layout.plan import DimPlan
from hpcpar.primitives import room
from hpcpar.primitives.boxes import Copies, fill_boxes, rows_of, single_box
from hpcpar.primitives.channel import Channel, CountedChannel, Message, Pending
from hpcpar.transport import Comm
from hpcpar.transport.device import is_device

IN_PLACE_BYTES = 4096
"""Messages whose runs of memory are at least this long are sent from, and received into, the arrays themselves."""

_TAG_FORWARD, _TAG_ADJOINT = 11, 12


class HaloExchange:
    """What each rank needs of an array split over the ranks of one communicator, as a linear operator.

    Parameters
    ----------
    comm : Comm
        The communicator over all axes that split the dims.
    dim_plans : sequence of DimPlan
        One for each dim after N and C: what this rank needs of it. A dim of one part takes part through its map.
    lead : (int, int)
        Local lengths (N, C) of the dims that are not described by plans; equal on all ranks of `comm`.
    dtype : dtype
        Any fixed-size dtype.
    ranks : array of int, optional
        ``ranks[c0, c1, ...]`` is the rank in `comm` of the block at coordinates (c0, c1, ...) of the dims. By default
        ranks are row-major over the dims.
    pads : {"fill", "kernel"}
        Whether FILL at the ends of a dim is part of the buffer, or is left to the local kernel, which then adds
        `padding` itself.
    device : bool
        Whether the arrays live on a GPU; messages are then staged through pinned host memory.

    Attributes
    ----------
    block_shape, shape : tuple of int
        Logical local shapes (N, C, ...) of the array given and of the buffer returned.
    padding : tuple of (int, int)
        Per dim, what was left to the kernel; zeros with ``pads="fill"``.
    peers : tuple of int
        Ranks that this one exchanges messages with.
    bytes_sent, bytes_received : int
        Of one forward exchange; the adjoint has them swapped.

    Notes
    -----
    Arrays are logical (N, C, *dims) in any memory order; buffers lie channels last. The adjoint of `start` is
    `start_adjoint`: ``<H x, g> = <x, H* g>``. An element that is needed several times travels once; in the adjoint its
    gradients are summed by who borrowed it and sent back, and the owner adds its own part first and then the others in
    ascending rank, after all have arrived, so that the bits of the sum do not depend on when messages arrive.

    An exchange may be started again while an earlier one is under way: each start takes a set of message buffers from
    a free list. All ranks start exchanges on one communicator in the same order.
    """

    def __init__(
        self,
        comm: Comm,
        dim_plans: Sequence[DimPlan],
        lead: tuple[int, int],
        dtype: Any,
        *,
        ranks: np.ndarray | None = None,
        pads: str = "fill",
        device: bool = False,
    ) -> None:
        if pads not in ("fill", "kernel"):
            raise ValueError(f"pads is 'fill' or 'kernel', not {pads!r}")
        self.plans = tuple(p.without_padding if pads == "kernel" else p for p in dim_plans)
        self.comm, self.dtype, self.device = comm, np.dtype(dtype), device
        parts = tuple(p.parts for p in self.plans)
        self._ranks = np.arange(prod(parts)).reshape(parts) if ranks is None else np.asarray(ranks)
        coords = tuple(p.coord for p in self.plans)
        assert self._ranks.shape == parts and int(self._ranks[coords]) == comm.rank, (
            f"rank {comm.rank} of {comm} is not at coordinates {coords} of parts {parts}"
        )
        self.padding = tuple(p.padding for p in self.plans)
        self._to_memory = (0, *range(2, len(parts) + 2), 1)
        self._to_logical = (0, len(parts) + 1, *range(1, len(parts) + 1))
        self.block_shape = (*lead, *(p.length for p in self.plans))
        self.shape = (*lead, *(p.size for p in self.plans))
        self._lent = self._messages([p.send for p in self.plans], "src", self.block_shape)
        self._borrowed = self._messages([p.recv for p in self.plans], "dst", self.shape)
        self._own = Copies([p.own for p in self.plans], [p.length for p in self.plans])
        self._fills = fill_boxes([p.holes for p in self.plans], [p.size for p in self.plans])
        self._room = self._widths()
        rows = [prod(self.shape[d + 1 :]) * lead[1] for d in range(2, len(self.shape))]
        before = [planes for planes, _ in self._room or ()]
        self._begin = sum(n * row for n, row in zip(before, rows, strict=False)) * self.dtype.itemsize
        self._same = not self._borrowed and all(p.is_identity for p in self.plans)
        self.peers = tuple(sorted({m.peer for m in (*self._lent, *self._borrowed)}))
        self.bytes_sent, self.bytes_received = (
            sum(prod(m.shape) for m in messages) * self.dtype.itemsize for messages in (self._lent, self._borrowed)
        )
        channel = Channel if comm.handle is not None else CountedChannel  # on a virtual mesh nobody is there to talk to
        self._forward = channel(comm, self._lent, self._borrowed, _TAG_FORWARD, self._empty)
        # gradients that come back are added, so they need a place of their own
        back = [m._replace(rows=None) for m in self._lent]
        self._backward = channel(comm, self._borrowed, back, _TAG_ADJOINT, self._empty)

    def _messages(self, pieces: Sequence[Any], side: str, shape: tuple[int, ...]) -> list[Message]:
        """The messages of one direction, ascending by peer; `side` is the array's side of the runs."""
        batch, channels = shape[:2]
        memory_shape = (batch, *shape[2:], channels)
        messages = []
        for coords in product(*pieces) if batch * channels else ():
            peer = int(self._ranks[coords])
            if peer == self.comm.rank:
                continue
            chosen = [piece[q] for piece, q in zip(pieces, coords, strict=True)]
            counts = [piece.count for piece in chosen]
            runs = [piece.runs for piece in chosen]
            lengths = counts if side == "dst" else shape[2:]
            rows = None
            box = None if self.device else single_box(runs, side=side)
            if box is not None:
                rows = rows_of(memory_shape, [(0, batch), *box, (0, channels)], self.dtype.itemsize)
                rows = rows if rows is not None and rows.length >= IN_PLACE_BYTES else None
            messages.append(Message(peer, (batch, *counts, channels), Copies(runs, lengths), rows))
        return sorted(messages, key=lambda m: m.peer)

    def _empty(self, shape: tuple[int, ...]) -> Any:
        if self.comm.handle is None:
            return outline.empty(shape, self.dtype)
        if not self.device:
            return np.empty(shape, self.dtype)
        import cupy

        return cupy.empty(shape, self.dtype)

    def _new(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """A new array of logical `shape` that lies channels last, and its view in memory order."""
        memory = self._empty((shape[0], *shape[2:], shape[1]))
        return memory.transpose(self._to_logical), memory

    # ---- forward

    def start(self, x: Any, fill: Any = 0, out: Any = None) -> Pending:
        """Start the exchange.

        Parameters
        ----------
        x : array of shape `block_shape`
            The own block. It must not be changed before the exchange is done.
        fill : scalar
            The value at positions that show no element.
        out : array of shape `shape`, optional
            A channels-last buffer to fill. If `x` is the very part of it that shows the own block (`core`), the
            own block is in place already and is not copied.

        Returns
        -------
        Pending
            Its buffer is `x` itself where this rank needs exactly what it owns and no `out` is given.

        Raises
        ------
        ValueError
            `out` does not lie channels last.
        """
        source = self._memory(x, self.block_shape, "x")
        if self._same and out is None:
            if not self._lent:
                return Pending(x)
            requests, staging = self._forward.start(source, None, _pack)
            return Pending(x, self._forward, requests, staging, _ignore)
        if out is None:
            out = room.take(x, self._room)
        if out is None:
            buffer, target = self._new(self.shape)
        else:
            buffer, target = out, self._memory(out, self.shape, "out")
            if not target.flags.c_contiguous:
                raise ValueError(f"out of shape {self.shape} has to lie channels last, its strides are {out.strides}")
        requests, staging = self._forward.start(source, target, _pack)
        if out is None or not self._is_core(target, source):
            self._own.copy(target, source)
        for box in self._fills:
            target[box] = fill
        return Pending(buffer, self._forward, requests, staging, lambda m, received: m.copies.copy(target, received))

    def __call__(self, x: Any, fill: Any = 0) -> Any:
        """Exchange and wait: return the buffer."""
        return self.start(x, fill).wait()

    def core(self, buffer: Any) -> Any | None:
        """Return the view of a buffer that shows the own block, or None if the block is not a plain part of it.

        Who computes the block may write it there and pass view and buffer to `start`, which then copies nothing.
        """
        if len(self._own.pairs) != 1:
            return None
        to, of, repeated = self._own.pairs[0]
        lengths = self.block_shape[2:]
        whole = all((s.start, s.stop, s.step) == (0, n, 1) for s, n in zip(of[1:], lengths, strict=True))
        if repeated or not whole:
            return None
        return buffer[(slice(None), slice(None), *to[1:])]

    def _widths(self) -> room.Widths | None:
        """Planes around the own block in the buffer, None if it is not one whole part of it."""
        if len(self._own.pairs) != 1 or self.core(outline.empty(self.shape, self.dtype)) is None:
            return None
        to = self._own.pairs[0][0][1:]
        return tuple((s.start, p.size - s.stop) for s, p in zip(to, self.plans, strict=True))

    def _is_core(self, target: Any, source: Any) -> bool:
        """Whether the own block lies in `target`, which is dense, where its core is."""
        if self._room is None or source.strides != target.strides:
            return False
        return room.address(source) == room.address(target) + self._begin

    # ---- adjoint

    def start_adjoint(self, g: Any, give: bool = False) -> Pending:
        """Start the adjoint: from `g` of shape `shape` to the sum of all gradients of the own block.

        `g` must not be changed before the exchange is done. The buffer is `g` itself where nothing is to be moved. Who
        has no more use for `g` may `give` it: where the own block is one run of its memory, it is summed up there and
        not copied.
        """
        source = self._memory(g, self.shape, "g")
        if self._same and not self._lent:
            return Pending(g)
        requests, staging = self._backward.start(source, None, _pack_adjoint)
        dx = self.core(g) if give else None  # what is under way lies outside of it
        if dx is not None and last(dx).flags.c_contiguous:
            target = last(dx)
        else:
            dx, target = self._new(self.block_shape)
            self._own.adjoint(target, source)
        return Pending(
            dx, self._backward, requests, staging, lambda m, received: m.copies.add_adjoint(target, received)
        )

    def adjoint(self, g: Any, give: bool = False) -> Any:
        """Adjoint and wait: return dx of shape `block_shape`."""
        return self.start_adjoint(g, give).wait()

    # ---- the rest

    def _memory(self, array: Any, shape: tuple[int, ...], name: str) -> Any:
        if array.shape != shape or array.dtype != self.dtype or is_device(array) != self.device:
            place = "GPU" if self.device else "host"
            raise ValueError(
                f"halo exchange takes {name} of shape {shape} and dtype {self.dtype} on the {place}, "
                f"got {array.shape} {array.dtype} of {array_module(array).__name__}"
            )
        return array.transpose(self._to_memory)

    @property
    def busy(self) -> bool:
        """Whether an exchange with packed messages is under way."""
        return self._forward.busy or self._backward.busy

    @property
    def buffer_sets(self) -> int:
        """Sets of message buffers made so far: the most exchanges that were under way at once, forward and adjoint."""
        return self._forward.sets + self._backward.sets

    def free(self) -> None:
        """Free requests, vector types and message buffers. Local; the exchange is unusable afterwards."""
        self._forward.free()
        self._backward.free()

    def __str__(self) -> str:
        lines = [
            f"halo over {self.comm.name}: block {self.block_shape} -> buffer {self.shape} {self.dtype}, "
            f"{len(self.peers)} peers, {self.bytes_sent} bytes sent, {self.bytes_received} received"
        ]
        lines += [f"  dim {dim + 2}: {plan}" for dim, plan in enumerate(self.plans)]
        return "\n".join(lines)


def _pack(message: Message, buffer: Any, source: Any) -> None:
    message.copies.copy(buffer, source)


def _pack_adjoint(message: Message, buffer: Any, source: Any) -> None:
    message.copies.adjoint(buffer, source)


def _ignore(message: Message, received: Any) -> None:
    raise AssertionError(f"rank {message.peer} sent something that nobody asked for")


# ---- exchanges are made once

CACHED = 64
_cache: OrderedDict[tuple, HaloExchange] = OrderedDict()


def cached_halo(
    comm: Comm,
    dim_plans: Sequence[DimPlan],
    lead: tuple[int, int],
    dtype: Any,
    *,
    ranks: np.ndarray | None = None,
    pads: str = "fill",
    device: bool = False,
) -> HaloExchange:
    """Return the one `HaloExchange` of these arguments, made on first use.

    The least recently used of more than `CACHED` exchanges is freed. Freeing is local, so ranks need not agree on it.
    Plans count as equal if they are the same object, as those of `block_plan` are.
    """
    order = None if ranks is None else tuple(np.ravel(ranks).tolist())
    key = (comm, tuple(dim_plans), tuple(lead), np.dtype(dtype), order, pads, device)
    found = _cache.get(key)
    if found is None:
        found = _cache[key] = HaloExchange(comm, dim_plans, lead, dtype, ranks=ranks, pads=pads, device=device)
        idle = [old for old, halo in _cache.items() if halo is not found and not halo.busy]
        for old in idle[: max(0, len(_cache) - CACHED)]:
            _cache.pop(old).free()
    else:
        _cache.move_to_end(key)
    return found


def clear_cache(comm: Comm | None = None) -> None:
    """Free the cached exchanges over `comm`, or all: before its mesh is freed, say."""
    for key in [key for key in _cache if comm is None or key[0] is comm]:
        _cache.pop(key).free()
