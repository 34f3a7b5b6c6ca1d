"""Fingerprints of a run, operation by operation, and where two runs part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from hpcpar.checks.values import Value, agree, epsilon, tolerance


class Record(NamedTuple):
    """One result or gradient: what it is, its global shape and dtype, and its fingerprint."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    value: float
    scale: float

    def __str__(self) -> str:
        return f"{self.what} {self.shape} {self.dtype} = {self.value!r}"


class Log:
    """The records of a run in order; equal for the same program under every layout, up to rounding.

    Parameters
    ----------
    path : str or Path, optional
        A file to which each record is added at once as a line of JSON, for a run that may die.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.records: list[Record] = []
        self._file = open(path, "w") if path is not None else None  # noqa: SIM115

    def add(self, record: Record) -> None:
        """Add one record."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @classmethod
    def read(cls, path: str | Path) -> Log:
        """Return the log that was written to a file."""
        log = cls()
        for line in Path(path).read_text().splitlines():
            what, shape, dtype, value, scale = json.loads(line)
            log.records.append(Record(what, tuple(shape), dtype, value, scale))
        return log


def first_difference(
    first: Sequence[Record] | Log, second: Sequence[Record] | Log, within: float | None = None
) -> str | None:
    """Return the first record in which two runs differ, in words; None where they agree to the end.

    Parameters
    ----------
    within : float, optional
        Relative to the scale of the record; by default what rounding in its dtype may make, and values that are zero
        but for rounding, compared with the largest of the runs, are then equal.
    """
    a, b = list(first), list(second)
    largest = max((r.scale for r in (*a, *b) if isfinite(r.scale)), default=0.0)
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if (x.what, x.shape) != (y.what, y.shape):
            return f"record {number}: the runs do different things: {x} and {y}"
        allowed, floor = (tolerance(x.dtype, y.dtype), epsilon(x.dtype, y.dtype) ** 0.9 * largest)
        if within is not None:
            allowed, floor = within, 0.0
        if not agree(Value(x.value, x.scale), Value(y.value, y.scale), allowed, floor):
            ratio = f", a factor of {y.value / x.value:.6g}" if x.value else ""
            return f"record {number}: {x} in the first run and {y.value!r} in the second{ratio}"
    if len(a) != len(b):
        longer, name = (a, "first") if len(a) > len(b) else (b, "second")
        return f"record {min(len(a), len(b))}: only the {name} run goes on, with {longer[min(len(a), len(b))]}"
    return None
