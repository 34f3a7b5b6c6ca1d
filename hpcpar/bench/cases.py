"""The training steps that are measured, described so that any library can run them: networks, sizes, data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Case:
    """One training step: forward, loss, backward, AdamW.

    Attributes
    ----------
    network : {"cosmoflow", "unet3d"}
        CosmoFlow with mean squared error, without dropout; the U-Net with batch norm and cross-entropy.
    edge : int
        Of the cube that is the input.
    base : int
        Filters of the first convolution.
    levels : int
        Of the U-Net.
    batch : int
        Samples of all ranks together.
    local_norm : bool
        Batch norm takes the statistics of each rank alone, as torch's does.
    half : bool
        Convolutions multiply bfloat16 (ours), or the whole network runs under torch's autocast to it.
    double : bool
        Everything is float64: the gradients that those of float32 are judged by.
    """

    network: str
    edge: int
    base: int
    levels: int = 3
    batch: int = 1
    local_norm: bool = False
    half: bool = False
    double: bool = False

    def text(self) -> str:
        """Return the case as one word of a command line."""
        return json.dumps(asdict(self))

    def with_batch(self, batch: int) -> Case:
        """Return the same with another number of samples, and statistics of each rank alone."""
        return replace(self, batch=batch, local_norm=True)

    def in_bfloat16(self) -> Case:
        """Return the same in bfloat16."""
        return replace(self, half=True)

    def in_float64(self) -> Case:
        """Return the same in float64."""
        return replace(self, half=False, double=True)


LR, WEIGHT_DECAY, CLASSES = 1e-3, 0.01, 3
CHANNELS = {"cosmoflow": 4, "unet3d": 1}


def parse(text: str) -> Case:
    """Return the case that `Case.text` wrote."""
    return Case(**json.loads(text))


def networks(quick: bool) -> tuple[Case, Case]:
    """Return the two steps: CosmoFlow on 4 x 128^3, the U-Net on 1 x 64^3; small ones for a quick look."""
    if quick:
        return Case("cosmoflow", 8, 2), Case("unet3d", 8, 2, 1)
    return Case("cosmoflow", 128, 16), Case("unet3d", 64, 16, 3)


def data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return input and target, the same values wherever it is called."""
    random, dtype = np.random.default_rng(20), np.float64 if case.double else np.float32
    x = random.standard_normal((case.batch, CHANNELS[case.network], *[case.edge] * 3), np.float32).astype(dtype)
    if case.network == "cosmoflow":
        return x, random.standard_normal((case.batch, 4), np.float32).astype(dtype)
    return x, random.integers(0, CLASSES, (case.batch, *[case.edge] * 3))
