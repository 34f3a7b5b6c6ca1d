"""[optim] and [schedule]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcpar.train.typed import number


@dataclass(frozen=True)
class _Optimizer:
    lr: float = number(1e-3, least=0.0)
    weight_decay: float = number(0.0, least=0.0)
    clip: float = number(0.0, least=0.0)  # largest global norm of the gradient; 0: no clipping
    accumulate: int = number(1, least=1)  # batches whose gradients make one step
    decay: Literal["all", "matrices"] = "all"  # what weight decay is for; matrices: no norms, no biases


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
