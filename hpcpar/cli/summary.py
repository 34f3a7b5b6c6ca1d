"""Show the network of a configuration file without training it.

Layers, their layouts on the mesh, parameters, FLOPs, memory of a rank and message bytes of a step.
"""

from __future__ import annotations

import argparse
import json

from hpcpar.cli.train import add_job_arguments

SUMMARY = "show layers, layouts, parameters, FLOPs, memory and messages of a configuration"
PARALLEL = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job_arguments(parser)
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks, where the mesh has a -1")
    parser.add_argument("--shape", metavar="D,H,W", type=_lengths, help="size of a sample, where no data say it")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Load the configuration and print its summary."""
    from hpcpar.train.config import load_job

    job = load_job(args.job, args.overrides)

    from hpcpar.plan.summary import summarize
    from hpcpar.plan.table import as_text

    facts = summarize(job, args.ranks, args.shape)
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected lengths such as 64,64,64 or 64") from None
