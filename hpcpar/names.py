"""Names that a user wrote: what a pattern matches, and which name was meant by one that nobody has."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the name most like `name`, or None where none is like it.

    Parameters
    ----------
    names : iterable of str
        Those that there are.
    likeness : float
        What a name needs to count, from 0 (anything) to 1 (the same), as in `difflib.get_close_matches`.
    """
    return next(iter(get_close_matches(name, list(names), 1, likeness)), None)


def did_you_mean(near: str | None) -> str:
    """Return the end of an error that names `near`, ``"; did you mean depth?"``; nothing for None."""
    return "" if near is None else f"; did you mean {near}?"


def matching(who: str, pattern: str, names: Iterable[str], kind: str) -> list[str]:
    """Return the names that a pattern matches, in their order.

    Parameters
    ----------
    who : str
        Begins the error: the function that the pattern was given to.
    pattern : str
        ``*``, ``?``, ``[...]``; ``*`` also matches dots, capitals count.
    names : iterable of str
        Those that there are.
    kind : str
        What they are names of, for the error: ``"module"``.

    Raises
    ------
    ValueError
        The pattern matches none; names those that are most like it.
    """
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        near = get_close_matches(pattern, names, n=3, cutoff=0.4)  # wildcards count as letters: less alike
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise ValueError(f"{who}: the pattern {pattern!r} matches no {kind}{hint}")
    return found
