"""Losses as modules; the mean is over true counts of all ranks, and the result is a replicated scalar."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar import functional as F
from hpcpar.nn.module import Module
from hpcpar.tensors import Tensor


class CrossEntropyLoss(Module):
    """Cross entropy between logits (N, C, *spatial) and classes (N, *spatial); see `functional.cross_entropy`."""

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = weight if weight is None or isinstance(weight, Tensor) else np.asarray(weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, mask=mask
        )


class DiceLoss(Module):
    """One minus the mean soft Dice coefficient of probabilities (N, C, *spatial); see `functional.dice_loss`."""

    def __init__(
        self,
        smooth: float = 1e-5,
        ignore_index: int = -100,
        per_sample: bool = False,
        include_background: bool = True,
    ) -> None:
        super().__init__()
        self.smooth, self.ignore_index = smooth, ignore_index
        self.per_sample, self.include_background = per_sample, include_background

    def forward(self, probabilities: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.dice_loss(
            probabilities, target, self.smooth, self.ignore_index, mask, self.per_sample, self.include_background
        )


class _DifferenceLoss(Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction


class MSELoss(_DifferenceLoss):
    """The squared difference."""

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.mse_loss(input, target, self.reduction, mask)


class L1Loss(_DifferenceLoss):
    """The absolute difference."""

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.l1_loss(input, target, self.reduction, mask)
