"""The configuration of a training run: a tree of typed dataclasses, one for each table of the TOML file.

Every key is listed here with its default; an unknown key, a wrong type and a bad value are errors that name the key.
The tables `model`, `optim`, `schedule` and `loss` have variants: their key `name` chooses the class, and only that
variant's keys are accepted, so that a key that would have no effect is an error too; so has `data` by its key `format`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcpar.names import did_you_mean, nearest
from hpcpar.train import toml
from hpcpar.train.settings.data import Data, Tokens
from hpcpar.train.settings.decoders import GPT, Llama
from hpcpar.train.settings.layout import TEXTS, VOLUMES, InputLayout
from hpcpar.train.settings.losses import L1, MSE, CrossEntropy, CrossEntropyDice, Dice
from hpcpar.train.settings.models import CosmoFlow, Swin3d, UNet3d, ViT3d
from hpcpar.train.settings.optim import SGD, Adam, AdamW, Constant, Cosine, Polynomial, Step
from hpcpar.train.typed import ConfigError, number, read_table, write_table

__all__ = ["ConfigError", "Job", "dump_job", "load_job", "make_job"]


@dataclass(frozen=True)
class Run:
    """[run]: how long, from which seed, in which precision, where the results go.

    By default `compute_except` names the convolution of the input, where single voxels still count, and the head of a
    segmentation, whose results are the logits; together they are a small part of the work. ``[]`` excepts none. With
    float16, for decoders, losses are scaled (`hpcpar.optim.GradScaler`).
    """

    dir: str = "runs/run"
    steps: int | None = number(None, least=1)  # optimizer steps; or
    epochs: int | None = number(None, least=1)  # passes over the training data
    seed: int = number(0, least=0)
    dtype: Literal["float32", "float64"] = "float32"
    compute: Literal["float32", "bfloat16", "float16"] = "float32"  # what layers multiply; all else stays float32
    compute_except: tuple[str, ...] | None = None  # names of those that stay in float32, "*" as in a shell
    recompute: str | None = None  # modules that backward runs again, "*" as in a shell: less memory, more work
    recompute_ops: tuple[str, ...] = ()  # only results of these operations in them, or anywhere, are made again
    device: Literal["cpu", "gpu"] = "cpu"
    log_every: int = number(10, least=1)  # steps between records of metrics.jsonl
    validate_every: int = number(0, least=0)  # steps between validations; 0: after the last step only
    watchdog: float = number(1800.0, least=0.0)  # seconds without progress after which a run is ended; 0: never
    trace: bool = False  # leave trace.json, one timeline of all ranks
    trace_steps: tuple[int, ...] = field(default=(), metadata={"least": 1})  # first and last step of it; none: all
    trace_events: int = number(100_000, least=1000)  # a rank keeps so many spans, the latest
    tensorboard: bool = False  # leave the metrics as TensorBoard event files too

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both given; which one ends the run?")
        if self.compute != "float32" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ValueError(f"compute = {self.compute!r} is for dtype = 'float32' on device = 'cpu'")
        if self.compute == "float32" and self.compute_except is not None:
            raise ValueError("compute_except has no effect without compute = 'bfloat16' or 'float16'")
        if self.trace_steps and (len(self.trace_steps) != 2 or self.trace_steps[0] > self.trace_steps[1]):
            raise ValueError(f"trace_steps is [first, last], got {list(self.trace_steps)}")


@dataclass(frozen=True)
class Checkpoint:
    """[checkpoint]: everything that is needed to go on, in the folder ``checkpoints`` of the run directory."""

    every: int = number(0, least=0)  # steps between checkpoints, and one after the last; 0: when asked by a signal only
    keep: int = number(3, least=1)  # so many stay
    async_: bool = field(default=False, metadata={"key": "async"})  # write in the background while training goes on
    one_file: bool = False  # all ranks into one file, with an h5py built with MPI; else each rank into its own

    def __post_init__(self) -> None:
        if self.async_ and self.one_file:
            raise ValueError("async and one_file exclude each other: ranks write one file together, and wait for it")


@dataclass(frozen=True)
class Job:
    """The whole configuration. Keys written ``mesh.<axis>`` are free: the axes of the mesh and their lengths."""

    model: UNet3d | ViT3d | Swin3d | CosmoFlow | GPT | Llama
    loss: CrossEntropy | Dice | CrossEntropyDice | MSE | L1
    mesh: dict[str, int] = field(default_factory=lambda: {"batch": -1})
    run: Run = field(default_factory=Run)
    layout: InputLayout = field(default_factory=InputLayout)
    data: Data | Tokens = field(default_factory=Data)
    optim: SGD | Adam | AdamW = field(default_factory=AdamW)
    schedule: Constant | Step | Cosine | Polynomial = field(default_factory=Constant)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def __post_init__(self) -> None:
        wrong = {axis: n for axis, n in self.mesh.items() if n < 1 and n != -1}
        if wrong or list(self.mesh.values()).count(-1) > 1:
            raise ValueError(f"mesh {self.mesh}: lengths are at least 1, and one of them may be -1 (what is left)")
        heeded = self.model.layout_keys
        vain = [key for key in self.layout.changed() if key not in heeded]
        if vain:
            raise ValueError(f"layout.{', layout.'.join(vain)} has no effect on model.name = {self.model.name!r}")
        self._check_names(heeded)
        used = {axis for dim in (*VOLUMES, *TEXTS) if dim in heeded for axis in self.layout.axes(dim)}
        idle = [axis for axis, n in self.mesh.items() if n != 1 and axis not in used]
        if idle:
            raise ValueError(
                f"mesh axis {', '.join(idle)} splits nothing: name it in [layout], or use {', '.join(sorted(used))}"
            )
        self._check_text()

    def _check_names(self, heeded: Iterable[str]) -> None:
        """An axis that the mesh lacks splits nothing if it is one of the usual; any other name is a slip."""
        usual = {axis for dim in (*VOLUMES, *TEXTS) for axis in InputLayout().axes(dim)}
        for dim in (*VOLUMES, *TEXTS):
            for axis in self.layout.axes(dim) if dim in heeded else ():
                if axis not in self.mesh and axis not in usual:
                    hint = did_you_mean(nearest(axis, sorted({*self.mesh, *usual})))
                    raise ValueError(f"layout.{dim} names the axis {axis!r}, [mesh] has {', '.join(self.mesh)}{hint}")

    def _check_text(self) -> None:
        text = isinstance(self.model, GPT | Llama)
        if text != isinstance(self.data, Tokens):
            needed = "" if text else "not "
            raise ValueError(f"model.name = {self.model.name!r} is {needed}for data.format = 'tokens'")
        if text and (not isinstance(self.loss, CrossEntropy) or self.loss.weights):
            raise ValueError(f"model.name = {self.model.name!r} is for loss.name = 'cross_entropy', without weights")


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> Job:
    """Read a TOML file and apply ``a.b=value`` overrides, later ones over earlier ones.

    Raises
    ------
    ConfigError
        The file is no TOML, an override has no ``=``, or anything `make_job` finds.
    FileNotFoundError
        There is no such file.
    """
    path = Path(path)
    try:
        table = toml.loads(path.read_text(encoding="utf-8"))
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no TOML: {error}") from None
    sources = {}
    for override in overrides:
        sources[_override(table, override)] = f"--set {override}"
    return make_job(table, str(path), sources)


def make_job(
    table: Mapping[str, Any], source: str = "configuration", overrides: Mapping[str, str] | None = None
) -> Job:
    """Turn nested tables into a Job.

    Parameters
    ----------
    table : mapping
        As read from TOML.
    source : str
        Where it comes from, named in errors.
    overrides : mapping, optional
        From dotted keys to the source of those that come from elsewhere.

    Raises
    ------
    ConfigError
        With one line for each thing that is wrong.
    """
    elsewhere = overrides or {}
    return read_table(Job, table, lambda key: elsewhere.get(key, source))


def dump_job(job: Job) -> str:
    """Return the whole configuration, defaults included, as TOML that `load_job` reads back to an equal Job."""
    return toml.dumps(write_table(job))


def _override(table: dict[str, Any], text: str) -> str:
    """Put one ``a.b=value`` into nested tables; returns ``a.b``."""
    key, sign, value = text.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not sign or not all(parts):
        raise ConfigError(f"--set {text}: expected key=value, for example --set run.steps=100")
    for depth, part in enumerate(parts[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {'.'.join(parts[:depth])} is a value, not a table")
    try:
        table[parts[-1]] = toml.loads_value(value.strip())
    except ValueError:
        raise ConfigError(f'--set {text}: {value!r} is no TOML value (numbers, true, "text", [1, 2])') from None
    return key
