"""Make one of the built-in data sets. Under mpiexec the ranks share the work; files that are there already are kept."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

SUMMARY = "make a built-in data set: brain, cosmology"
PARALLEL = True

BRAIN = """The ICBM 152 T1 template (1 mm, in the nilearn package) with labels background, grey, white, other tissue.

There is one brain: training cells come from the left hemisphere, test cells from parts of the right one whose mirror
images are in no other set. Good scores show that training works, not that a network knows other brains.
"""
COSMOLOGY = """Universes with drawn Omega_m, sigma_8, n_s and H_0: particle counts at several redshifts, one file each.

The files are those of the public CosmoFlow sets in form (full, unitPar); structure comes from Lagrangian perturbation
theory to second order, and is the same for any number of ranks.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the data sets and their options."""
    sets = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    shape = argparse.RawDescriptionHelpFormatter
    brain = sets.add_parser("brain", help="a T1 volume and its tissues", description=BRAIN, formatter_class=shape)
    brain.add_argument("--spacing", type=int, choices=(1, 2), default=1, help="voxel size in mm (default 1)")
    brain.add_argument("--out", default="data/brain", metavar="DIR", help="folder (default data/brain)")
    brain.set_defaults(make=make_brain)

    cosmology = sets.add_parser("cosmology", help="simulated universes", description=COSMOLOGY, formatter_class=shape)
    cosmology.add_argument("--universes", type=int, default=64, metavar="N", help="how many (default 64)")
    cosmology.add_argument("--width", type=int, default=64, metavar="N", help="voxels per edge (default 64)")
    cosmology.add_argument("--redshifts", type=int, default=4, metavar="N", help="channels, 1 to 4 (default 4)")
    cosmology.add_argument("--particles", type=int, default=1, metavar="N", help="per voxel edge (default 1)")
    cosmology.add_argument("--box", type=float, metavar="MPC", help="edge in Mpc/h (default 2 times the width)")
    cosmology.add_argument("--seed", type=int, default=0, metavar="N")
    cosmology.add_argument("--out", metavar="DIR", help="folder (default data/cosmology-WIDTH)")
    cosmology.set_defaults(make=make_cosmology)


def run(args: argparse.Namespace) -> int:
    """Make the data set, each rank its part; rank 0 reports."""
    from hpcpar.transport import system

    rank, size = system.world()
    begin = time.monotonic()
    files = args.make(args, rank, size, print if rank == 0 else lambda line: None)
    system.gather(None)  # rank 0 speaks when the last file is there
    if rank == 0:
        folder = Path(files[0]).parent.parent
        print(f"{args.name}: {len(files)} files in {folder}, {time.monotonic() - begin:.1f} s on {size} rank(s)")
    return 0


def make_brain(args: argparse.Namespace, rank: int, size: int, report: Callable[[str], None]) -> list[Path]:
    """Call the maker of the brain data with the options given."""
    from hpcpar.data import brain

    return brain.make_brain(args.out, args.spacing, rank, size, report)


def make_cosmology(args: argparse.Namespace, rank: int, size: int, report: Callable[[str], None]) -> list[Path]:
    """Call the maker of the cosmology data with the options given."""
    from hpcpar.data import cosmology

    return cosmology.make_cosmology(
        args.out or f"data/cosmology-{args.width}",
        universes=args.universes,
        width=args.width,
        seed=args.seed,
        box=args.box,
        redshifts=args.redshifts,
        particles=args.particles,
        rank=rank,
        size=size,
        report=report,
    )
