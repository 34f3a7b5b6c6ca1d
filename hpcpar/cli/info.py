"""Show what hpcpar runs on: MPI, ranks by node, threads, HDF5, kernels, GPUs, batch system; and what is amiss.

Run it the way the training will run, for example mpiexec -n 4 hpcpar info.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

SUMMARY = "show MPI, nodes, threads, HDF5, kernels, GPUs, batch system, and what is amiss"
PARALLEL = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Gather the facts of all ranks; rank 0 prints them."""
    from hpcpar.transport import system

    ranks = system.gather_rank_facts()
    facts = collect(ranks, system.mpi_facts())
    if system.world()[0] == 0:
        print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def collect(ranks: list[Any], mpi: dict[str, Any]) -> dict[str, Any]:
    """Return everything as one tree of plain values.

    Parameters
    ----------
    ranks : list of RankFacts
        Of all ranks.
    mpi : dict
        From `hpcpar.transport.system.mpi_facts`.
    """
    from hpcpar import kernels
    from hpcpar.cli import findings
    from hpcpar.version import __version__

    gpu = findings.gpu()
    return {
        "hpcpar": __version__,
        **findings.software(),
        "mpi": mpi,
        "nodes": findings.nodes(ranks),
        "threads": [{"rank": r, "cores": list(f.cores), **f.threads} for r, f in enumerate(ranks)],
        "hdf5": findings.hdf5(),
        "kernels": kernels.describe(),
        "gpu": {**gpu, "visible": [f.devices for f in ranks]},
        "scheduler": findings.scheduler(os.environ),
        "warnings": findings.warnings(ranks, os.environ, len(gpu["devices"])),
    }


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as lines for people."""
    mpi, hdf5 = facts["mpi"], facts["hdf5"]
    lines = [
        f"hpcpar      {facts['hpcpar']}, Python {facts['python']}, {facts['system']}",
        f"packages    {', '.join(f'{k} {v}' for k, v in facts['packages'].items() if v)}",
        f"missing     {', '.join(k for k, v in facts['packages'].items() if not v) or 'nothing'}",
        f"MPI         {mpi['library']}, standard {mpi['standard']}, threads {mpi['threads']}, {mpi['size']} rank(s)",
    ]
    for row in facts["nodes"]:
        lines.append(f"node        {row['host']}: ranks {_ranges(row['ranks'])} on cores {_ranges(row['cores'])}")
    for ranks, words in _same_threads(facts["threads"]).values():
        lines.append(f"threads     ranks {_ranges(ranks)}: {words}")
    parallel = "with MPI" if hdf5["mpi"] else "serial (each rank opens files by itself)"
    lines.append(f"HDF5        {hdf5['hdf5']}, h5py {hdf5['h5py']} {parallel}, file locking {hdf5['locking']}")
    lines += [f"kernels     {_kernel(row)}" for row in facts["kernels"]]
    lines += [f"GPU         {_gpu(facts['gpu'])}"]
    for name, variables in facts["scheduler"].items() or {"": {}}.items():
        words = " ".join(f"{k}={v}" for k, v in variables.items())
        lines.append(f"batch       {name}: {words}" if name else "batch       no batch system")
    lines += [f"WARNING     {text}" for text in facts["warnings"]]
    return "\n".join(lines)


def _kernel(row: dict[str, str]) -> str:
    details = ", ".join(row[k] for k in ("version", "library", "isa") if row.get(k))
    text = f"{row['family']:<12}{row['implementation']}"
    text += f" ({details}; threads {row['threads']})" if row.get("threads") else f" ({details})"
    text += f"; computes in {row['compute']}" if row.get("compute") else ""
    return text + (f"; {row['note']}" if row.get("note") else "")


def _gpu(gpu: dict[str, Any]) -> str:
    devices = [f"{d['name']} ({d['memory_GiB']} GiB)" for d in gpu["devices"]]
    visible = {v for v in gpu["visible"] if v is not None}
    words = f"; CUDA_VISIBLE_DEVICES {' | '.join(sorted(visible))}" if visible else ""
    return (", ".join(devices) or gpu["note"]) + words


def _same_threads(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], str]]:
    """Ranks with equal thread variables, and these in words."""
    groups: dict[str, tuple[list[int], str]] = {}
    for row in rows:
        words = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("rank", "cores")) or "no variable set"
        groups.setdefault(words, ([], words))[0].append(row["rank"])
    return groups


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts) or "unknown"
