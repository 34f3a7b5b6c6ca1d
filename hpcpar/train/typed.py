"""Tables (as TOML gives them) into typed dataclasses, and back; unknown keys, wrong types and bad values are named.

A dataclass is one table. Fields may be bool, int, float, str, Literal, ``X | None``, ``tuple[X, ...]``,
``tuple[X, Y]``, ``dict[str, X]``, another dataclass, or a union of dataclasses, each of which has a field ``name`` (or
``format``) with a Literal of words of its own: this key of the table then chooses the class. Field metadata: ``least``
and ``most`` bound a number, ``key`` is the name in the file where Python reserves the word.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hpcpar.names import did_you_mean, nearest

T = TypeVar("T")
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def number(default: float | int | None, least: float | None = None, most: float | None = None) -> Any:
    """Declare a key with a number (or a list of them), bounded."""
    bounds = {"least": least, "most": most}
    return dataclasses.field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has one line for each thing that is wrong."""


class _Problem(Exception):
    """One thing wrong with the value at hand."""


@dataclasses.dataclass
class _Reader:
    """Collects problems while it walks through the tables."""

    source: Callable[[str], str]
    known: dict[str, list[str]]  # every key, and the variants that have it
    problems: list[str] = dataclasses.field(default_factory=list)

    def say(self, path: str, text: str) -> None:
        self.problems.append(f"{self.source(path)}: {text}")

    def table(self, kind: type, table: Any, path: str) -> Any:
        """Make an instance of the dataclass `kind`; None where that is not possible."""
        if not isinstance(table, Mapping):
            self.say(path, f"{path or 'the file'} must be a table, got {_show(table)}")
            return None
        kinds, keys = typing.get_type_hints(kind), {_key(f): f for f in dataclasses.fields(kind)}
        for name in table:
            if name not in keys:
                self.say(_join(path, name), self._unknown(path, name, list(keys), kind))
        values, before = {}, len(self.problems)
        for name, field in keys.items():
            place = _join(path, name)
            if name in table:
                values[field.name] = self.value(kinds[field.name], table[name], place, field)
            elif _required(field):
                self.say(place, f"{place} is missing" + _choices(kinds[field.name]))
        if len(self.problems) > before:
            return None
        try:
            return kind(**values)
        except ValueError as error:
            self.say(path, f"[{path}] {error}" if path else str(error))
            return None

    def value(self, kind: Any, value: Any, path: str, field: dataclasses.Field) -> Any:
        members = _members(kind)
        if members:
            return self._tagged(members, value, path, field)
        if dataclasses.is_dataclass(kind):
            return self.table(kind, value, path)
        try:
            return _within(_convert(kind, value), field)
        except _Problem as problem:
            self.say(path, f"{path} must be {problem}, got {_show(value)}")
            return None

    def _tagged(self, members: dict[str, type], table: Any, path: str, field: dataclasses.Field) -> Any:
        """A union of dataclasses: the key `name`, or `format`, chooses; without it the default's class is meant."""
        if not isinstance(table, Mapping):
            self.say(path, f"{path} must be a table, got {_show(table)}")
            return None
        key = _tag(next(iter(members.values())))[0]
        name = table.get(key, None if _required(field) else getattr(field.default_factory(), key))
        if name in members:
            return self.table(members[name], table, path)
        place = _join(path, key)
        if name is None:
            self.say(place, f"{place} is missing: one of {_listed(members)}")
        else:
            hint = did_you_mean(nearest(str(name), members))
            self.say(place, f"{place} must be one of {_listed(members)}, got {_show(name)}{hint}")
        return None

    def _unknown(self, path: str, name: str, keys: list[str], kind: type) -> str:
        full, home, (tag, words) = _join(path, name), f"[{path}]" if path else "the file", _tag(kind)
        if words:
            home += f" with {tag} = {' or '.join(map(repr, words))}"
        if self.known.get(full):
            hint = f"; it belongs to {_listed(self.known[full])}"
        else:
            hint = did_you_mean(self._meant(path, name, keys))
        return f"unknown key {full}{hint} ({home} takes {_listed(keys)})"

    def _meant(self, path: str, name: str, keys: list[str]) -> str | None:
        """The full name of the key that was meant: a near one of the same table comes before those of others."""
        elsewhere = [known for known in self.known if known.rpartition(".")[2] == name]
        near = nearest(name, keys) or (None if elsewhere else nearest(name, keys, 0.5))
        if near:
            return _join(path, near)
        return elsewhere[0] if elsewhere else nearest(_join(path, name), self.known)


