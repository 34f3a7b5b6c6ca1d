"""Job scripts for batch systems, made from templates that a computing centre can adapt."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hpcpar.names import nearest
from hpcpar.train.signals import EXIT_REQUEUE

SCHEDULERS = {"slurm": ("sbatch",), "pbs": ("qsub",), "flux": ("flux", "batch")}  # and how they take a script
_PLACE = re.compile(r"@(\w+)@")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Value = str | int | None | Sequence[str]


class ScriptError(ValueError):
    """A request or a template that makes no job script."""


@dataclass(frozen=True)
class Request:
    """What is asked of a batch system; None leaves it to the centre's default.

    Attributes
    ----------
    job : str
        Configuration file, for the name of the job and for people.
    command : sequence of str
        What every rank runs.
    launcher : str
        What starts `command` on all ranks; shell text.
    directory, output : Path
        Where the job runs; beginning of the names of its logs.
    script : Path
        Where the script will lie.
    nodes, ranks_per_node : int
    cores_per_rank, gpus_per_node : int, optional
    seconds : int
        Time limit.
    margin : int
        Seconds before the limit at which the ranks are told to save.
    restarts : int
        How often the job may put itself back into the queue.
    chain : int, optional
        Elements of a Slurm array that go on from each other, instead of requeues.
    partition, account : str, optional
        Also known as queue and as project or bank.
    options, setup : sequence of str
        Further options of the batch system; shell lines before the launch, such as ``module load``.
    """

    job: str
    command: Sequence[str]
    launcher: str
    directory: Path
    output: Path
    script: Path
    nodes: int = 1
    ranks_per_node: int = 1
    cores_per_rank: int | None = None
    gpus_per_node: int | None = None
    seconds: int = 3600
    margin: int = 300
    restarts: int = 100
    chain: int | None = None
    partition: str | None = None
    account: str | None = None
    options: Sequence[str] = ()
    setup: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cores_per_rank", "gpus_per_node", "chain"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ScriptError(f"{name.replace('_', ' ')}: {number}; at least 1 is needed")
        if not 0 <= self.margin < self.seconds:
            raise ScriptError(
                f"the ranks are to be told {self.margin} s before a limit of {self.seconds} s; no time is left to train"
            )

    def values(self) -> dict[str, Value]:
        """Return what a template may name, without `template`."""
        threads = self.cores_per_rank or 1
        cores = self.ranks_per_node * threads
        select = f"{self.nodes}:ncpus={cores}:mpiprocs={self.ranks_per_node}:ompthreads={threads}"
        return {
            "job": self.job,
            "name": re.sub(r"[^A-Za-z0-9_.-]", "-", Path(self.job).stem),
            "command": shlex.join(self.command),
            "launcher": self.launcher,
            "directory": shlex.quote(str(self.directory)),
            "log": shlex.quote(str(self.output)),
            "script": shlex.quote(str(self.script)),
            "nodes": self.nodes,
            "ranks": self.nodes * self.ranks_per_node,
            "ranks_per_node": self.ranks_per_node,
            "cores_per_rank": self.cores_per_rank,
            "gpus_per_node": self.gpus_per_node,
            "select": select + (f":ngpus={self.gpus_per_node}" if self.gpus_per_node else ""),
            "time": clock(self.seconds),
            "minutes": -(-self.seconds // 60),
            "margin": self.margin,
            "seconds_to_margin": self.seconds - self.margin,
            "restarts": self.restarts,
            "requeue_status": EXIT_REQUEUE,
            "chain": self.chain,
            "partition": self.partition,
            "account": self.account,
            "option": self.options,
            "setup": self.setup,
        }


def write_script(request: Request, scheduler: str, template: str | Path | None = None) -> str:
    """Return the text of the job script.

    Parameters
    ----------
    request : Request
    scheduler : {"slurm", "pbs", "flux"}
        Whose template is taken, if `template` is not given.
    template : str or Path, optional
        A file like those in ``hpcpar/launch/templates``.

    Raises
    ------
    ScriptError
        The template names something that there is not.
    OSError
        The template cannot be read.
    """
    if template is None:
        text = resources.files("hpcpar.launch").joinpath(f"templates/{scheduler}.sh").read_text(encoding="utf-8")
    else:
        text = Path(template).read_text(encoding="utf-8")
    shown = str(template) if template else scheduler
    return fill(text, {**request.values(), "template": shown}, shown)


def fill(text: str, values: Mapping[str, Value], source: str = "template") -> str:
    """Return a template with every ``@name@`` replaced.

    A line that names a value that is None, or an empty list, is left out; a line that names a list is repeated for
    each entry of it.

    Raises
    ------
    ScriptError
        A name is not in `values`; says the line of `source`, and the nearest name.
    """
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        names = _PLACE.findall(line)
        for name in names:
            if name not in values:
                near = nearest(name, values)
                hint = f"did you mean @{near}@?" if near else f"there are {', '.join(sorted(values))}"
                raise ScriptError(f"{source}, line {number}: nothing is called @{name}@; {hint}")
        chosen = {name: values[name] for name in names}
        lists = [name for name, value in chosen.items() if isinstance(value, Sequence) and not isinstance(value, str)]
        if len(lists) > 1:
            raise ScriptError(f"{source}, line {number}: {' and '.join(lists)} are lists; a line may name one")
        if None in chosen.values():
            continue
        for entry in chosen[lists[0]] if lists else [None]:
            now = {**chosen, lists[0]: entry} if lists else chosen
            lines.append(_PLACE.sub(lambda match, now=now: str(now[match[1]]), line))
    return "\n".join(lines) + "\n"


def seconds(text: str) -> int:
    """Return a time in seconds: ``90m``, ``2h``, ``1d``, ``30s``, ``1:30:00``, ``2-12:00:00``; a number is minutes.

    Raises
    ------
    ScriptError
        For anything else, also for ``1:30``, which may be hours or minutes.
    """
    if match := re.fullmatch(r"(\d+)([smhd]?)", text):
        return int(match[1]) * _UNITS[match[2] or "m"]
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    raise ScriptError(f"{text!r} is no time; right would be 90m, 2h, 1:30:00 or 2-12:00:00")


def clock(time: int) -> str:
    """Return seconds as ``hh:mm:ss``, as all batch systems take it."""
    return f"{time // 3600:02}:{time // 60 % 60:02}:{time % 60:02}"
