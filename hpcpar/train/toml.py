"""TOML: reading with the standard library's parser, and a writer for what a configuration holds."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TOMLDecodeError", "dumps", "loads", "loads_value"]

TOMLDecodeError = tomllib.TOMLDecodeError
loads = tomllib.loads

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_WORD = re.compile(r"[^\s\"'\[\]{}=#,]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def loads_value(text: str) -> Any:
    """Read one TOML value; a single word that is no TOML is a string, as a shell takes its quotes away.

    Raises
    ------
    ValueError
        The text is neither.
    """
    try:
        table = loads(f"value = {text}\n")
    except TOMLDecodeError:
        if _BARE_WORD.fullmatch(text):
            return text
        raise
    if set(table) != {"value"}:
        raise ValueError("more than one value")
    return table["value"]


def dumps(table: Mapping[str, Any]) -> str:
    """Write nested tables of strings, numbers, booleans and lists of these; reading it back gives the same."""
    return "\n\n".join(_tables(table, ())) + "\n"


def _tables(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if not isinstance(v, Mapping)]
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    header = [f"[{'.'.join(map(_key, path))}]"] if path and (plain or not inner) else []
    blocks = ["\n".join(header + plain)] if header or plain else []
    for name, child in inner.items():
        blocks += _tables(child, (*path, name))
    return blocks


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)  # inf, -inf and nan are TOML
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _string(text: str) -> str:
    body = "".join(_ESCAPES.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
    return f'"{body}"'
