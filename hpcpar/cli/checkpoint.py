"""Look at checkpoints, verify them, and exchange weights as .safetensors.

PATH is one checkpoint, a folder of checkpoints, or a run directory; of several the newest is meant, and by verify all.
"""

from __future__ import annotations

import argparse
import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcpar.checkpoint.reading import Checkpoint

SUMMARY = "show, verify, export and import checkpoints"
PARALLEL = False

EXIT_DAMAGED = 1
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the four actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="what a checkpoint holds")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--configuration", action="store_true", help="print the configuration it was made with, as TOML")
    show.set_defaults(action=_show)

    verify = actions.add_parser("verify", help="read every byte and compare checksums; status 1 if any is damaged")
    verify.add_argument("path", metavar="PATH")
    verify.set_defaults(action=_verify)

    export = actions.add_parser("export", help="weights to .safetensors, names and shapes as in torch")
    export.add_argument("path", metavar="PATH")
    export.add_argument("out", metavar="OUT", help="FILE.safetensors, or a folder with --shard-size")
    export.add_argument("--shard-size", type=_bytes, metavar="SIZE", help="several files of at most this, as in 5GB")
    export.set_defaults(action=_export)

    import_ = actions.add_parser("import", help="weights from .safetensors, for hpcpar train --resume DIR")
    import_.add_argument("source", metavar="FILE", help="a .safetensors file, or a folder of several with their index")
    import_.add_argument("folder", metavar="DIR", help="folder of checkpoints to add to")
    import_.set_defaults(action=_import)


def run(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    return args.action(args)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([kmg]?b?)", text.lower())
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _paths(path: Path) -> list[Path]:
    """All checkpoints that a path means, the newest first."""
    from hpcpar.checkpoint.folder import candidates
    from hpcpar.checkpoint.manifest import CheckpointError

    found = candidates(path)
    if not found:
        raise CheckpointError(f"{path}: there is no checkpoint in it")
    return found


def _show(args: argparse.Namespace) -> int:
    from hpcpar.checkpoint.reading import Checkpoint

    checkpoint = Checkpoint(_paths(Path(args.path))[0])
    if args.configuration:
        print(checkpoint.state.get("configuration", ""), end="")
        return 0
    for line in describe(checkpoint):
        print(line)
    return 0


def describe(checkpoint: Checkpoint) -> list[str]:
    """Return lines about a checkpoint: where training stands, and a table of the arrays."""
    state, files = checkpoint.state, checkpoint.manifest.files
    lines = [f"{checkpoint.path}", f"  step       {checkpoint.step}"]
    if "position" in state:
        position = state["position"]
        mesh = " ".join(f"{axis}={n}" for axis, n in state["mesh"].items())
        lines += [
            f"  samples    {state['samples']} (epoch {position['epoch']}, {position['sample']} of "
            f"{state['data']['samples']})",
            f"  optimizer  {state['optimizer']['kind']}, {state['optimizer']['steps']} steps",
            f"  random     seed {state['random']['seed']}, {state['random']['stream']} streams used",
            f"  mesh       {mesh}",
            f"  versions   {', '.join(f'{name} {version}' for name, version in state['versions'].items())}",
        ]
    lines.append(f"  files      {len(files)}, {checkpoint.manifest.nbytes:,} bytes")
    width = max((len(name) for name in checkpoint.arrays), default=0)
    for name, array in checkpoint.arrays.items():
        shape = " x ".join(map(str, array.shown)) or "number"
        lines.append(
            f"  {name:<{width}}  {shape:<20} {array.dtype!s:<8} {prod(array.shape) * array.dtype.itemsize:>14,}"
        )
    return lines


def _verify(args: argparse.Namespace) -> int:
    from hpcpar.checkpoint.manifest import CheckpointError
    from hpcpar.checkpoint.reading import Checkpoint

    damaged = 0
    for path in _paths(Path(args.path)):
        try:
            checkpoint = Checkpoint(path)
            checkpoint.verify()
        except (CheckpointError, OSError) as error:
            damaged += 1
            print(f"{path}: DAMAGED: {error}")
        else:
            print(f"{path}: whole, {checkpoint.manifest.nbytes:,} bytes in {len(checkpoint.manifest.files)} files")
    return EXIT_DAMAGED if damaged else 0


def _export(args: argparse.Namespace) -> int:
    from hpcpar.checkpoint.reading import Checkpoint
    from hpcpar.checkpoint.safetensors import export_weights

    checkpoint = Checkpoint(_paths(Path(args.path))[0])
    checkpoint.verify()
    for path in export_weights(checkpoint, args.out, args.shard_size):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0


def _import(args: argparse.Namespace) -> int:
    from hpcpar.checkpoint.safetensors import import_weights

    print(f"{import_weights(args.source, args.folder)}: for hpcpar train --resume {args.folder}")
    return 0
