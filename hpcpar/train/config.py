"""The configuration of a training run: a tree of typed dataclasses, one for each table of the TOML file.

Every key is listed here with its default; an unknown key, a wrong type and a bad value are errors that name the key.
The tables `model`, `optim`, `schedule` and `loss` have variants: their key `name` chooses the class, and only that
variant's keys are accepted, so that a key that would have no effect is an error too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hpcpar.train import toml
from hpcpar.train.typed import ConfigError, read_table, write_table

__all__ = ["ConfigError", "Job", "dump_job", "load_job", "make_job"]

Axes = str | tuple[str, ...]


def number(default: float | int | None, least: float | None = None, most: float | None = None) -> Any:
    """Declare a key with a number (or a list of them), bounded."""
    bounds = {"least": least, "most": most}
    return field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


@dataclass(frozen=True)
class Run:
    """[run]: how long, from which seed, in which precision, where the results go.

    By default `compute_except` names the convolution of the input, where single voxels still count, and the U-Net's
    head, whose results are the logits; together they are a small part of the work. ``[]`` excepts none.
    """

    dir: str = "runs/run"
    steps: int | None = number(None, least=1)  # optimizer steps; or
    epochs: int | None = number(None, least=1)  # passes over the training data
    seed: int = number(0, least=0)
    dtype: Literal["float32", "float64"] = "float32"
    compute: Literal["float32", "bfloat16"] = "float32"  # what convolutions multiply; sums and results stay float32
    compute_except: tuple[str, ...] | None = None  # names of those that stay in float32, "*" as in a shell
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
        if self.compute == "bfloat16" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ValueError("compute = 'bfloat16' is for dtype = 'float32' on device = 'cpu'")
        if self.compute == "float32" and self.compute_except is not None:
            raise ValueError("compute_except has no effect without compute = 'bfloat16'")
        if self.trace_steps and (len(self.trace_steps) != 2 or self.trace_steps[0] > self.trace_steps[1]):
            raise ValueError(f"trace_steps is [first, last], got {list(self.trace_steps)}")


@dataclass(frozen=True)
class UNet3d:
    """[model] name = "unet3d"."""

    name: Literal["unet3d"] = "unet3d"
    channels: int = number(1, least=1)  # of the input
    classes: int = number(2, least=2)
    base: int = number(32, least=1)  # channels of the first convolution; doubled on each level
    levels: int = number(3, least=1)  # poolings
    batch_norm: bool = True
    norm_scope: Literal["rank", "sample", "all"] = "all"
    dropout: float = number(0.0, least=0.0, most=1.0)


@dataclass(frozen=True)
class CosmoFlow:
    """[model] name = "cosmoflow"."""

    name: Literal["cosmoflow"] = "cosmoflow"
    width: int = number(128, least=1)  # edge of the cube in voxels
    channels: int = number(4, least=1)  # redshifts
    outputs: int = number(4, least=1)  # cosmological parameters
    base: int = number(16, least=1)  # filters of the first convolution; all others are multiples
    norm_momentum: float = number(0.001, least=0.0, most=1.0)  # of the running statistics of batch norm
    batch_norm: bool = False
    norm_scope: Literal["rank", "sample", "all"] = "all"
    dropout: float = number(0.2, least=0.0, most=1.0)


@dataclass(frozen=True)
class Augment:
    """[data.augment]: applied to training samples only; all are off by default."""

    flip: tuple[int, ...] = ()  # spatial dims (0 depth, 1 height, 2 width) mirrored with probability 1/2
    swap: bool = False  # exchange spatial dims at random: cubes without a preferred direction
    scale: float = number(0.0, least=0.0)  # intensities times 1 +- scale
    shift: float = number(0.0, least=0.0)  # intensities plus +- shift
    gamma: float = number(0.0, least=0.0)  # intensities to a power between 1 / (1 + gamma) and 1 + gamma
    bias: float = number(0.0, least=0.0, most=0.99)  # strength of a smooth gain field
    noise: float = number(0.0, least=0.0)  # largest standard deviation of Gaussian noise


@dataclass(frozen=True)
class Data:
    """[data]: HDF5 files; each of train, validation and test is a folder, a file, or a list of files."""

    train: str | tuple[str, ...] = ()
    validation: str | tuple[str, ...] = ()
    test: str | tuple[str, ...] = ()
    # names in the files: universe full/unitPar, volume volume/segmentation, stacked x/y (all samples in one file)
    format: Literal["auto", "universe", "volume", "stacked"] = "auto"
    batch: int = number(1, least=1)  # samples of one step over all ranks
    prefetch: int = number(2, least=0)  # batches read ahead
    log1p: bool = False  # the network sees log(1 + input): for counts, whose tail is long
    augment: Augment = field(default_factory=Augment)


@dataclass(frozen=True)
class InputLayout:
    """[layout]: the mesh axis, or axes, that split each dim; an axis the mesh has not splits nothing."""

    batch: Axes = "batch"
    channels: Axes = "model"
    depth: Axes = "depth"
    height: Axes = "height"
    width: Axes = "width"

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes named for `dim` as a tuple."""
        entry = getattr(self, dim)
        return (entry,) if isinstance(entry, str) and entry else tuple(entry)


