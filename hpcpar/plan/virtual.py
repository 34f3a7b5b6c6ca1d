"""A mesh of any size on one process: layouts, rules and counts of messages are real, ranks and bytes are not there.

Arrays on it are outlines (`hpcpar.kernels.outline`). Its communicators enter every message in the byte counter as the
real ones do and return arrays of the right shape, so a program runs on it as it is and leaves its bill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from hpcpar.grid import Grid, MeshError, Node
from hpcpar.kernels import array_module
from hpcpar.primitives.halo import clear_cache
from hpcpar.transport import counter
from hpcpar.transport.comm import travel_dtype


class VirtualComm:
    """Stands for `hpcpar.transport.Comm` where there are no other ranks.

    Attributes
    ----------
    rank, size, name
        As of the real one.
    handle : None
    """

    virtual = True
    handle = None

    def __init__(self, rank: int, size: int, name: str) -> None:
        self.rank, self.size, self.name = rank, size, name

    def __repr__(self) -> str:
        return f"VirtualComm({self.name}, rank {self.rank} of {self.size})"

    def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """Count a reduction; return an array of equal shape."""
        if self.size == 1:
            return array
        sent = array.size * travel_dtype(array.dtype).itemsize
        counter.record("all_reduce", self.name, 1, 2 * (self.size - 1) / self.size * sent)
        return array.copy()

    def reduce_scatter(self, pieces: Sequence[Any]) -> Any:
        """Count a reduction of one piece a rank; return this rank's piece."""
        if self.size == 1:
            return pieces[0]
        given = sum(p.size for r, p in enumerate(pieces) if r != self.rank)
        counter.record("reduce_scatter", self.name, 1, given * travel_dtype(pieces[self.rank].dtype).itemsize)
        return pieces[self.rank].copy()

    def all_gather(self, array: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Count a gathering; return one array a rank."""
        if self.size == 1:
            return [array]
        missing = sum(prod(shape) for r, shape in enumerate(shapes) if r != self.rank)
        counter.record("all_gather", self.name, 1, missing * array.itemsize)
        return [array_module(array).zeros(shape, array.dtype) for shape in shapes]

    def exchange(
        self,
        sends: Mapping[int, Any],
        receives: Mapping[int, tuple[tuple[int, ...], Any]],
        *,
        record: bool = True,
        like_array: Any = None,
    ) -> dict[int, Any]:
        """Count messages to peers; return arrays for what the peers would send."""
        if record:
            counter.record("exchange", self.name, len(sends), sum(a.nbytes for a in sends.values()))
        like = next(iter(sends.values()), None) if like_array is None else like_array
        return {peer: array_module(like).zeros(shape, dtype) for peer, (shape, dtype) in receives.items()}

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Count a broadcast."""
        if self.size > 1:
            counter.record("broadcast", self.name, 1, array.nbytes if self.rank == root else 0)
        return array

    def shift(self, array: Any, offset: int, shape: tuple[int, ...] | None = None) -> Any:
        """Count a shift along a ring."""
        if self.size == 1 or offset % self.size == 0:
            return array
        if array.size:
            counter.record("exchange", self.name, 1, array.nbytes)
        return array_module(array).zeros(array.shape if shape is None else shape, array.dtype)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value once for each rank."""
        return [value] * self.size

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value."""
        return value

    def agree(self, flag: bool, how: str = "any") -> bool:
        """Return this rank's answer."""
        return bool(flag)

    def barrier(self) -> None:
        """Wait for nobody."""


class VirtualMesh(Grid):
    """A mesh without ranks, seen from one of them; used as a context manager it is the default mesh.

    Parameters
    ----------
    shape : mapping of str to int
        Length of each axis, in order, the last varying fastest.
    rank : int
        From whose place to look.
    ranks_per_node : int, optional
        Of the nodes that `node` tells of; all ranks on one by default.

    Examples
    --------
    >>> with VirtualMesh({"batch": 4, "depth": 16}):
    ...     model = hpcpar.models.CosmoFlow(512)  # takes no memory
    """

    virtual = True

    def __init__(self, shape: Mapping[str, int], rank: int = 0, ranks_per_node: int | None = None) -> None:
        for axis, n in shape.items():
            if n < 1:
                raise MeshError(f"axis {axis!r} of a virtual mesh has length {n}; lengths are at least 1")
        super().__init__(shape or {"batch": 1}, rank, {})
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} of a virtual mesh of {self.size} ranks")
        self._per_node = ranks_per_node or self.size

    def _make_comm(self, key: tuple[str, ...]) -> VirtualComm:
        members = self._members(key)
        return VirtualComm(members.index(self.rank), len(members), "+".join(key) or "self")

    def _make_part(self, free: tuple[str, ...], fixed: Mapping[str, int]) -> VirtualMesh:
        part = VirtualMesh({a: self.shape[a] for a in free}, self._members(free).index(self.rank), self._per_node)
        part.fixed = dict(fixed)
        return part

    def _find_node(self) -> Node:
        n = self._per_node
        count = -(-self.size // n)
        size = min(n, self.size - self.rank // n * n)
        return Node(self.rank % n, size, self.rank // n, count, tuple(f"virtual#{r // n}" for r in range(self.size)))

    def free(self) -> None:
        """Forget communicators with their halo exchanges, sub-meshes and signatures."""
        for comm in self._comms.values():
            clear_cache(comm)
        self._comms.clear()
        self._subs.clear()
        self._signatures.clear()

    def __repr__(self) -> str:
        return f"VirtualMesh({', '.join(f'{a}={n}' for a, n in self.shape.items())})"
