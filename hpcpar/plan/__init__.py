"""What a step costs before anything runs: layers, layouts, operations, memory of a rank, bytes of messages.

The program itself is run, on a mesh without ranks (`virtual`) and on arrays without storage (`hpcpar.kernels.outline`),
and what it does is written down (`dry`). Nothing here repeats what an operation knows.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Bill": "dry",
    "NotEnoughMemory": "memory",
    "Task": "dry",
    "VirtualMesh": "virtual",
    "dry_run": "dry",
    "require_memory": "memory",
    "summarize": "summary",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
