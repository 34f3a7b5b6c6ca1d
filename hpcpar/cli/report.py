"""Show what a run did: curves in short, and where the time of a step went, by layer, mesh axis and rank.

RUN is the run directory (run.dir in the configuration). The times come from its trace.json, which hpcpar train --trace
leaves there; open it in ui.perfetto.dev too. --html writes one self-contained page, with curves, slices and the mesh.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SUMMARY = "show where the time of a run went, as text or as one HTML page"
PARALLEL = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--html", nargs="?", const="", metavar="FILE", help="write a page (default: RUN/report.html)")
    how.add_argument("--json", action="store_true", help="the same figures as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Gather what there is and show it."""
    from hpcpar.report import gather

    facts = gather(args.run_dir)
    if args.json:
        print(json.dumps(facts, indent=2))
    elif args.html is not None:
        from hpcpar.report.page import write_page

        print(write_page(facts, Path(args.html or Path(args.run_dir, "report.html"))))
    else:
        from hpcpar.report.text import as_text

        print(as_text(facts))
    return 0
