"""One communicator along an axis (or a union of axes) of a mesh, speaking arrays.

Only buffers packed here go to MPI: mpi4py sends Fortran-ordered arrays in memory order without a word, and would hand
out a transposed result. Large reductions are cut into pieces, because both common MPI libraries take several times
longer for one large call, and because counts must stay far below 2**31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcpar.transport import counter
from hpcpar.transport.device import like, to_host

PIECE_BYTES = 2 << 20
"""Reductions are sent in pieces of this many bytes."""

_TAG_MOVE = 7

inspector: Callable[[Comm, str, Any], None] | None = None
"""Called as ``inspector(comm, operation, facts)`` before each collective, while the checked mode is on."""


class Comm:
    """A communicator with array collectives; made by `Mesh.comm`, freed by `Mesh.free`.

    Attributes
    ----------
    rank, size : int
        Position along the axes and number of ranks.
    name : str
        The axes joined by ``+``.
    handle : mpi4py.MPI.Comm
        The underlying communicator, for `hpcpar.transport` alone.
    sums : object or None
        The sums under way on it, of `hpcpar.transport.nonblocking`.
    """

    __slots__ = ("handle", "name", "rank", "size", "sums")

    def __init__(self, handle: MPI.Comm, name: str) -> None:
        self.handle = handle
        self.name = name
        self.rank = handle.Get_rank()
        self.size = handle.Get_size()
        self.sums: Any = None

    def __repr__(self) -> str:
        return f"Comm({self.name}, rank {self.rank} of {self.size})"

    # ---- reductions

    def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """Combine equal-shaped arrays elementwise; every rank gets the result.

        Parameters
        ----------
        array : array
            Any shape and memory order, the same shape and dtype on every rank.
        op : {"sum", "max", "min"}
            ``max`` and ``min`` of floats are exact, NaN wins, and all ranks get the same bits.
        """
        if self.size == 1:
            return array
        if inspector is not None:
            inspector(self, "all_reduce", f"{op} of {tuple(array.shape)} {array.dtype}")
        host = to_host(array)
        sent = host.size * travel_dtype(host.dtype).itemsize
        counter.record("all_reduce", self.name, 1, 2 * (self.size - 1) / self.size * sent)
        if op != "sum":
            return like(self._extreme(host, op), array)
        work = host.astype(travel_dtype(host.dtype))
        self._combine(work, MPI.SUM)
        return like(work.astype(host.dtype, copy=False), array)

    def _combine(self, work: np.ndarray, op: MPI.Op) -> None:
        """Combine C-contiguous arrays in place, in pieces."""
        flat = work.reshape(work.size)
        step = max(1, PIECE_BYTES // flat.itemsize)
        for start in range(0, flat.size, step):
            self.handle.Allreduce(MPI.IN_PLACE, flat[start : start + step], op)

    def _extreme(self, host: np.ndarray, op: str) -> np.ndarray:
        """Max or min; floats travel as order-preserving integers, as MPI_MAX loses or splits NaN."""
        mpi_op = MPI.MAX if op == "max" else MPI.MIN
        if host.dtype.kind != "f":
            work = host.astype(np.uint8) if host.dtype == bool else host.copy()
            self._combine(work, mpi_op)
            return work.astype(host.dtype, copy=False)
        keys = ordered_integers(host, nan_largest=op == "max")
        self._combine(keys, mpi_op)
        return from_ordered_integers(keys, host.dtype)

    def reduce_scatter(self, pieces: Sequence[Any]) -> Any:
        """Sum `pieces[r]` over all ranks and give the sum to rank r.

        Parameters
        ----------
        pieces : sequence of arrays
            One array for each rank; piece r has the same shape on every rank.
        """
        if self.size == 1:
            return pieces[0]
        if inspector is not None:
            inspector(self, "reduce_scatter", f"{[tuple(p.shape) for p in pieces]} {pieces[0].dtype}")
        reference = pieces[0]
        hosts = [to_host(p) for p in pieces]
        shape, dtype = hosts[self.rank].shape, hosts[self.rank].dtype
        wide = travel_dtype(dtype)
        given = sum(h.size for r, h in enumerate(hosts) if r != self.rank)
        counter.record("reduce_scatter", self.name, 1, given * wide.itemsize)
        result = np.empty(hosts[self.rank].size, wide)
        flats = [h.reshape(h.size) for h in hosts]
        step = max(1, PIECE_BYTES // wide.itemsize // self.size)
        # every rank walks the same number of rounds, also the one whose own piece is short or empty
        for start in range(0, max((f.size for f in flats), default=0), step):
            parts = [f[start : start + step] for f in flats]
            packed = np.concatenate(parts).astype(wide, copy=False)
            mine = result[start : start + step]
            self.handle.Reduce_scatter(packed, mine, [p.size for p in parts], MPI.SUM)
        return like(result.astype(dtype, copy=False).reshape(shape), reference)

    # ---- gathering and exchanging

    def all_gather(self, array: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Return every rank's array; `shapes[r]` is the shape that rank r holds."""
        if self.size == 1:
            return [array]
        if inspector is not None:
            fits = tuple(array.shape) == tuple(shapes[self.rank])
            odd = "" if fits else f", of which this one is {tuple(array.shape)}"
            inspector(self, "all_gather", f"{[tuple(s) for s in shapes]}{odd} {array.dtype}")
        host = to_host(array)
        counts = [int(np.prod(s, dtype=np.int64)) for s in shapes]
        counter.record("all_gather", self.name, 1, (sum(counts) - counts[self.rank]) * host.itemsize)
        out = np.empty(sum(counts), host.dtype)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        if sum(counts) * host.itemsize < 2**31:
            byte_counts = [c * host.itemsize for c in counts]
            byte_offsets = [int(o) * host.itemsize for o in offsets[:-1]]
            source = host.reshape(host.size).view(np.uint8)
            self.handle.Allgatherv(
                [source, MPI.BYTE], [out.view(np.uint8), byte_counts, byte_offsets, MPI.BYTE]
            )
            blocks = [out[offsets[r] : offsets[r + 1]].reshape(shapes[r]) for r in range(self.size)]
        else:
            received = self.exchange(
                {r: host for r in range(self.size) if r != self.rank and host.size},
                {r: (shapes[r], host.dtype) for r in range(self.size) if r != self.rank and counts[r]},
                like_array=host,
                record=False,
            )
            blocks = [
                host if r == self.rank else received.get(r, np.empty(shapes[r], host.dtype)) for r in range(self.size)
            ]
        return [like(b, array) for b in blocks]

    def exchange(
        self,
        sends: Mapping[int, Any],
        receives: Mapping[int, tuple[tuple[int, ...], np.dtype]],
        *,
        like_array: Any = None,
        record: bool = True,
    ) -> dict[int, Any]:
        """Send one array to each peer of `sends` and return one array from each peer of `receives`.

        Both sides derive the messages from the same plan; nothing is negotiated and nothing of size zero is sent.
        What arrives lies where `like_array` does, by default where the first array sent does (host or GPU).
        """
        if inspector is not None:
            inspector(
                self,
                "exchange",
                (
                    {peer: (tuple(a.shape), str(a.dtype)) for peer, a in sends.items()},
                    {peer: (tuple(shape), str(np.dtype(dtype))) for peer, (shape, dtype) in receives.items()},
                ),
            )
        limit = 1 << 30
        reference = next(iter(sends.values()), None) if like_array is None else like_array
        out = {peer: np.empty(shape, dtype) for peer, (shape, dtype) in receives.items()}
        requests = []
        for peer, buffer in out.items():
            raw = buffer.reshape(buffer.size).view(np.uint8)
            requests += [
                self.handle.Irecv([raw[i : i + limit], MPI.BYTE], peer, _TAG_MOVE) for i in range(0, raw.size, limit)
            ]
        kept = []  # the buffers must live until the messages have left
        for peer, array in sends.items():
            host = to_host(array)
            raw = host.reshape(host.size).view(np.uint8)
            kept.append(raw)
            requests += [
                self.handle.Isend([raw[i : i + limit], MPI.BYTE], peer, _TAG_MOVE) for i in range(0, raw.size, limit)
            ]
        MPI.Request.Waitall(requests)
        if record:
            counter.record("exchange", self.name, len(kept), sum(k.nbytes for k in kept))
        if reference is None:
            return out
        return {peer: like(buffer, reference) for peer, buffer in out.items()}

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Give every rank the array of rank `root`; all ranks pass an array of its shape and dtype."""
        if self.size == 1:
            return array
        if inspector is not None:
            inspector(self, "broadcast", f"{tuple(array.shape)} {array.dtype} from rank {root}")
        host = to_host(array)
        work = host.copy()
        raw = work.reshape(work.size).view(np.uint8)
        for start in range(0, raw.size, 1 << 30):
            self.handle.Bcast([raw[start : start + (1 << 30)], MPI.BYTE], root)
        counter.record("broadcast", self.name, 1, host.nbytes if self.rank == root else 0)
        return like(work, array)

    def shift(self, array: Any, offset: int, shape: tuple[int, ...] | None = None) -> Any:
        """Send `array` to rank + offset and return what rank - offset sent (a ring); `shape` is what arrives."""
        if self.size == 1 or offset % self.size == 0:
            return array
        dest, source = (self.rank + offset) % self.size, (self.rank - offset) % self.size
        shape = array.shape if shape is None else shape
        expected = {source: (shape, array.dtype)} if np.prod(shape, dtype=np.int64) else {}
        received = self.exchange({dest: array} if array.size else {}, expected, like_array=array)
        return received[source] if expected else like(np.empty(shape, array.dtype), array)

    # ---- small objects and agreement

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the (small, picklable) values of all ranks, in rank order."""
        return [value] if self.size == 1 else self.handle.allgather(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s (small, picklable) value on every rank."""
        return value if self.size == 1 else self.handle.bcast(value, root)

    def agree(self, flag: bool, how: str = "any") -> bool:
        """Decide together: whether ``any`` (or ``all``) ranks say yes; the same answer everywhere."""
        if self.size == 1:
            return bool(flag)
        return bool(self.handle.allreduce(int(bool(flag)), MPI.MAX if how == "any" else MPI.MIN))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self.handle.Barrier()


def travel_dtype(dtype: np.dtype) -> np.dtype:
    """Return in which dtype sums travel: half precision (and bfloat16, to NumPy a void of 2 bytes) in float32.

    Extremes of half precision travel as integers of the same 4 bytes (`ordered_integers`).
    """
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype


def ordered_integers(values: np.ndarray, nan_largest: bool = True) -> np.ndarray:
    """Map floats to integers of the same width that sort alike; NaN becomes the largest (or smallest) of all."""
    ints = np.dtype(f"i{values.dtype.itemsize}")
    wide = ints if ints.itemsize >= 4 else np.dtype(np.int32)  # MPI has no portable 16-bit float or max of it
    bits = np.ascontiguousarray(values).view(ints)
    keys = np.where(bits < 0, np.bitwise_xor(bits, np.iinfo(ints).max), bits).astype(wide)
    keys[np.isnan(values)] = np.iinfo(wide).max if nan_largest else np.iinfo(wide).min
    return keys.reshape(values.shape)


def from_ordered_integers(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Inverse of `ordered_integers`."""
    ints = np.dtype(f"i{dtype.itemsize}")
    nan = (keys == np.iinfo(keys.dtype).max) | (keys == np.iinfo(keys.dtype).min)
    bits = np.where(nan, 0, keys).astype(ints)
    bits = np.where(bits < 0, np.bitwise_xor(bits, np.iinfo(ints).max), bits).astype(ints)
    values = bits.view(dtype)
    values[nan] = np.nan
    return values
