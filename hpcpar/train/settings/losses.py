"""[loss]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcpar.train.typed import number


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
