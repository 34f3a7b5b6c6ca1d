"""Scores of an evaluation: sums and counts over all ranks, divided at the end."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from hpcpar import functional as F
from hpcpar.tensors import Tensor
from hpcpar.transport.device import to_host


class Score(Protocol):
    """Figures of an evaluation: counts one batch after another."""

    def add(self, output: Tensor, target: Tensor, loss: float, count: float) -> None:
        """Count one batch with its loss, a mean over `count`. Collective."""
        ...

    def figures(self) -> dict[str, float]:
        """Return the figures of everything counted, by name."""
        ...


class Confusion:
    """Confusion matrix of a segmentation, and from it the Dice score of each class.

    Parameters
    ----------
    classes : int
    ignore_index : int
        Voxels with this label count nowhere.
    """

    def __init__(self, classes: int, ignore_index: int = -100) -> None:
        self.classes, self.ignore = classes, ignore_index
        self.counts = np.zeros((classes, classes), np.int64)  # [label, prediction]

    def add(self, output: Tensor, target: Tensor, loss: float = 0.0, count: float = 0.0) -> None:
        """Count one batch: logits (N, C, *spatial) and labels (N, *spatial). Collective, one message."""
        predicted = F.argmax(output, 1)
        labels = target.moved(predicted.sig)
        valid = labels != self.ignore
        joint = (labels * self.classes + predicted.shard)[valid]
        counts = np.bincount(to_host(joint).reshape(joint.size), minlength=self.classes**2).astype(np.int64)
        comm = predicted.mesh.comm(*predicted.sig.split_axes)
        self.counts += comm.all_reduce(counts).reshape(self.classes, self.classes)

    def figures(self) -> dict[str, float]:
        """Return ``dice`` (mean over the classes but background) and ``dice_<class>``; absent classes are left out."""
        hits, sums = np.diag(self.counts), self.counts.sum(axis=0) + self.counts.sum(axis=1)
        scores = {k: float(2 * hits[k] / sums[k]) for k in range(self.classes) if sums[k]}
        foreground = [score for k, score in scores.items() if k > 0]
        mean = {"dice": float(np.mean(foreground))} if foreground else {}
        return {**mean, **{f"dice_{k}": score for k, score in scores.items()}}


class Errors:
    """Mean squared and absolute error of each output."""

    def __init__(self) -> None:
        self.squared: np.ndarray | float = 0.0
        self.absolute: np.ndarray | float = 0.0
        self.count = 0

    def add(self, output: Tensor, target: Tensor, loss: float = 0.0, count: float = 0.0) -> None:
        """Count one batch of (N, outputs). Collective."""
        difference = output - target
        self.squared = self.squared + F.resolve(F.sum(difference * difference, 0)).numpy()
        self.absolute = self.absolute + F.resolve(F.sum(F.abs(difference), 0)).numpy()
        self.count += output.shape[0]

    def figures(self) -> dict[str, float]:
        """Return ``mse``, ``mae`` and ``mae_<output>``."""
        if not self.count:
            return {}
        mae = np.atleast_1d(self.absolute / self.count)
        each = {f"mae_{i}": float(v) for i, v in enumerate(mae)}
        return {"mse": float(np.mean(self.squared / self.count)), "mae": float(mae.mean()), **each}


class CodeLength:
    """How long a text is when it is told by the model's predictions.

    Parameters
    ----------
    raw_bytes : int
        Of everything that is counted.
    """

    def __init__(self, raw_bytes: int) -> None:
        self.raw_bytes, self.nats = raw_bytes, 0.0

    def add(self, output: Tensor, target: Tensor, loss: float, count: float) -> None:
        """Count one batch."""
        self.nats += loss * count

    def figures(self) -> dict[str, float]:
        """Return ``bits_per_byte``: all that was lost, the ends of documents included, over the bytes of the text."""
        return {"bits_per_byte": self.nats / math.log(2) / self.raw_bytes}
