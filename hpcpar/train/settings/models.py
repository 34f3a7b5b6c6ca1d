"""[model]: one class a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
class ViT3d:
    """[model] name = "vit3d"."""

    layout_keys: ClassVar[tuple[str, ...]] = (*VOLUMES, "context")

    name: Literal["vit3d"] = "vit3d"
    channels: int = number(1, least=1)  # of the input
    classes: int = number(2, least=2)
    width: int = number(192, least=1)  # channels of a token
    depth: int = number(6, least=1)  # blocks
    heads: int = number(6, least=1)
    patch: tuple[int, int, int] = field(default=(8, 8, 8), metadata={"least": 1})  # voxels of a token
    mlp_ratio: float = number(4.0, least=0.0)  # hidden channels in units of width
    positions: Literal["sincos", "learned"] = "sincos"
    size: tuple[int, ...] = field(default=(), metadata={"least": 1})  # (D, H, W) of the volumes, for learned positions
    refine: int = number(16, least=0)  # features of a voxel that a convolution refines; 0: none
    dropout: float = number(0.0, least=0.0, most=1.0)

    def __post_init__(self) -> None:
        _check_heads([self.width], [self.heads])
        if len(self.size) != (3 if self.positions == "learned" else 0):
            raise ValueError(f"size is [depth, height, width] with learned positions only, got {list(self.size)}")


@dataclass(frozen=True)
class Swin3d:
    """[model] name = "swin3d"."""

    layout_keys: ClassVar[tuple[str, ...]] = VOLUMES

    name: Literal["swin3d"] = "swin3d"
    channels: int = number(1, least=1)  # of the input
    classes: int = number(2, least=2)
    width: int = number(48, least=1)  # channels of a token of the first stage; doubled from stage to stage
    depths: tuple[int, ...] = field(default=(2, 2, 2), metadata={"least": 1})  # blocks of each stage
    heads: tuple[int, ...] = field(default=(3, 6, 12), metadata={"least": 1})
    window: tuple[int, int, int] = field(default=(7, 7, 7), metadata={"least": 1})  # tokens
    patch: tuple[int, int, int] = field(default=(2, 2, 2), metadata={"least": 1})  # voxels of a token
    mlp_ratio: float = number(4.0, least=0.0)  # hidden channels in units of width
    base: int = number(24, least=1)  # channels of the convolutions at full resolution
    batch_norm: bool = True
    norm_scope: Literal["rank", "sample", "all"] = "all"
    dropout: float = number(0.0, least=0.0, most=1.0)

    def __post_init__(self) -> None:
        if not self.depths or len(self.depths) != len(self.heads):
            raise ValueError(f"depths and heads have a number for each stage, got {self.depths} and {self.heads}")
        _check_heads([self.width << stage for stage in range(len(self.depths))], self.heads)


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


def _check_heads(widths: Sequence[int], heads: Sequence[int]) -> None:
    for width, count in zip(widths, heads, strict=True):
        if width % count:
            raise ValueError(f"{width} channels of a token do not divide into {count} heads")
