"""[data]: where samples come from and what is done to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcpar.train.typed import number


@dataclass(frozen=True)
class Augment:
    """[data.augment]: applied to training samples only; all are off by default."""

    # spatial dims (0 depth, 1 height, 2 width) mirrored with probability 1/2; negative ones count from the last
    flip: tuple[int, ...] = field(default=(), metadata={"least": -3, "most": 2})
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
    input: str = ""  # name of the dataset of volumes (C, D, H, W), where it is none of these
    target: str = ""  # name of the dataset of labels (D, H, W), or of numbers (P,)
    batch: int = number(1, least=1)  # samples of one step over all ranks
    prefetch: int = number(2, least=0)  # batches read ahead
    log1p: bool = False  # the network sees log(1 + input): for counts, whose tail is long
    augment: Augment = field(default_factory=Augment)


@dataclass(frozen=True)
class Tokens:
    """[data] with format = "tokens": windows of the texts that ``hpcpar data text`` has made."""

    train: str | tuple[str, ...] = ()
    validation: str | tuple[str, ...] = ()
    test: str | tuple[str, ...] = ()
    format: Literal["tokens"] = "tokens"
    sequence: int = number(256, least=1)  # tokens of a window
    documents: bool = False  # no token sees another document
    restart_positions: bool = False  # positions begin anew with each document
    batch: int = number(1, least=1)  # windows of one step over all ranks
    prefetch: int = number(2, least=0)  # batches read ahead
