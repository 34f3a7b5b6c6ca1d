"""Measure kernels, operations, training steps, messages and memory on this machine.

Everything is measured in turns within one run, and shown as ratios: to what the machine does at best (its own matrix
products, copies and MPI), and to torch where it is installed. Run it on an otherwise idle machine. It starts the
processes that it needs by itself, those of several ranks under mpiexec.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

SUMMARY = "measure kernels, operations, steps, messages and memory on this machine"
PARALLEL = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    names = "kernels, attention, ops, steps, ranks, memory, share (all)"
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=names)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all runs: figures mean nothing")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="repeats of everything that is measured")
    parser.add_argument("--ranks", type=_positive, default=2, metavar="N", help="ranks of what is split (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and the targets, write the file."""
    from hpcpar.bench import report, suite
    from hpcpar.bench.options import Options

    def say(group: str) -> None:
        sys.stderr.write(f"measuring {group}\n")

    options = Options(args.quick, args.repeats, args.ranks)
    measures = suite.run(args.groups or list(suite.GROUPS), options, say)
    facts = report.collect(measures, options, ["hpcpar", *sys.argv[1:]])
    if args.json:
        args.json.write_text(json.dumps(facts, indent=2) + "\n")
    print(report.as_text(facts, args.markdown), end="")
    return 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)
