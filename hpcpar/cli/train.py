"""Train the network of a configuration file on all ranks of the job.

The same command runs on one process and under mpiexec or srun; the table [mesh] says what the ranks are for.

SIGUSR1 or SIGTERM to any rank: all ranks save a checkpoint at the same step, and exit with status 75 (try again).
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

SUMMARY = "train the network of a configuration file"
PARALLEL = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job_arguments(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|DIR",
        help="go on from the newest whole checkpoint: of the run directory (auto), or of a run or checkpoint named",
    )
    parser.add_argument(
        "--checked",
        action="store_true",
        help="hold every operation and message to what it claims, and stop at the first that lies (slow, small runs)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="leave trace.json, one timeline of all ranks for Perfetto and hpcpar report (as --set run.trace=true)",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration file and its overrides, for all commands that take one."""
    parser.add_argument("job", metavar="JOB.toml", help="configuration file")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a key, for example --set mesh.depth=4 --set run.steps=100; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Load the configuration, train, and leave the pictures in the run directory; 75 after a request to stop."""
    from hpcpar.train.config import load_job

    job = load_job(args.job, [*args.overrides, *["run.trace=true"] * args.trace])

    from hpcpar.checks import checked
    from hpcpar.train.signals import EXIT_REQUEUE, Interrupted
    from hpcpar.train.trainer import train
    from hpcpar.transport import system

    try:
        with checked() if args.checked else nullcontext():
            train(job, args.resume)
    except Interrupted:
        return EXIT_REQUEUE
    if system.world()[0] == 0:
        _draw(job.run.dir)
    return 0


def _draw(run_dir: str) -> None:
    """Draw curves and slices; where matplotlib is missing, say how to get them later."""
    from hpcpar.train.plot import plot_run

    try:
        pictures = plot_run(run_dir)
    except ModuleNotFoundError as missing:
        print(f"no pictures: {missing}, then hpcpar plot {run_dir}")
        return
    print("pictures: " + ", ".join(map(str, pictures)))
