"""Where the program is: the full name of the module whose forward pass runs, for errors and for lines of the trace."""

from __future__ import annotations

_names: list[str] = []


def current() -> str:
    """Return the full name of the innermost module that runs (``"enc3.conv1"``), "" outside of any."""
    return _names[-1] if _names else ""


enter = _names.append
"""Say that the module of a name starts."""

leave = _names.pop
"""Say that the module entered last is done."""


def name_error(error: Exception) -> None:
    """Add the running module's name to an error, once: the innermost module knows best."""
    name = current()
    if name and error.args and isinstance(error.args[0], str) and not getattr(error, "module", ""):
        error.args = (f"{name}: {error.args[0]}", *error.args[1:])
        error.module = name
