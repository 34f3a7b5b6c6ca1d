"""Host and device arrays at the border to MPI: what is sent lies in host memory that this package packed itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar.kernels.arrays import is_outline


def is_device(array: Any) -> bool:
    """Whether `array` lives on a GPU (a CuPy array)."""
    return type(array) is not np.ndarray and type(array).__module__.partition(".")[0] == "cupy"


def to_host(array: Any) -> np.ndarray:
    """Return `array` as a C-contiguous NumPy array; a device array is copied after its stream has finished.

    The copy of a device array goes through pinned memory on the current stream, and the stream is synchronised before
    the array is handed out: a message must never read what a kernel has still to write.
    """
    if not is_device(array):
        if is_outline(array):
            return array if array.flags.c_contiguous else array.copy()
        # ascontiguousarray would turn a 0-dim array into shape (1,)
        return np.asarray(array, order="C")
    import cupy
    import cupyx

    source = cupy.ascontiguousarray(array)
    host = cupyx.empty_pinned(array.shape, array.dtype)
    stream = cupy.cuda.get_current_stream()
    source.get(stream=stream, out=host)
    stream.synchronize()
    return host


def like(host: np.ndarray, reference: Any) -> Any:
    """Return `host` where `reference` lives: itself, or a copy on the reference's GPU."""
    if not is_device(reference):
        return host
    import cupy

    return cupy.asarray(host)
