"""The mesh: all ranks of a job as a grid with named axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpcpar.transport import Comm

if TYPE_CHECKING:
    from hpcpar.signature import Signature

_stack: list[Mesh] = []
_live = 0


class MeshError(ValueError):
    """A mesh that does not fit its ranks, or an axis that a mesh does not have."""


@dataclass(frozen=True)
class Node:
    """Where this rank sits: `rank` of `size` inside node `index` of `count`; `hosts` names the node of each rank."""

    rank: int
    size: int
    index: int
    count: int
    hosts: tuple[str, ...]


class Mesh:
    """Ranks as a grid with named axes, over one communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        The ranks, ``MPI.COMM_WORLD`` by default. It is duplicated, never shared. Collective over it.
    **axes : int
        Length of each axis, in order; the last varies fastest with the rank. One of them may be -1: what is left.
        Names are free (``batch``, ``depth``, ``height``, ``width``, ``sequence``, ``model``, ``pipe``, ...); lengths of
        1 are welcome. Without any axis the mesh has the one axis ``batch`` over all ranks.

    Raises
    ------
    MeshError
        On all ranks, when the lengths do not multiply to the number of ranks.

    Notes
    -----
    Sub-communicators are made when first asked for, by their members alone, once for each set of axes, and freed by
    `free`, which is collective. Used as a context manager a mesh is the default of `hpcpar.tensor` and its like.

    Examples
    --------
    >>> mesh = Mesh(batch=2, depth=-1)
    >>> mesh.shape, mesh.index("depth")
    """

    def __init__(self, comm: MPI.Comm | None = None, **axes: int) -> None:
        parent = MPI.COMM_WORLD if comm is None else comm
        self.shape: dict[str, int] = _lengths(axes or {"batch": -1}, parent.Get_size())
        self._adopt(parent.Dup(), {})

    def _adopt(self, handle: MPI.Comm, fixed: Mapping[str, int]) -> None:
        global _live
        _live += 1
        self._handle = handle
        self.axes: tuple[str, ...] = tuple(self.shape)
        self.rank: int = handle.Get_rank()
        self.size: int = handle.Get_size()
        self.fixed: dict[str, int] = dict(fixed)
        self._coords = dict(zip(self.axes, _unravel(self.rank, tuple(self.shape.values())), strict=True))
        self._comms: dict[tuple[str, ...], Comm] = {}
        self._subs: dict[tuple[tuple[str, int], ...], Mesh | None] = {}
        self._signatures: dict[tuple, Signature] = {}
        self._node: Node | None = None
        self._order = {axis: position for position, axis in enumerate(self.axes)}

    # ---- positions

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along `axis`."""
        self._check((axis,))
        return self._coords[axis]

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate along every axis."""
        return dict(self._coords)

    def length(self, *axes: str) -> int:
        """Return the number of ranks along the given axes together."""
        self._check(axes)
        return prod(self.shape[a] for a in axes)

    def sort(self, axes: tuple[str, ...] | set[str] | frozenset[str] | list[str]) -> tuple[str, ...]:
        """Return `axes` in mesh order: the only order in which axes are ever walked through."""
        return tuple(sorted(axes, key=self._order.__getitem__))

    def _check(self, axes: tuple[str, ...]) -> None:
        for axis in axes:
            if axis not in self.shape:
                raise MeshError(f"mesh has no axis {axis!r}; its axes are {', '.join(self.axes)}")

    # ---- communicators

    def comm(self, *axes: str) -> Comm:
        """Return the communicator along one axis, or along the union of several.

        Parameters
        ----------
        *axes : str
            Their order does not matter: ranks are row-major in mesh order. Without axes: this rank alone.

        Notes
        -----
        The first call for a set of axes is collective over the ranks that differ only along these axes.
        """
        self._check(axes)
        key = tuple(a for a in self.axes if a in axes and self.shape[a] > 1)
        comm = self._comms.get(key)
        if comm is None:
            comm = self._comms[key] = self._make_comm(key)
        return comm

    def _make_comm(self, key: tuple[str, ...]) -> Comm:
        global _live
        name = "+".join(key) or "self"
        if not key:
            return Comm(MPI.COMM_SELF, name)
        members = self._members(key)
        if len(members) == self.size:
            return Comm(self._handle, name)
        group = self._handle.Get_group()
        part = group.Incl(members)
        # create_group is collective over the members alone; the tag keeps two sets of axes apart
        handle = self._handle.Create_group(part, tag=sum(1 << self._order[a] for a in key))
        part.Free()
        group.Free()
        _live += 1
        return Comm(handle, name)

    def _members(self, free: tuple[str, ...]) -> list[int]:
        """Ranks that share this rank's coordinates on all axes but `free`, in row-major order."""
        ranks = [0]
        for axis in self.axes:
            choices = range(self.shape[axis]) if axis in free else (self._coords[axis],)
            ranks = [r * self.shape[axis] + c for r in ranks for c in choices]
        return ranks

    @property
    def world(self) -> Comm:
        """The communicator over the whole mesh."""
        return self.comm(*self.axes)

    def sub(self, **fixed: int) -> Mesh | None:
        """Return the mesh without the given axes, at the given coordinates (one pipeline stage, say).

        It has its own communicator. Collective over the ranks at these coordinates; ``None`` on the others.
        """
        self._check(tuple(fixed))
        key = tuple(sorted(fixed.items()))
        if key not in self._subs:
            self._subs[key] = self._make_sub(fixed)
        return self._subs[key]

    def _make_sub(self, fixed: Mapping[str, int]) -> Mesh | None:
        for axis, at in fixed.items():
            if not 0 <= at < self.shape[axis]:
                raise MeshError(f"coordinate {at} is outside axis {axis!r} of length {self.shape[axis]}")
        if any(self._coords[axis] != at for axis, at in fixed.items()):
            return None
        free = tuple(a for a in self.axes if a not in fixed)
        group = self._handle.Get_group()
        part = group.Incl(self._members(free))
        handle = self._handle.Create_group(part, tag=(1 << len(self.axes)) + sum(1 << self._order[a] for a in free))
        part.Free()
        group.Free()
        mesh = Mesh.__new__(Mesh)
        mesh.shape = {a: self.shape[a] for a in free} or {"batch": 1}
        mesh._adopt(handle, {**self.fixed, **fixed})
        return mesh

    def free(self) -> None:
        """Free the communicators of this mesh and of its sub-meshes. Collective; the mesh is unusable afterwards."""
        global _live
        for sub in self._subs.values():
            if sub is not None:
                sub.free()
        for comm in self._comms.values():
            if comm.handle not in (MPI.COMM_SELF, self._handle):
                comm.handle.Free()
                _live -= 1
        self._subs.clear()
        self._comms.clear()
        self._signatures.clear()
        if self._handle != MPI.COMM_NULL:
            self._handle.Free()
            _live -= 1

    # ---- nodes and printing

    @property
    def node(self) -> Node:
        """This rank's place in its node. The first access is collective over the mesh."""
        if self._node is None:
            shared = self._handle.Split_type(MPI.COMM_TYPE_SHARED)
            first = self.world.gather_objects((shared.bcast(self.rank, 0), MPI.Get_processor_name()))
            leaders = sorted({leader for leader, _ in first})
            self._node = Node(
                rank=shared.Get_rank(),
                size=shared.Get_size(),
                index=leaders.index(first[self.rank][0]),
                count=len(leaders),
                # several nodes may answer with one host name (containers): the leader tells them apart
                hosts=tuple(f"{host}#{leaders.index(leader)}" for leader, host in first),
            )
            shared.Free()
        return self._node

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{a}={n}' for a, n in self.shape.items())})"

    def __str__(self) -> str:
        """Who sits where, by node; reads node information that `describe` gathered before."""
        lines = [f"{self!r}: {self.size} rank{'s' * (self.size != 1)}"]
        sizes = tuple(self.shape.values())
        hosts = self._node.hosts if self._node else None
        for rank in range(self.size):
            if hosts and (rank == 0 or hosts[rank] != hosts[rank - 1]):
                lines.append(f"  node {hosts[rank]}")
            place = " ".join(f"{a}={c}" for a, c in zip(self.axes, _unravel(rank, sizes), strict=True))
            lines.append(f"    rank {rank}: {place}")
        return "\n".join(lines)

    def describe(self) -> str:
        """Return who sits where, by node. Collective."""
        _ = self.node
        return str(self)

    def __enter__(self) -> Mesh:
        _stack.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        _stack.remove(self)


