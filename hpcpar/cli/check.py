"""Check operations on this machine and mesh: random cases against one process, as a table of operations by layouts.

Run it as the training will run, after an installation or on a new machine, for example mpiexec -n 8 hpcpar check.
"""

from __future__ import annotations

import argparse
import sys

SUMMARY = "check operations under random layouts on these ranks, and print a table"
PARALLEL = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--cases", type=int, default=400, help="how many random cases (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="where the random numbers start")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families of operations to draw from")
    parser.add_argument(
        "--mesh", nargs="+", metavar="AXIS=LENGTH", help="lengths of the axes, e.g. batch=2 depth=4; random by default"
    )
    parser.add_argument(
        "--oracle", choices=("torch", "serial"),
        help="what to compare with: torch, or this package on one rank with its plain kernels (default: torch if it is "
        "installed)",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print the table as a Markdown page")


def run(args: argparse.Namespace) -> int:
    """Check on all ranks; rank 0 prints. Returns 1 if a case failed."""
    from hpcpar.cli.ending import UsageError
    from hpcpar.testing.case_table import as_markdown, as_text
    from hpcpar.testing.spatial_cases import run_spatial_cases
    from hpcpar.testing.spatial_draws import FAMILIES
    from hpcpar.testing.twins import default_oracle
    from hpcpar.transport import system

    rank, ranks = system.world()
    unknown = [name for name in args.only or () if name not in FAMILIES]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: the families are {', '.join(FAMILIES)}")
    mesh = parse_mesh(args.mesh, ranks) if args.mesh else None
    oracle = args.oracle or default_oracle()
    names = args.only or [name for name, family in FAMILIES.items() for _ in range(round(2 * family.weight))]
    tally = run_spatial_cases(args.cases, args.seed, names, oracle, report=_tell, mesh=mesh)
    if rank == 0:
        name = {"torch": "torch", "serial": "this package with plain kernels"}[oracle]
        if args.markdown:
            words = ["mpiexec -n", str(ranks), "hpcpar check --cases", str(args.cases), "--markdown"]
            print(as_markdown(tally, ranks, name, " ".join(words)))
        else:
            print(as_text(tally))
            counts = {outcome: tally.total(outcome) for outcome in ("pass", "refused", "FAIL", "rejected")}
            print(
                f"\n{ranks} rank{'s' * (ranks != 1)}, compared with {name} on one process: {counts['pass']} passed, "
                f"{counts['refused']} refused with a LayoutError, {counts['FAIL']} failed "
                f"({counts['rejected']} draws were not valid arguments)"
            )
    return 1 if tally.failures else 0


def _tell(text: str) -> None:
    sys.stderr.write(f"hpcpar: a case failed; alone:\n{text}\n")


def parse_mesh(words: list[str], ranks: int) -> dict[str, int]:
    """Return the lengths that AXIS=LENGTH words give; they multiply to the number of ranks.

    Raises
    ------
    UsageError
        A word is of another form, or the product is another number.
    """
    from math import prod

    from hpcpar.cli.ending import UsageError

    mesh = {}
    for word in words:
        axis, equals, length = word.partition("=")
        if not equals or not length.isdigit() or int(length) < 1 or not axis.isidentifier():
            raise UsageError(f"--mesh {word}: expected AXIS=LENGTH, for example depth=4")
        mesh[axis] = int(length)
    if prod(mesh.values()) != ranks:
        product = prod(mesh.values())
        raise UsageError(f"--mesh {' '.join(words)}: the lengths multiply to {product}, there are {ranks} ranks")
    return mesh
