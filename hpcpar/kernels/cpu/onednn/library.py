"""The oneDNN library: found, loaded once, its C functions typed.

Any ``libdnnl.so.3`` serves (C interface version 3). It is looked for at HPCPAR_ONEDNN_LIB, then among the files of the
wheel ``onednn-cpu-gomp``, then where the system's loader looks.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ... import registry

NAME = "libdnnl.so.3"
WHEELS = ("onednn-cpu-gomp", "onednn-cpu-iomp", "onednn-cpu-tbb", "onednn")

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_LENGTHS, _MATRIX = [ctypes.c_int64] * 3, [ctypes.c_void_p, ctypes.c_int64]
_STATUS = ("success", "out of memory", "invalid arguments", "unimplemented", "last implementation reached",
           "runtime error", "not required")
_ISA = {0x1: "SSE4.1", 0x3: "AVX", 0x7: "AVX2", 0xF: "AVX2 VNNI", 0x1F: "AVX2 VNNI 2", 0x27: "AVX-512",
        0x67: "AVX-512 VNNI", 0xE7: "AVX-512 BF16", 0x1EF: "AVX-512 FP16", 0xFEF: "AVX-512 AMX",
        0x1FEF: "AVX-512 AMX FP16"}
_BFLOAT16 = 0xE7  # AVX-512 BF16, which all later sets include
_FLOAT16 = 0x1EF  # AVX-512 FP16, likewise
_CPU_ENGINE = 1
_WAYS = ("native", "float32")  # of HPCPAR_BFLOAT16
_SYNCHRONOUS_RUNTIMES = (1, 2)  # sequential and OpenMP: the work is done when execute returns

#: C functions by name: argument types; all return a status except where a second entry says otherwise. Handles are
#: pointers; without these types ctypes would cut 64-bit addresses passed as Python integers.
_FUNCTIONS: dict[str, tuple[list, type | None]] = {
    "dnnl_engine_create": ([_POINTER, _INT, _SIZE], _INT),
    "dnnl_stream_create": ([_POINTER, _POINTER, ctypes.c_uint], _INT),
    "dnnl_stream_wait": ([_POINTER], _INT),
    "dnnl_stream_destroy": ([_POINTER], _INT),
    "dnnl_memory_desc_create_with_strides": ([_POINTER, _INT, _POINTER, _INT, _POINTER], _INT),
    "dnnl_memory_desc_create_with_tag": ([_POINTER, _INT, _POINTER, _INT, _INT], _INT),
    "dnnl_memory_desc_destroy": ([_POINTER], _INT),
    "dnnl_memory_desc_get_size": ([_POINTER], _SIZE),
    "dnnl_memory_desc_equal": ([_POINTER, _POINTER], _INT),
    "dnnl_memory_create": ([_POINTER, _POINTER, _POINTER, _POINTER], _INT),
    "dnnl_memory_set_data_handle": ([_POINTER, _POINTER], _INT),
    "dnnl_memory_destroy": ([_POINTER], _INT),
    "dnnl_post_ops_create": ([_POINTER], _INT),
    "dnnl_post_ops_append_sum": ([_POINTER, ctypes.c_float, ctypes.c_int32, _INT], _INT),
    "dnnl_post_ops_append_eltwise": ([_POINTER, _INT, ctypes.c_float, ctypes.c_float], _INT),
    "dnnl_post_ops_destroy": ([_POINTER], _INT),
    "dnnl_primitive_attr_create": ([_POINTER], _INT),
    "dnnl_primitive_attr_set_scratchpad_mode": ([_POINTER, _INT], _INT),
    "dnnl_primitive_attr_set_post_ops": ([_POINTER, _POINTER], _INT),
    "dnnl_primitive_attr_destroy": ([_POINTER], _INT),
    "dnnl_primitive_desc_query": ([_POINTER, _INT, _INT, _POINTER], _INT),
    "dnnl_primitive_desc_query_md": ([_POINTER, _INT, _INT], _POINTER),
    "dnnl_primitive_desc_destroy": ([_POINTER], _INT),
    "dnnl_primitive_create": ([_POINTER, _POINTER], _INT),
    "dnnl_primitive_execute": ([_POINTER, _POINTER, _INT, _POINTER], _INT),
    "dnnl_primitive_destroy": ([_POINTER], _INT),
    "dnnl_reorder_primitive_desc_create": ([_POINTER] * 6, _INT),
    "dnnl_matmul_primitive_desc_create": ([_POINTER] * 7, _INT),
    "dnnl_sgemm": ([ctypes.c_char, ctypes.c_char, *_LENGTHS, ctypes.c_float, *_MATRIX, *_MATRIX, ctypes.c_float,
                    *_MATRIX], _INT),
    "dnnl_convolution_forward_primitive_desc_create": ([_POINTER, _POINTER, _INT, _INT] + [_POINTER] * 9, _INT),
    "dnnl_convolution_backward_data_primitive_desc_create": ([_POINTER, _POINTER, _INT] + [_POINTER] * 9, _INT),
    "dnnl_convolution_backward_weights_primitive_desc_create": ([_POINTER, _POINTER, _INT] + [_POINTER] * 10, _INT),
}


class OneDNNError(RuntimeError):
    """A oneDNN function returned an error."""


class _Version(ctypes.Structure):
    _fields_ = [("major", _INT), ("minor", _INT), ("patch", _INT), ("hash", ctypes.c_char_p),
                ("cpu_runtime", ctypes.c_uint), ("gpu_runtime", ctypes.c_uint)]


class Library:
    """One loaded library with its CPU engine."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.c = ctypes.CDLL(path)
        try:
            self.c.dnnl_version.restype = ctypes.POINTER(_Version)
            version = self.c.dnnl_version().contents
            if version.major != 3:
                raise ImportError(f"{path} is oneDNN {version.major}.{version.minor}; version 3 is needed")
            for name, (arguments, result) in _FUNCTIONS.items():
                function = getattr(self.c, name)
                function.argtypes, function.restype = arguments, result
        except AttributeError as error:
            raise ImportError(f"{path} lacks a function of oneDNN's C interface: {error}") from error
        self.version = f"{version.major}.{version.minor}.{version.patch}"
        self.synchronous = version.cpu_runtime in _SYNCHRONOUS_RUNTIMES
        self.engine = self.new("dnnl_engine_create", _CPU_ENGINE, 0)

    def call(self, name: str, *args: object) -> None:
        """Call a function and raise OneDNNError unless it succeeds."""
        status = getattr(self.c, name)(*args)
        if status:
            raise OneDNNError(f"{name}: {_STATUS[status] if status < len(_STATUS) else status}")

    def new(self, name: str, *args: object) -> ctypes.c_void_p:
        """Call a function that returns a new handle through its first argument."""
        handle = _POINTER()
        self.call(name, ctypes.byref(handle), *args)
        return handle

    @functools.cached_property
    def bfloat16(self) -> bool:
        """Whether kernels multiply bfloat16 by instructions made for it; oneDNN would emulate them otherwise."""
        return self.c.dnnl_get_effective_cpu_isa() & _BFLOAT16 == _BFLOAT16

    @functools.cached_property
    def bfloat16_by_float32(self) -> bool:
        """Whether products of bfloat16 are made by float32 instructions, of numbers that are rounded before.

        They are the same but for the rounding of sums. ``HPCPAR_BFLOAT16=native`` or ``float32`` decides; by default
        Intel's cores with AVX-512 FP16 and no matrix unit, or one hidden by a virtual machine, take float32: their
        instruction for bfloat16 was measured at half of its rate.

        Raises
        ------
        ValueError
            For another value of the variable.
        """
        asked = os.environ.get("HPCPAR_BFLOAT16", "")
        if asked and asked not in _WAYS:
            raise ValueError(f"HPCPAR_BFLOAT16={asked!r}: expected one of {', '.join(_WAYS)}")
        if not asked:
            return self.c.dnnl_get_effective_cpu_isa() == _FLOAT16 and _vendor() == "GenuineIntel"
        return asked == "float32"

    @functools.cached_property
    def float16(self) -> bool:
        """Whether kernels multiply float16 by instructions made for it."""
        return self.c.dnnl_get_effective_cpu_isa() & _FLOAT16 == _FLOAT16

    def isa(self) -> str:
        """The instruction set the kernels use."""
        value = self.c.dnnl_get_effective_cpu_isa()
        return _ISA.get(value, hex(value))


