"""What a step costs before anything runs: layers, layouts, operations, memory of a rank, bytes of messages."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"VirtualMesh": "virtual"}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