@dataclass(frozen=True)
class _Optimizer:
    lr: float = number(1e-3, least=0.0)
    weight_decay: float = number(0.0, least=0.0)
    clip: float = number(0.0, least=0.0)  # largest global norm of the gradient; 0: no clipping
    accumulate: int = number(1, least=1)  # batches whose gradients make one step


@dataclass(frozen=True)
class SGD(_Optimizer):
    """[optim] name = "sgd"."""

    name: Literal["sgd"] = "sgd"
    momentum: float = number(0.0, least=0.0, most=1.0)
    nesterov: bool = False


@dataclass(frozen=True)
class Adam(_Optimizer):
    """[optim] name = "adam"."""

    name: Literal["adam"] = "adam"
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"least": 0.0, "most": 1.0})
    eps: float = number(1e-8, least=0.0)


@dataclass(frozen=True)
class AdamW(_Optimizer):
    """[optim] name = "adamw": the weight decay is decoupled from the gradient."""

    name: Literal["adamw"] = "adamw"
    weight_decay: float = number(0.01, least=0.0)
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"least": 0.0, "most": 1.0})
    eps: float = number(1e-8, least=0.0)


@dataclass(frozen=True)
class _Schedule:
    warmup: int = number(0, least=0)  # steps of linear rise to the learning rate


@dataclass(frozen=True)
class Constant(_Schedule):
    """[schedule] name = "constant"."""

    name: Literal["constant"] = "constant"


@dataclass(frozen=True)
class Step(_Schedule):
    """[schedule] name = "step": times `factor` after each of `at`."""

    name: Literal["step"] = "step"
    at: tuple[int, ...] = field(default=(), metadata={"least": 1})
    factor: float = number(0.1, least=0.0)


@dataclass(frozen=True)
class Cosine(_Schedule):
    """[schedule] name = "cosine": half a cosine from the learning rate to `final` times it at the last step."""

    name: Literal["cosine"] = "cosine"
    final: float = number(0.0, least=0.0)


@dataclass(frozen=True)
class Polynomial(_Schedule):
    """[schedule] name = "polynomial": ``final + (1 - final) (1 - step / steps) ** power`` times the learning rate."""

    name: Literal["polynomial"] = "polynomial"
    power: float = number(1.0, least=0.0)
    final: float = number(0.0, least=0.0)


@dataclass(frozen=True)
class CrossEntropy:
    """[loss] name = "cross_entropy"."""

    name: Literal["cross_entropy"] = "cross_entropy"
    weights: tuple[float, ...] = field(default=(), metadata={"least": 0.0})  # one a class; none: all equal
    ignore_index: int = -100  # voxels with this label count nowhere


@dataclass(frozen=True)
class Dice:
    """[loss] name = "dice": soft Dice over the classes."""

    name: Literal["dice"] = "dice"
    ignore_index: int = -100


@dataclass(frozen=True)
class CrossEntropyDice:
    """[loss] name = "cross_entropy+dice": their sum, Dice times `dice`."""

    name: Literal["cross_entropy+dice"] = "cross_entropy+dice"
    weights: tuple[float, ...] = field(default=(), metadata={"least": 0.0})
    ignore_index: int = -100
    dice: float = number(1.0, least=0.0)


@dataclass(frozen=True)
class MSE:
    """[loss] name = "mse"."""

    name: Literal["mse"] = "mse"


@dataclass(frozen=True)
class L1:
    """[loss] name = "l1"."""

    name: Literal["l1"] = "l1"


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

    model: UNet3d | CosmoFlow
    loss: CrossEntropy | Dice | CrossEntropyDice | MSE | L1
    mesh: dict[str, int] = field(default_factory=lambda: {"batch": -1})
    run: Run = field(default_factory=Run)
    layout: InputLayout = field(default_factory=InputLayout)
    data: Data = field(default_factory=Data)
    optim: SGD | Adam | AdamW = field(default_factory=AdamW)
    schedule: Constant | Step | Cosine | Polynomial = field(default_factory=Constant)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def __post_init__(self) -> None:
        wrong = {axis: n for axis, n in self.mesh.items() if n < 1 and n != -1}
        if wrong or list(self.mesh.values()).count(-1) > 1:
            raise ValueError(f"mesh {self.mesh}: lengths are at least 1, and one of them may be -1 (what is left)")
        used = {axis for dim in fields(self.layout) for axis in self.layout.axes(dim.name)}
        idle = [axis for axis, n in self.mesh.items() if n != 1 and axis not in used]
        if idle:
            raise ValueError(
                f"mesh axis {', '.join(idle)} splits nothing: name it in [layout], or use {', '.join(sorted(used))}"
            )


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
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
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
