"""Primitives: built once for each signature, kept in a bounded cache of each thread, freed when they fall out of it.

A primitive keeps one memory object for each argument; only their addresses change from call to call. ctypes releases
the interpreter lock while a primitive runs, and these objects are mutable: therefore everything here belongs to one
thread, which also has its own scratch memory, used by all its primitives.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from .library import Library, OneDNNError, load

CAPACITY = 512  # primitives kept by a thread; a network of 100 layers needs some 600 handles of a few KiB

F16, BF16, F32 = 1, 2, 3
_TAG_ANY, _USER_SCRATCHPAD, _ELTWISE_RELU, _IN_ORDER, _QUERY_IMPLEMENTATION = 1, 1, 0x20, 1, 8
_ALIGNMENT = 64

#: Memory descriptor queries and execution arguments by role.
QUERY = {"src": 129, "diff_src": 130, "weights": 131, "diff_weights": 132, "dst": 133, "diff_dst": 134,
         "scratchpad": 136}
ARGUMENT = {"src": 1, "dst": 17, "weights": 33, "bias": 41, "scratchpad": 80, "diff_src": 129, "diff_dst": 145,
            "diff_weights": 161}

Dims = ctypes.c_int64 * 12  # oneDNN's dims are always twelve long


class _Argument(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_int), ("memory", ctypes.c_void_p)]


class Handle:
    """Owns one oneDNN object: created with it, destroyed with it."""

    def __init__(self, library: Library, create: str, destroy: str, *args: Any) -> None:
        self._destroy = getattr(library.c, destroy)
        self.handle = library.new(create, *(a.handle if isinstance(a, Handle) else a for a in args))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._destroy(self.handle)


class Descriptor(Handle):
    """A memory descriptor: sizes and element strides, or strides None for a format the primitive chooses."""

    def __init__(self, library: Library, sizes: Sequence[int], strides: Sequence[int] | None,
                 dtype: int = F32) -> None:
        how, layout = ("tag", _TAG_ANY) if strides is None else ("strides", Dims(*strides))
        super().__init__(library, f"dnnl_memory_desc_create_with_{how}", "dnnl_memory_desc_destroy", len(sizes),
                         Dims(*sizes), dtype, layout)


class Attributes(Handle):
    """Primitive attributes: scratch memory comes from us; the result is added to what the destination holds, if
    ``accumulate``, and leaky ReLU of ``slope`` follows, if one is given."""

    def __init__(self, library: Library, slope: float | None = None, accumulate: bool = False) -> None:
        super().__init__(library, "dnnl_primitive_attr_create", "dnnl_primitive_attr_destroy")
        library.call("dnnl_primitive_attr_set_scratchpad_mode", self.handle, _USER_SCRATCHPAD)
        if slope is None and not accumulate:
            return
        after = Handle(library, "dnnl_post_ops_create", "dnnl_post_ops_destroy")
        if accumulate:
            library.call("dnnl_post_ops_append_sum", after.handle, 1.0, 0, F32)
        if slope is not None:
            library.call("dnnl_post_ops_append_eltwise", after.handle, _ELTWISE_RELU, slope, 0.0)
        library.call("dnnl_primitive_attr_set_post_ops", self.handle, after.handle)


class PrimitiveDescriptor(Handle):
    """What a primitive will be: an implementation, and the memory formats it wants."""

    def __init__(self, library: Library, function: str, *args: Any) -> None:
        super().__init__(library, function, "dnnl_primitive_desc_destroy", *args)
        self._library = library
        name = ctypes.c_char_p()
        library.call("dnnl_primitive_desc_query", self.handle, _QUERY_IMPLEMENTATION, 0, ctypes.byref(name))
        self.implementation = (name.value or b"").decode()

    def memory(self, role: str) -> int | None:
        """Handle of the memory descriptor of a role: borrowed, it lives as long as this object."""
        return self._library.c.dnnl_primitive_desc_query_md(self.handle, QUERY[role], 0)

    def size(self, role: str) -> int:
        """Bytes of the memory of a role."""
        handle = self.memory(role)
        return self._library.c.dnnl_memory_desc_get_size(handle) if handle else 0


class Primitive:
    """A compiled primitive, called with the addresses of its arguments in the order given here.

    Parameters
    ----------
    descriptor : PrimitiveDescriptor
    arguments : sequence of (number, memory descriptor handle)
        Execution argument numbers and what lies at their addresses.
    """

    def __init__(self, library: Library, descriptor: PrimitiveDescriptor,
                 arguments: Sequence[tuple[int, Any]]) -> None:
        arguments = list(arguments)
        self.implementation = descriptor.implementation
        self._scratch = descriptor.size("scratchpad")
        if self._scratch:
            arguments.append((ARGUMENT["scratchpad"], descriptor.memory("scratchpad")))
        self._library, self._thread, self._count = library, thread(), len(arguments)
        self._execute, self._set = library.c.dnnl_primitive_execute, library.c.dnnl_memory_set_data_handle
        self._primitive = Handle(library, "dnnl_primitive_create", "dnnl_primitive_destroy", descriptor)
        self._owned = [Handle(library, "dnnl_memory_create", "dnnl_memory_destroy", md, library.engine, None)
                       for _, md in arguments]
        self._memories = [memory.handle for memory in self._owned]
        self._arguments = (_Argument * self._count)(*(
            _Argument(number, memory) for (number, _), memory in zip(arguments, self._memories, strict=True)))

    def __call__(self, *addresses: int) -> None:
        for memory, place in zip(self._memories, addresses, strict=False):
            self._set(memory, place)
        if self._scratch:
            self._set(self._memories[-1], self._thread.buffer("scratchpad", self._scratch))
        status = self._execute(self._primitive.handle, self._thread.stream, self._count, self._arguments)
        if not status and not self._library.synchronous:
            status = self._library.c.dnnl_stream_wait(self._thread.stream)
        if status:
            raise OneDNNError(f"executing {self.implementation} failed with status {status}")


class Thread(threading.local):
    """What one thread owns: its stream, its primitives, its scratch memory."""

    def __init__(self) -> None:
        library = load()
        self._stream = Handle(library, "dnnl_stream_create", "dnnl_stream_destroy", library.engine, _IN_ORDER)
        self.stream = self._stream.handle
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()
        self._buffers: dict[str, tuple[int, int, np.ndarray]] = {}  # size, aligned start, memory

    def cached(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """The object built for ``key``; the longest unused one is dropped beyond CAPACITY."""
        try:
            self._cache.move_to_end(key)
            return self._cache[key]
        except KeyError:
            made = self._cache[key] = build()
            if len(self._cache) > CAPACITY:
                self._cache.popitem(last=False)
            return made

    def buffer(self, name: str, nbytes: int) -> int:
        """Address of a growing buffer, aligned to a cache line; its content lasts until the next use of the name."""
        size, start, _ = self._buffers.get(name, (-1, 0, None))
        if size < nbytes:
            held = np.empty(nbytes + _ALIGNMENT, np.uint8)
            start = address(held)
            start += -start % _ALIGNMENT
            self._buffers[name] = (nbytes, start, held)
        return start


@functools.cache
def thread() -> Thread:
    """The state of the calling thread, whichever asks."""
    return Thread()


def address(a: np.ndarray) -> int:
    """Address of the first element."""
    return a.__array_interface__["data"][0]


def reorder(library: Library, source: Any, target: Any) -> Primitive:
    """The primitive that copies between two memory formats, given as handles of memory descriptors."""
    descriptor = PrimitiveDescriptor(library, "dnnl_reorder_primitive_desc_create", source, library.engine, target,
                                     library.engine, Attributes(library))
    return Primitive(library, descriptor, [(ARGUMENT["src"], source), (ARGUMENT["dst"], target)])
