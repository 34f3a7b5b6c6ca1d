"""Programs started under mpiexec: from a test (`mpi_run`) or from a shell (``python -m hpcpar.testing.launch N ARGS``).

The launcher flags and variables that each MPI needs on a small or containerised machine stand here and nowhere else.
"""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
OPEN_MPI = {
    "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores: an idle rank must not starve a busy one
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # two jobs at once would be bound to the same cores
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same two for Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # containers forbid it, and Open MPI 4 complains at length
    "OMPI_MCA_btl_base_warn_component_unused": "0",
}
OPEN_MPI_AS_ROOT = {} if os.geteuid() else {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI_SESSION = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")  # of Open MPI 5 and 4
# A process that is itself a rank carries these; a program it starts under mpiexec must not take them for its own.
_RANK_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "OMPI_COMM_", "PRTE_LAUNCHED", "PRTE_JOB", "MPI_LOCAL", "HYDI_", "HYDRA_")


class MpiTimeout(AssertionError):
    """A program under mpiexec did not end in time; the message holds what it wrote until then."""


@dataclass
class MpiRun:
    """The end of a program under mpiexec; a superset of `subprocess.CompletedProcess`.

    `results` maps ranks to what the function returned there; it is empty for scripts, and a rank that did not return
    is missing.
    """

    args: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    results: dict[int, Any] = field(default_factory=dict)

    def check(self) -> MpiRun:
        """Return the run itself, or raise AssertionError with all it wrote if its exit status is not 0."""
        if self.returncode:
            raise AssertionError(f"exit status {self.returncode}\n{self.transcript()}")
        return self

    def transcript(self) -> str:
        """Return command, standard output and standard error as one text."""
        return _transcript(self.args, self.stdout, self.stderr)


def mpi_run(
    ranks: int,
    program: str | Path | Sequence[str] | Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> MpiRun:
    """Run a program on `ranks` ranks with this interpreter and its MPI, and wait for its end.

    Parameters
    ----------
    ranks : int
        Number of ranks; more than there are cores is fine.
    program : str, Path, sequence of str or function
        A script, interpreter arguments (``["-m", "hpcpar", "info"]``), or a function defined at the top level of a
        file. A function is called on every rank, ends the job on all ranks when it raises, and its return values
        (picklable) come back in `MpiRun.results`.
    *args : Any
        Command-line arguments of a script; picklable positional arguments of a function.
    timeout : float
        Seconds after which the whole job is ended.
    env : mapping, optional
        Variables added to the environment. Thread counts are 1 unless given here.
    cwd : str or Path, optional
        Working directory.

    Raises
    ------
    MpiTimeout
        When the job does not end in time.
    RuntimeError
        When called by a rank of a larger job: most launchers refuse to nest. Without mpiexec: `FileNotFoundError`.
    """
    _refuse_nesting()
    with tempfile.TemporaryDirectory(prefix="hpcpar-run-") as folder:
        if callable(program):
            call = Path(folder, "call.pickle")
            call.write_bytes(pickle.dumps({**_origin(program), "args": args}))
            words = ["-m", "mpi4py", "-m", "hpcpar.testing.child", str(call)]
        else:
            words = [str(program)] if isinstance(program, (str, Path)) else [str(w) for w in program]
            words += [str(a) for a in args]
        command = launch_command(ranks, words)
        begin = time.monotonic()
        code, out, err = _wait(command, launch_environment(env, folder), cwd, timeout)
        seconds = time.monotonic() - begin
        results = {
            int(path.stem.rpartition("-")[2]): pickle.loads(path.read_bytes())
            for path in sorted(Path(folder).glob("returned-*.pickle"))
        }
    return MpiRun(command, code, out, err, seconds, results)


def launch_command(ranks: int, words: Sequence[str]) -> list[str]:
    """Return the mpiexec command that runs this interpreter with the arguments `words` on `ranks` ranks."""
    return [str(find_mpiexec()), "-n", str(ranks), sys.executable, *words]


def launch_environment(extra: Mapping[str, str] | None = None, session: str | Path | None = None) -> dict[str, str]:
    """Return the environment for `launch_command`: one thread a rank, more ranks than cores and root allowed.

    What the caller's environment or `extra` already sets is kept, except the caller's thread counts and, where the
    caller is a rank itself, what made it one.

    Parameters
    ----------
    extra : mapping, optional
        Variables added to the environment.
    session : str or Path, optional
        A new folder, for the launcher's own files. Open MPI names them by the launcher's process number in one place
        for all jobs, and refuses to start ("The PMIx server's listener thread failed") where an ended job of the same
        number left its files, as one that was killed does.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_PREFIXES)}
    if is_open_mpi():
        place = {} if session is None else dict.fromkeys(OPEN_MPI_SESSION, str(session))
        for name, value in (OPEN_MPI | OPEN_MPI_AS_ROOT | place).items():
            env.setdefault(name, value)
    env.update(ONE_THREAD)
    if not sys.stdout.isatty():
        env["NO_COLOR"] = "1"  # Open MPI gives each rank a terminal of its own, whoever reads in the end
    home = str(Path(__file__).resolve().parents[2])  # the package may be used from its source tree, not installed
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    if home not in paths:
        env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, paths)])
    env.update(extra or {})
    return env


@cache
def find_mpiexec() -> Path:
    """Return the mpiexec for this interpreter: ``$HPCPAR_MPIEXEC``, the environment's own, or the first on PATH.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    named = os.environ.get("HPCPAR_MPIEXEC")
    if named:
        return Path(named)
    beside = Path(sys.prefix, "bin", "mpiexec")
    if beside.exists():
        return beside
    found = shutil.which("mpiexec") or shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError(
            f"no mpiexec in {beside.parent} or on PATH: install MPI (pip install mpich) or name one in HPCPAR_MPIEXEC"
        )
    return Path(found)


@cache
def is_open_mpi() -> bool:
    """Say whether the mpiexec of this interpreter is Open MPI's, by what it says of itself."""
    said = subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True, timeout=30, check=False)
    return any(word in said.stdout + said.stderr for word in ("Open MPI", "OpenRTE", "prterun", "PRRTE"))


