"""The mesh: all ranks of a job as a grid with named axes."""

from __future__ import annotations

from collections.abc import Mapping

from mpi4py import MPI

from hpcpar.grid import Grid, MeshError, Node, _stack, resolve_lengths
from hpcpar.transport import Comm

__all__ = ["Mesh", "MeshError", "Node", "current_mesh", "live_communicators"]

_live = 0


class Mesh(Grid):
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
        On all ranks, when the lengths do not multiply to the number of ranks, or ranks name different axes.

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
        handle = parent.Dup()
        try:
            _require_same(handle, axes)
            shape = resolve_lengths(axes or {"batch": -1}, handle.Get_size())
        except MeshError:
            handle.Free()
            raise
        self._adopt(handle, shape, {})
        self._node = self._find_node()  # here all ranks are together: printing a mesh then sends nothing

    def _adopt(self, handle: MPI.Comm, shape: Mapping[str, int], fixed: Mapping[str, int]) -> None:
        global _live
        _live += 1
        self._handle = handle
        super().__init__(shape, handle.Get_rank(), fixed)

    def _make_comm(self, key: tuple[str, ...]) -> Comm:
        name = "+".join(key) or "self"
        if self._handle == MPI.COMM_NULL:
            raise MeshError(f"{self!r} was freed: what lies on it sends no messages any more")
        if not key:
            return Comm(MPI.COMM_SELF, name)
        members = self._members(key)
        if len(members) == self.size:
            return Comm(self._handle, name)
        # create_group is collective over the members alone; the tag keeps two sets of axes apart
        return Comm(self._split(members, tag=sum(1 << self._order[a] for a in key)), name)

    def _make_part(self, free: tuple[str, ...], fixed: Mapping[str, int]) -> Mesh:
        tag = (1 << len(self.axes)) + sum(1 << self._order[a] for a in free)
        mesh = Mesh.__new__(Mesh)
        handle = self._split(self._members(free), tag, count=False)
        mesh._adopt(handle, {a: self.shape[a] for a in free} or {"batch": 1}, fixed)
        return mesh

    def _split(self, members: list[int], tag: int, count: bool = True) -> MPI.Comm:
        global _live
        group = self._handle.Get_group()
        part = group.Incl(members)
        handle = self._handle.Create_group(part, tag=tag)
        part.Free()
        group.Free()
        _live += count
        return handle

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
        _stack[:] = [mesh for mesh in _stack if mesh is not self]
        if self._handle != MPI.COMM_NULL:
            self._handle.Free()
            _live -= 1

    def _find_node(self) -> Node:
        shared = self._handle.Split_type(MPI.COMM_TYPE_SHARED)
        first = self.world.gather_objects((shared.bcast(self.rank, 0), MPI.Get_processor_name()))
        leaders = sorted({leader for leader, _ in first})
        node = Node(
            rank=shared.Get_rank(),
            size=shared.Get_size(),
            index=leaders.index(first[self.rank][0]),
            count=len(leaders),
            # several nodes may answer with one host name (containers): the leader tells them apart
            hosts=tuple(f"{host}#{leaders.index(leader)}" for leader, host in first),
        )
        shared.Free()
        return node


def _require_same(handle: MPI.Comm, axes: Mapping[str, int]) -> None:
    """Raise on all ranks where they ask for different meshes: each would wait for messages that nobody sends."""
    if handle.Get_size() == 1:
        return
    mine, rank = list(axes.items()), handle.Get_rank()
    first = handle.bcast(mine)
    odd = handle.allreduce(rank if mine != first else handle.Get_size(), MPI.MIN)
    if odd < handle.Get_size():
        here = handle.bcast(mine, odd)
        zero, other = (" x ".join(f"{a}={n}" for a, n in words) or "no axes" for words in (first, here))
        raise MeshError(
            f"ranks ask for different meshes: rank 0 for {zero}, rank {odd} for {other}; every rank names the "
            "same axes in the same order"
        )


def current_mesh() -> Mesh:
    """Return the innermost mesh in use as a context manager, else one over all ranks with the axis ``batch``."""
    if not _stack:
        _stack.append(Mesh(batch=-1))
    return _stack[-1]


def live_communicators() -> int:
    """Return the number of communicators that meshes hold on this rank."""
    return _live
