"""The checked mode: every operation, move and message is held to what it claims, and the first that lies is named.

Set ``HPCPAR_CHECK=1``, or use `checked` as a context manager. Then

- what is replicated over an axis is compared bit for bit along it: results and gradients;
- ``<g, y> = <dx, x>`` is computed for each operand an operation is linear in, with the inner product of logical arrays,
  so that a gradient that is summed once too often or too seldom shows as a factor;
- each move must keep the fingerprint of the array, a sum that is the same under every layout;
- ranks must apply the same operation to the same signatures in the same order, and call the same collective with shapes
  and dtypes that fit: the first difference stops all of them, with both sides named.

Everything is slow by a factor of ten to a hundred and meant for small runs. `Log` keeps the fingerprints of a run, and
`first_difference` finds where two runs part: serial and parallel, or two layouts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CheckError": "values",
    "Log": "log",
    "Record": "log",
    "checked": "mode",
    "check_gradient_layouts": "mode",
    "disable": "mode",
    "enable": "mode",
    "first_difference": "log",
    "fingerprint": "logical",
    "inner_products": "logical",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
