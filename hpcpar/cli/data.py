"""Make a data set: a built-in one, or one from texts.

Under mpiexec the ranks share the work; files that are there already are kept.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcpar.data.sharing import Sharing

SUMMARY = "make a data set: brain, cosmology, text"
PARALLEL = True

BRAIN = """The ICBM 152 T1 template (1 mm, in the nilearn package) with labels background, grey, white, other tissue.

There is one brain: training cells come from the left hemisphere, test cells from parts of the right one whose mirror
images are in no other set. Good scores show that training works, not that a network knows other brains.
"""
COSMOLOGY = """Universes with drawn Omega_m, sigma_8, n_s and H_0: particle counts at several redshifts, one file each.

The files are those of the public CosmoFlow sets in form (full, unitPar); structure comes from Lagrangian perturbation
theory to second order, and is the same for any number of ranks.
"""
TEXT = """Files of text as HDF5 files of tokens, parted into training, validation and test.

A document is a file, or what --split-at says; parts are made of whole documents, drawn by --seed. A single document is
cut by position: training, then validation, then test. Tokens are bytes, or those of a tokenizer.json.

Python's own library, and the King James Bible by chapters (Debian's packages bible-kjv and bible-kjv-text):

  hpcpar data text --from $(python -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])") --pattern "*.py" \\
      --exclude "*-packages/*"
  bible -f Gen1:1-Rev22:21 > kjv.txt && hpcpar data text --from kjv.txt --split-at "\\w+:1 " --out data/kjv
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
    _add_text(sets.add_parser("text", help="files of text as tokens", description=TEXT, formatter_class=shape))


def _add_text(text: argparse.ArgumentParser) -> None:
    text.add_argument("--from", dest="source", required=True, metavar="PATH", help="a file, or a folder with all in it")
    text.add_argument("--pattern", default="*", metavar="NAME", help="names of files in a folder (default *)")
    text.add_argument("--exclude", action="append", default=[], metavar="PATH", help="paths to leave out, with * and ?")
    text.add_argument("--split-at", metavar="REGEX", help="a document begins at each line that begins like this")
    text.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json (default: tokens are bytes)")
    text.add_argument("--end", metavar="TOKEN", help="its token for the end of a document (default: found by its name)")
    text.add_argument("--validation", type=float, default=0.05, metavar="SHARE", help="of the bytes (default 0.05)")
    text.add_argument("--test", type=float, default=0.05, metavar="SHARE", help="of the bytes (default 0.05)")
    text.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw of documents (default 0)")
    text.add_argument("--out", default="data/text", metavar="DIR", help="folder (default data/text)")
    text.set_defaults(make=make_text)


def run(args: argparse.Namespace) -> int:
    """Make the data set, each rank its part; rank 0 reports."""
    from hpcpar.data.sharing import ALONE, Sharing
    from hpcpar.transport import system

    rank, size = system.world()
    begin = time.monotonic()
    files = args.make(args, Sharing(rank, size, print if rank == 0 else ALONE.report, system.gather))
    system.gather(None)  # rank 0 speaks when the last file is there
    if rank == 0:
        folder = Path(files[0]).parent.parent
        print(f"{args.name}: {len(files)} files in {folder}, {time.monotonic() - begin:.1f} s on {size} rank(s)")
    return 0


def make_brain(args: argparse.Namespace, sharing: Sharing) -> list[Path]:
    """Call the maker of the brain data with the options given."""
    from hpcpar.data import brain

    return brain.make_brain(args.out, args.spacing, sharing)


def make_cosmology(args: argparse.Namespace, sharing: Sharing) -> list[Path]:
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
        sharing=sharing,
    )


def make_text(args: argparse.Namespace, sharing: Sharing) -> list[Path]:
    """Call the maker of texts with the options given."""
    from hpcpar.data import text

    return text.make_text(
        args.out,
        args.source,
        pattern=args.pattern,
        exclude=args.exclude,
        split_at=args.split_at,
        tokenizer=args.tokenizer,
        end=args.end,
        validation=args.validation,
        test=args.test,
        seed=args.seed,
        sharing=sharing,
    )
