"""hpcpar: training of networks whose single sample, or whose weights, do not fit on one device, wherever there is MPI.

Every array knows how it lies on a mesh of ranks, every operation knows what that means, and nothing else in the package
talks about ranks. Names are looked up when first used, so that ``import hpcpar`` costs little on thousands of ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

from hpcpar.version import __version__

_HOME = {
    "Mesh": "hpcpar.mesh",
    "MeshError": "hpcpar.mesh",
    "current_mesh": "hpcpar.mesh",
    "Layout": "hpcpar.layout.layout",
    "LayoutError": "hpcpar.layout.layout",
    "Tensor": "hpcpar.tensors",
    "Parameter": "hpcpar.tensors",
    "tensor": "hpcpar.creation",
    "from_shard": "hpcpar.creation",
    "no_grad": "hpcpar.autograd",
    "enable_grad": "hpcpar.autograd",
    "grad_enabled": "hpcpar.autograd",
    "recompute": "hpcpar.recomputation",
    "recompute_results": "hpcpar.recomputation",
    "recomputing": "hpcpar.autograd",
    "checked": "hpcpar.checks",
    "manual_seed": "hpcpar.random",
    "zeros": "hpcpar.creation",
    "ones": "hpcpar.creation",
    "full": "hpcpar.creation",
    "arange": "hpcpar.creation",
    "rand": "hpcpar.random",
    "randn": "hpcpar.random",
    "einsum": "hpcpar.functional",
    "matmul": "hpcpar.functional",
    "cat": "hpcpar.functional",
    "stack": "hpcpar.functional",
    "where": "hpcpar.functional",
    "parallelize": "hpcpar.parallel",
    "Column": "hpcpar.parallel",
    "Row": "hpcpar.parallel",
    "Placement": "hpcpar.parallel",
    "grids": "hpcpar.parallel",
}
_MODULES = (
    "checks", "functional", "nn", "optim", "primitives", "testing", "models", "data", "parallel", "transport",
    "kernels", "plan", "train",
)  # fmt: skip

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hpcpar.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hpcpar' has no attribute {name!r}")
    if home != "hpcpar.layout.layout":
        importlib.import_module("hpcpar.ops")  # gives Tensor its methods
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
