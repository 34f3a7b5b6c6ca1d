"""[model]: one class a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpcpar.train.settings.layout import VOLUMES
from hpcpar.train.typed import number


@dataclass(frozen=True)
class UNet3d:
    """[model] name = "unet3d"."""

    layout_keys: ClassVar[tuple[str, ...]] = VOLUMES

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

    layout_keys: ClassVar[tuple[str, ...]] = VOLUMES

    name: Literal["cosmoflow"] = "cosmoflow"
    width: int = number(128, least=1)  # edge of the cube in voxels
    channels: int = number(4, least=1)  # redshifts
    outputs: int = number(4, least=1)  # cosmological parameters
    base: int = number(16, least=1)  # filters of the first convolution; all others are multiples
    norm_momentum: float = number(0.001, least=0.0, most=1.0)  # of the running statistics of batch norm
    batch_norm: bool = False
    norm_scope: Literal["rank", "sample", "all"] = "all"
    dropout: float = number(0.2, least=0.0, most=1.0)
