"""glibc's malloc, told to keep large blocks.

By default malloc maps every array above 32 MiB anew and gives the pages back on free, so that each result of an
elementwise operation costs a page fault for every 4 KiB: measured 2 to 6 times the operation itself. Raised thresholds
make freed memory be used again. It is then not returned to the system before the process ends; ``HPCPAR_MALLOC=0``
leaves malloc as it is.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, malloc.h
_LIMIT = 1 << 30

#: What was done, for ``hpcpar info``.
malloc = "as the system has it"


def raise_malloc_thresholds() -> bool:
    """Raise the thresholds to 1 GiB; returns whether that was done (only on glibc, and not with HPCPAR_MALLOC=0)."""
    global malloc
    if os.environ.get("HPCPAR_MALLOC") == "0":
        malloc = "as the system has it (HPCPAR_MALLOC=0)"
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version, mallopt = libc.gnu_get_libc_version, libc.mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    done = all(mallopt(ctypes.c_int(name), ctypes.c_int(_LIMIT)) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
    if done:
        malloc = "thresholds raised to 1 GiB"
    return done