@functools.cache
def load() -> Library:
    """The library.

    Raises
    ------
    ImportError
        If there is none; the message says where it was looked for and what would help.
    """
    asked = os.environ.get("HPCPAR_ONEDNN_LIB")
    tried = []
    for path in [asked] if asked else [*_wheel_files(), NAME]:
        try:
            return Library(path)
        except (OSError, ImportError) as error:
            tried.append(str(error))
        except OneDNNError as error:
            tried.append(f"{path}: {error}")
    advice = "HPCPAR_ONEDNN_LIB names it" if asked else "install it by pip install 'hpcpar[cpu]'"
    raise ImportError(f"oneDNN is not available ({'; '.join(tried)}); {advice}")


def facts() -> dict[str, str]:
    """Version, path, instruction set, threads and the dtypes of products, for ``hpcpar info``."""
    library = load()
    count = threads()
    return {"version": library.version, "library": library.path, "isa": library.isa(),
            "threads": "all" if count is None else str(count),
            "compute": ", ".join(["float32", *[_bfloat16_in_words(library)] * library.bfloat16,
                                  *["float16"] * library.float16])}


def _bfloat16_in_words(library: Library) -> str:
    return "bfloat16 (of rounded numbers, by the faster instructions for float32)" if (
        library.bfloat16_by_float32) else "bfloat16"


def threads() -> int | None:
    """How many threads kernels use; None where that is not known, then as many as there are cores."""
    try:
        return ctypes.CDLL("libgomp.so.1").omp_get_max_threads()
    except OSError:
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return int(asked) if asked.isdigit() else None


def _forked() -> None:
    """In a forked child the threads of the parent's pool are gone, and a kernel would wait for them forever."""
    if load.cache_info().currsize and threads() != 1:
        registry.lose("onednn", "oneDNN's threads did not come through fork (start workers by spawn, or with "
                                "OMP_NUM_THREADS=1)")


os.register_at_fork(after_in_child=_forked)


def _vendor() -> str:
    """Who made the processor, as it says itself; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _wheel_files() -> Iterator[str]:
    usual = Path(sys.prefix, "lib", NAME)
    if usual.exists():
        yield str(usual)
    for wheel in WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            found = Path(file.locate()).resolve()
            if file.name == NAME and found != usual.resolve():
                yield str(found)