def read_table(
    kind: type[T], table: Mapping[str, Any], source: Callable[[str], str] = lambda path: "configuration"
) -> T:
    """Make an instance of the dataclass `kind` from nested tables.

    Parameters
    ----------
    kind : dataclass type
    table : mapping
        As read from TOML.
    source : function
        From the dotted path of a key to where it was written, for error messages.

    Raises
    ------
    ConfigError
        With one line for each unknown key, missing key, wrong type and bad value.
    """
    reader = _Reader(source, _all_keys(kind))
    result = reader.table(kind, table, "")
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return result


def write_table(tree: Any) -> dict[str, Any]:
    """Return the nested tables of a dataclass instance; what is None is left out, tuples become lists."""
    table = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if dataclasses.is_dataclass(value):
            value = write_table(value)
        if value is not None:
            table[_key(field)] = list(value) if isinstance(value, tuple) else value
    return table


def _all_keys(kind: type, path: str = "") -> dict[str, list[str]]:
    """Dotted names of all keys; those of a variant with its name, or the names of all variants that have them."""
    keys: dict[str, list[str]] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        place, hint = _join(path, _key(field)), hints[field.name]
        variants = list(_members(hint).values()) or ([hint] if dataclasses.is_dataclass(hint) else [])
        if not variants:
            keys[place] = list(_tag(kind)[1])
        for variant in variants:
            for key, names in _all_keys(variant, place).items():
                keys.setdefault(key, []).extend(names)
    return keys


def _tag(kind: type) -> tuple[str, tuple[str, ...]]:
    """The key by which a variant is chosen and the words that choose it; empty for a dataclass that is none."""
    hints = typing.get_type_hints(kind)
    for key in ("name", "format"):
        if typing.get_origin(hints.get(key)) is typing.Literal:
            return key, typing.get_args(hints[key])
    return "", ()


def _members(kind: Any) -> dict[str, type]:
    """Word -> class of a union of dataclasses; empty for other types."""
    return {word: m for m in typing.get_args(kind) if dataclasses.is_dataclass(m) for word in _tag(m)[1]}


def _convert(kind: Any, value: Any) -> Any:
    """Check a plain value; raises _Problem with the words for what was expected."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        expected = []
        for member in args:
            if member is type(None):
                continue
            try:
                return _convert(member, value)
            except _Problem as problem:
                expected.append(str(problem))
        raise _Problem(" or ".join(expected))
    if origin is typing.Literal:
        if value not in args or type(value) not in {type(a) for a in args}:
            raise _Problem(f"one of {_listed(args)}")
        return value
    if origin is tuple:
        return _sequence(args, value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _Problem("a table")
        for key, entry in value.items():
            try:
                _convert(args[1], entry)
            except _Problem as problem:
                raise _Problem(f"a table whose every value is {problem}, and {key} = {_show(entry)} is not") from None
        return {key: _convert(args[1], entry) for key, entry in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _Problem(_WORDS[kind])
    return value


def _sequence(args: tuple, value: Any) -> tuple:
    variadic = len(args) == 2 and args[1] is Ellipsis
    if not isinstance(value, (list, tuple)) or not (variadic or len(value) == len(args)):
        raise _Problem("a list" if variadic else f"a list of {len(args)}")
    try:
        return tuple(_convert(args[0] if variadic else args[i], v) for i, v in enumerate(value))
    except _Problem as problem:
        raise _Problem(f"a list whose every entry is {problem}") from None


def _within(value: Any, field: dataclasses.Field) -> Any:
    for entry in value if isinstance(value, tuple) else (value,):
        if not isinstance(entry, (int, float)):
            continue
        if entry != entry:
            raise _Problem("a number")
        if entry < field.metadata.get("least", entry):
            raise _Problem(f"at least {field.metadata['least']}")
        if entry > field.metadata.get("most", entry):
            raise _Problem(f"at most {field.metadata['most']}")
    return value


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _key(field: dataclasses.Field) -> str:
    return field.metadata.get("key", field.name)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _choices(kind: Any) -> str:
    members = _members(kind)
    return f": give a table with name = {' or '.join(map(repr, members))}" if members else ""


def _listed(words: Any) -> str:
    return ", ".join(str(w) for w in words)


def _show(value: Any) -> str:
    kinds = {int: "an integer", float: "a number", str: "a string", list: "a list"}
    if isinstance(value, Mapping):
        return "a table"
    return f"{value!r} ({kinds[type(value)]})" if type(value) in kinds else str(value).lower()
