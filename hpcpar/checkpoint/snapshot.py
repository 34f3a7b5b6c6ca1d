"""A consistent copy of what this rank writes, in host memory, while training goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcpar.checkpoint.manifest import ArrayInfo
from hpcpar.checkpoint.pieces import Box, plan_pieces, slices
from hpcpar.checkpoint.shard import Part
from hpcpar.tensors import Tensor
from hpcpar.transport.device import is_device, to_host


class Copy(NamedTuple):
    """A copy that is still to be made."""

    target: np.ndarray
    source: np.ndarray

    def make(self) -> None:
        """Make it."""
        self.target[...] = self.source


class Snapshot:
    """Copies this rank's pieces of named tensors; memory and plan are kept from one copy to the next.

    Notes
    -----
    Pieces are copied in the memory order they have, which is fast; the file's order is made by whoever writes them.
    The memory is kept because the first touch of new memory costs more than the copy. A copy is valid until the next
    `take`.
    """

    def __init__(self) -> None:
        self._key: tuple = ()
        self._mine: list[tuple[str, Box]] = []
        self._held: dict[tuple[str, Box], np.ndarray] = {}

    def take(self, tensors: Mapping[str, Tensor], steady: Collection[str] = ()) -> tuple[list[Part], list[Copy]]:
        """Return this rank's parts of all tensors, and the copies that are still to be made. No message.

        Parameters
        ----------
        steady : collection of str
            Tensors that will not change before the copies that are returned have been made, in whatever thread. The
            parts of others, and of those on a GPU, are copied at once.

        Raises
        ------
        ValueError
            When a tensor is partial.
        """
        self._plan(tensors)
        parts, later = [], []
        for name, box in self._mine:
            tensor = tensors[name]
            source = tensor.shard[slices(box, tensor.sig.box)]
            copy = self._held.get((name, box))
            if copy is None:
                order = sorted(range(source.ndim), key=lambda d: -abs(source.strides[d]))
                packed = np.empty([source.shape[d] for d in order], source.dtype)
                copy = self._held[name, box] = packed.transpose(np.argsort(order).tolist())
            if name in steady and not is_device(source):
                later.append(Copy(copy, source))
            else:
                copy[...] = to_host(source) if is_device(source) else source
            parts.append(Part(name, box, copy))
        return parts, later

    def _plan(self, tensors: Mapping[str, Tensor]) -> None:
        """Find this rank's pieces, on each mesh (a pipeline has one for each stage), when anything has changed."""
        key = tuple((name, tensor.sig, tensor.dtype) for name, tensor in tensors.items())
        if key == self._key:
            return
        meshes: dict[Any, dict[str, tuple[Any, int]]] = {}
        for name, tensor in tensors.items():
            meshes.setdefault(tensor.mesh, {})[name] = (tensor.sig, tensor.dtype.itemsize)
        self._mine = [
            (piece.name, piece.box)
            for mesh, arrays in meshes.items()
            for piece in plan_pieces(arrays)
            if piece.writer == mesh.rank
        ]
        self._held = {}
        self._key = key


def describe_arrays(tensors: Mapping[str, Tensor], shown: Mapping[str, tuple[int, ...]]) -> dict[str, ArrayInfo]:
    """Return the entries of the manifest for tensors; `shown` has torch's shapes where they differ."""
    return {
        name: ArrayInfo(t.shape, t.dtype.str, shown[name] if shown.get(name, t.shape) != t.shape else None)
        for name, t in tensors.items()
    }
