"""[layout]: which mesh axes split what, and how transformers use them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Axes = str | tuple[str, ...]

VOLUMES = ("batch", "channels", "depth", "height", "width")
TEXTS = ("batch", "channels", "sequence")
TRANSFORMER = ("sequence_parallel", "context", "order", "shard_weights")
"""Keys that a kind of model heeds: axes for volumes and for texts, and the options of a transformer for texts."""


@dataclass(frozen=True)
class InputLayout:
    """[layout]: the mesh axis, or axes, that split each dim; an axis the mesh has not splits nothing."""

    batch: Axes = "batch"
    channels: Axes = "model"  # of weights: for transformers heads, hidden layer and vocabulary
    depth: Axes = "depth"
    height: Axes = "height"
    width: Axes = "width"
    sequence: Axes = "sequence"
    sequence_parallel: bool = False  # between the split parts of a block, tokens are split by the channels' axes too
    context: Literal["auto", "ring", "all_to_all", "gather"] = "auto"  # how attention serves a split of the tokens
    order: Literal["natural", "zigzag"] = "natural"  # zigzag: equal work in causal attention for all who share a text
    shard_weights: bool = False  # weights are split by the batch's axes too, and gathered where they are used

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes named for `dim` as a tuple."""
        entry = getattr(self, dim)
        return (entry,) if isinstance(entry, str) and entry else tuple(entry)

    def changed(self) -> list[str]:
        """Return the keys that are not as by default."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