def current_mesh() -> Mesh:
    """Return the innermost mesh in use as a context manager, else one over all ranks with the axis ``batch``."""
    if not _stack:
        _stack.append(Mesh(batch=-1))
    return _stack[-1]


def live_communicators() -> int:
    """Return the number of communicators that meshes hold on this rank."""
    return _live


def _lengths(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    for axis, n in axes.items():
        if isinstance(n, bool) or not isinstance(n, int) or (n < 1 and n != -1):
            raise MeshError(f"axis {axis!r} has length {n!r}; lengths are integers of at least 1, or one -1")
    open_axes = [a for a, n in axes.items() if n == -1]
    known = prod(n for n in axes.values() if n != -1)
    shown = " x ".join(f"{a}={n}" for a, n in axes.items())
    if len(open_axes) > 1:
        raise MeshError(f"only one axis may be -1, got {shown}")
    if open_axes:
        if ranks % known:
            raise MeshError(f"{ranks} ranks cannot be divided by {known} of mesh {shown}")
        return {a: ranks // known if n == -1 else n for a, n in axes.items()}
    if known != ranks:
        raise MeshError(f"mesh {shown} needs {known} ranks, there are {ranks}; start {known} or change an axis to -1")
    return dict(axes)


def _unravel(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for n in reversed(sizes):
        place.append(rank % n)
        rank //= n
    return tuple(reversed(place))
