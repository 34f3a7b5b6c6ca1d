"""Entry of the command ``hpcpar``: finds the subcommand, runs it, and ends all ranks alike when it fails.

A subcommand is a module with `SUMMARY` (one line for ``--help``), `PARALLEL` (whether it is a job of all ranks; else
rank 0 does it alone), ``add_arguments(parser)`` and ``run(args)``, which returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

from hpcpar.cli import ending, findings
from hpcpar.launch.environment import set_threads
from hpcpar.launch.process import lost_ranks, this_process
from hpcpar.train.signals import held_back
from hpcpar.version import __version__

COMMANDS = ("train", "generate", "checkpoint", "submit", "data", "summary", "plot", "report", "info", "check", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 0 done, 2 something the user can mend, 130 interrupted.

    Without `argv` it takes the words of the process, which is to end with this call.

    A mistake of the user (configuration, files, mesh, memory, a missing package) is one message on standard error, from
    rank 0. Anything else is a failure of the program: a traceback, and the end of all ranks.
    """
    args = None
    set_threads()  # before anything loads NumPy: thread pools are made once
    try:
        args = _parser().parse_args(argv)
        if not args.command.PARALLEL:
            if ending.launched_rank() > 0:
                return 0
            _leave_mpi_unstarted()
        with held_back(for_good=argv is None) if args.command.__name__ == "hpcpar.cli.train" else nullcontext():
            if args.command.PARALLEL:
                _start_mpi(for_work=args.command.__name__ != "hpcpar.cli.info")  # which itself says what is amiss
            return args.command.run(args)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        return 0
    except ending.USER_ERRORS as error:
        return ending.user_error(error, parallel=args is None or args.command.PARALLEL)
    except KeyboardInterrupt:
        return 130


def _leave_mpi_unstarted() -> None:
    """Let what rank 0 does alone import MPI without starting it: starting waits for all ranks, and the others left."""
    if this_process().size > 1:
        os.environ["MPI4PY_RC_INITIALIZE"] = "false"  # what mpi4py reads when it is imported


def _start_mpi(for_work: bool) -> None:
    """Load MPI; for work, see that the ranks found each other and have the cores they need.

    N processes that each take themselves for the whole job would all write the same files.
    """
    try:
        from hpcpar.transport import failure, system
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"MPI cannot be loaded: {error}. Install a library for it (pip install 'hpcpar[mpich]'), or load your "
            "computing centre's MPI module"
        ) from error
    failure.install_excepthook()
    if not for_work:
        return
    if problem := lost_ranks(system.world()[1], os.environ):
        raise ending.UsageError(problem)
    ranks = system.gather_rank_facts()
    if system.world()[0] == 0:
        for line in findings.warnings(ranks, os.environ):
            sys.stderr.write(f"hpcpar: warning: {line}\n")


class _Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only, and leaves ending the job to `main`."""

    def error(self, message: str) -> NoReturn:
        raise ending.UsageError(f"{message}\n{self.format_usage().strip()}")

    def _print_message(self, message: str, file: Any = None) -> None:
        if ending.launched_rank() == 0:
            super()._print_message(message, file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hpcpar", description="Training over batch, domain and model axes, on any number of ranks.")
    parser.add_argument("--version", action="version", version=f"hpcpar {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"hpcpar.cli.{name}")
        shape = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__, formatter_class=shape)
        module.add_arguments(sub)
        sub.set_defaults(command=module)
    return parser


if __name__ == "__main__":
    sys.exit(main())
