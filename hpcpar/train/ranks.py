"""What is to be known of every rank after a run: where it sat, how much memory it took, what it sent."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from hpcpar.mesh import Mesh
from hpcpar.train.record import RunDirectory
from hpcpar.transport import counter

FILE = "ranks.json"


def rank_facts(mesh: Mesh) -> dict[str, Any]:
    """Return what this rank says of itself. The first call is collective (`Mesh.node`)."""
    return {
        "rank": mesh.rank,
        "coords": mesh.coords,
        "host": mesh.node.hosts[mesh.rank],
        "peak_bytes": peak_bytes(),
    }


def write_ranks(out: RunDirectory, mesh: Mesh, steps: int, seconds: float) -> None:
    """Write ``ranks.json``: the mesh, the steps and seconds of this process, and the facts of every rank. Collective.

    The messages of a rank are those since its start, keyed by operation and axes: validation and checkpoints included.
    """
    sent = [
        {"operation": operation, "axes": axes, "messages": tally.messages, "bytes": tally.bytes}
        for (operation, axes), tally in sorted(counter.snapshot().items())
    ]
    ranks = mesh.world.gather_objects({**rank_facts(mesh), "messages": sent})
    facts = {"mesh": dict(mesh.shape), "steps": steps, "seconds": round(seconds, 3), "ranks": ranks}
    out.write_text(FILE, json.dumps(facts, indent=1) + "\n")


def peak_bytes() -> int:
    """Return the most memory this process has held at any time, libraries and all."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB
