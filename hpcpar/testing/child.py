"""One rank of `mpi_run` with a function: finds the function by file and name, calls it, leaves its value in a file."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from functools import reduce
from pathlib import Path


def main(call_file: Path) -> None:
    """Call the function that `call_file` names and pickle what it returns next to that file."""
    call = pickle.loads(call_file.read_bytes())
    spec = importlib.util.spec_from_file_location("mpi_run_program", call["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    value = reduce(getattr, call["name"].split("."), module)(*call["args"])

    from mpi4py import MPI  # only now: the function may be about what happens before MPI starts

    rank = MPI.COMM_WORLD.Get_rank()
    call_file.with_name(f"returned-{rank}.pickle").write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
