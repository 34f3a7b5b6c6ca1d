"""Draw the curves of a run, and three slices of its last prediction where it is a volume, as PNG files.

RUN is the run directory (run.dir in the configuration); the pictures are left in it.
"""

from __future__ import annotations

import argparse

SUMMARY = "draw loss and metric curves and slices of a run as PNG"
PARALLEL = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("--out", metavar="DIR", help="where to put the pictures (default: RUN)")


def run(args: argparse.Namespace) -> int:
    """Draw and name what was drawn."""
    from hpcpar.train.plot import plot_run

    for path in plot_run(args.run_dir, args.out):
        print(path)
    return 0
