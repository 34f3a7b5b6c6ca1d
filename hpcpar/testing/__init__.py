"""Helpers for tests of parallel programs: dot test, comparison across ranks, collective assertions, runs under mpiexec.

`hpcpar.testing.plugin` is a pytest plugin that keeps the ranks of a test run in step; a `conftest.py` asks for it with
``pytest_plugins = ["hpcpar.testing.plugin"]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "MpiRun": "launch",
    "MpiTimeout": "launch",
    "launch_command": "launch",
    "launch_environment": "launch",
    "mpi_run": "launch",
    "assert_close_everywhere": "compare",
    "collective_assert": "compare",
    "dot_test": "compare",
    "Array": "cases",
    "Case": "cases",
    "run_spatial_cases": "spatial_cases",
    "CaseCount": "layouts",
    "draw_layout": "layouts",
    "draw_mesh": "layouts",
    "draw_mesh_shape": "layouts",
    "run_cases": "layouts",
    "shared_mesh": "layouts",
    "all_or_none": "serial",
    "compare_with_serial": "serial",
    "operand": "serial",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # lazy, so that the launcher process below mpiexec starts without NumPy and MPI
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
