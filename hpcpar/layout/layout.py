"""Layout: for each dim of an array the mesh axes that split it, and the axes over which its value is partial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Entry = str | tuple[str, ...] | list[str] | None


class LayoutError(ValueError):
    """A layout that a mesh, an array or an operation cannot serve; raised on all ranks, before any message."""


class Layout:
    """How an array lies on a mesh.

    Parameters
    ----------
    *dims : str, tuple of str or None
        One entry per dim: the axis that splits it, several axes (a stack: the first splits the dim, the next each of
        its blocks), or nothing. Trailing dims default to nothing.
    partial : str or tuple of str
        Axes over which the value is the sum of what the ranks hold.

    Examples
    --------
    >>> Layout("batch", None, "depth")
    >>> Layout(("batch", "depth"), partial="model")
    """

    __slots__ = ("_hash", "dims", "partial")

    def __init__(self, *dims: Entry, partial: Entry = ()) -> None:
        entries = [_axes(entry) for entry in dims]
        while entries and not entries[-1]:
            entries.pop()
        self.dims: tuple[tuple[str, ...], ...] = tuple(entries)
        self.partial: tuple[str, ...] = _axes(partial)
        used = [a for entry in self.dims for a in entry] + list(self.partial)
        twice = {a for a in used if used.count(a) > 1}
        if twice:
            raise LayoutError(f"axis {min(twice)!r} appears twice in {self!r}; an axis splits one dim or is partial")
        self._hash = hash((self.dims, frozenset(self.partial)))

    def on(self, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Layout:
        """Return this layout as an array of `shape` has it on a mesh with axes of `lengths`.

        Axes of length 1 vanish and partial axes take mesh order, so that equal layouts compare equal.

        Raises
        ------
        LayoutError
            For an axis that the mesh does not have, or more entries than dims.
        """
        for axis in self.axes:
            if axis not in lengths:
                raise LayoutError(f"{self!r} names the axis {axis!r}; the mesh has {', '.join(lengths)}")
        if len(self.dims) > len(shape):
            raise LayoutError(f"{self!r} has {len(self.dims)} entries, the array of shape {shape} {len(shape)} dims")
        dims = [tuple(a for a in entry if lengths[a] > 1) for entry in self.dims]
        return Layout(*dims, partial=tuple(a for a in lengths if a in self.partial and lengths[a] > 1))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that is mentioned."""
        return tuple(a for entry in self.dims for a in entry) + self.partial

    def entry(self, dim: int) -> tuple[str, ...]:
        """Return the axes that split `dim`."""
        return self.dims[dim] if dim < len(self.dims) else ()

    def replace(self, dim: int, entry: Entry) -> Layout:
        """Return a copy with another entry for one dim."""
        dims: list[Entry] = [*self.dims, *[()] * (dim + 1 - len(self.dims))]
        dims[dim] = entry
        return Layout(*dims, partial=self.partial)

    def resolved(self) -> Layout:
        """Return a copy without partial axes."""
        return Layout(*self.dims)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.dims == other.dims and set(self.partial) == set(other.partial)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts = [repr(e[0]) if len(e) == 1 else repr(e or None) for e in self.dims]
        if self.partial:
            parts.append(f"partial={self.partial[0]!r}" if len(self.partial) == 1 else f"partial={self.partial!r}")
        return f"Layout({', '.join(parts)})"


def _axes(entry: Entry | Iterable[str]) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    entry = tuple(entry)
    if not all(isinstance(a, str) for a in entry):
        raise LayoutError(f"a layout entry is an axis name, a tuple of names or None, got {entry!r}")
    return entry