def _refuse_nesting() -> None:
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and module.COMM_WORLD.Get_size() > 1:
        raise RuntimeError("mpi_run needs a single process: mark the test with @pytest.mark.spawns_mpi")


def _origin(function: Callable[..., Any]) -> dict[str, str]:
    """Where the child finds `function` again: its file and its name in there."""
    name = getattr(function, "__qualname__", "")
    if not name or "<" in name:
        raise ValueError(f"mpi_run needs a function from the top level of a file, not {name or function!r}")
    return {"path": str(Path(inspect.getfile(function)).resolve()), "name": name}


def _wait(command: list[str], env: dict[str, str], cwd: str | Path | None, timeout: float) -> tuple[int, str, str]:
    job = subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = _end(job)
        text = _transcript(command, out, err)
        raise MpiTimeout(f"the job did not end within {timeout:g} s\n{text}") from None
    except BaseException:
        _end(job)
        raise
    return job.returncode, out, err


def _end(job: subprocess.Popen[str]) -> tuple[str, str]:
    """End mpiexec and, through it, its ranks; by force if it does not obey."""
    for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(job.pid, sign)
            return job.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return "", "(the ranks keep their pipes open; what they wrote is lost)"


def _transcript(command: Sequence[str], out: str, err: str) -> str:
    return f"$ {' '.join(command)}\n--- standard output\n{out}\n--- standard error\n{err}"


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process by mpiexec: ``python -m hpcpar.testing.launch 4 -m mpi4py -m pytest``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 2 or not words[0].isdigit():
        raise SystemExit("usage: python -m hpcpar.testing.launch RANKS INTERPRETER-ARGUMENTS...")
    command = launch_command(int(words[0]), words[1:])
    # unbuffered: what a rank wrote before it was ended must not be lost
    session = tempfile.mkdtemp(prefix="hpcpar-launch-") if is_open_mpi() else None
    os.execve(command[0], command, launch_environment({"PYTHONUNBUFFERED": "1"}, session))


if __name__ == "__main__":
    main()
