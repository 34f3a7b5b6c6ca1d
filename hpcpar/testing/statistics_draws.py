"""Random arguments of normalisations, losses and reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar.testing.cases import Array
from hpcpar.testing.drawing import Drawn, Family, Rng, lengths, some


def _values(rng: Rng, count: int) -> str:
    """Values of an operand with statistics over `count` elements: a mean far from zero only where there are many."""
    return "shifted" if count >= 16 and rng.random() < 0.4 else "normal"


def _volume(rng: Rng, channels: int | None = None) -> tuple[int, ...]:
    ndim = int(rng.integers(0, 4))
    channels = channels or int(rng.choice([1, 2, 3, 5, 6, 65]))
    samples = 0 if rng.random() < 0.02 else int(rng.integers(1, 6))
    return (samples, channels, *lengths(rng, ndim, 1, {0: 2, 1: 20, 2: 8, 3: 6}[ndim]))


def _affine(rng: Rng, shape: tuple[int, ...]) -> list[Array]:
    """Weight and bias of a norm, or neither."""
    if rng.random() < 0.3:
        return []
    return [Array(shape, values="positive", parameter=True), Array(shape, parameter=True)]


def draw_batch_norm(rng: Rng) -> Drawn:
    """Batch norm in training, with the running statistics as further results; and in evaluation."""
    shape = _volume(rng)
    count = int(np.prod(shape)) // shape[1]
    arrays = [Array(shape, values=_values(rng, count)), *_affine(rng, (shape[1],))]
    return "batch_norm_and_statistics", arrays, some(rng, {"training": bool(rng.integers(4)), "momentum": 0.3})


def draw_group_norm(rng: Rng) -> Drawn:
    """Group and instance norm; groups that cross the borders of a split of the channels."""
    groups = int(rng.choice([1, 2, 3, 5]))
    channels = groups * int(rng.integers(1, 4))
    shape = _volume(rng, channels)
    instance = rng.random() < 0.3 and len(shape) > 2
    count = int(np.prod(shape[1:])) // (channels if instance else groups)
    arrays = [Array(shape, values=_values(rng, count)), *_affine(rng, (channels,))]
    if instance:
        return "instance_norm", arrays, {}
    return "group_norm", arrays, {"num_groups": groups}


def draw_row_norm(rng: Rng) -> Drawn:
    """Layer and RMS norm over the last dims, and local response norm."""
    kind = int(rng.integers(3))
    if kind == 0:
        shape = (*_volume(rng)[:2], *lengths(rng, int(rng.integers(1, 4)), 1, 7))
        size = int(rng.integers(1, 7))
        return "local_response_norm", [Array(shape)], {"size": size, "alpha": 0.3, "beta": 0.6, "k": 1.5}
    shape = lengths(rng, int(rng.integers(1, 5)), 1, 9)
    row = shape[int(rng.integers(len(shape))) :]
    arrays = [Array(shape, values=_values(rng, int(np.prod(row))))]
    if kind == 1:
        return "layer_norm", arrays + _affine(rng, row), {"normalized_shape": row}
    return "rms_norm", arrays + _affine(rng, row)[:1], {"normalized_shape": row, "eps": 1e-6}


def draw_cross_entropy(rng: Rng) -> Drawn:
    """Cross entropy with class weights, ignored labels, smoothing, masks and all reductions."""
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 6)), *lengths(rng, int(rng.integers(0, 4)), 1, 6))
    voxels = (shape[0], *shape[2:])
    arrays = [Array(shape), Array(voxels, values=f"classes {shape[1]}")]
    if rng.random() < 0.4:
        arrays.append(Array(voxels, values="mask"))
    arguments = some(
        rng,
        {
            "weight": tuple(round(float(w), 3) for w in rng.random(shape[1]) + 0.1),
            "label_smoothing": round(float(rng.random() * 0.5), 2),
            "reduction": str(rng.choice(["mean", "sum", "none"])),
        },
        0.5,
    )
    return "masked_cross_entropy", arrays, arguments


def draw_dice(rng: Rng) -> Drawn:
    """Soft Dice loss with ignored labels, masks, by sample or by batch."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(2, 5)), *lengths(rng, int(rng.integers(1, 4)), 1, 6))
    voxels = (shape[0], *shape[2:])
    arrays = [Array(shape, values="positive"), Array(voxels, values=f"classes {shape[1]}")]
    if rng.random() < 0.4:
        arrays.append(Array(voxels, values="mask"))
    flags = {"per_sample": bool(rng.integers(2)), "include_background": bool(rng.integers(2)), "smooth": 0.1}
    return "dice_loss", arrays, some(rng, flags)


def draw_difference(rng: Rng) -> Drawn:
    """Squared and absolute differences with masks and all reductions."""
    shape = lengths(rng, int(rng.integers(1, 6)), 1, 6)
    arrays = [Array(shape), Array(shape)]
    if rng.random() < 0.4:
        arrays.append(Array(shape, values="mask"))
    name = str(rng.choice(["masked_mse_loss", "masked_l1_loss"]))
    return name, arrays, some(rng, {"reduction": str(rng.choice(["mean", "sum", "none"]))})


def draw_reduction(rng: Rng) -> Drawn:
    """Reductions over one dim, several, or all."""
    shape = lengths(rng, int(rng.integers(1, 6)), 1, 7)
    op = str(rng.choice(["sum", "mean", "var", "std", "amax", "amin", "argmax", "argmin", "logsumexp"]))
    dims = tuple(int(d) for d in rng.permutation(len(shape))[: int(rng.integers(1, len(shape) + 1))])
    arguments: dict[str, Any] = {"dim": dims[0] if op.startswith("arg") else dims}
    if op in ("sum", "mean") and rng.random() < 0.2:
        arguments = {}
    if arguments and rng.random() < 0.5:
        arguments["keepdim"] = True
    if op in ("var", "std"):
        few = np.prod([shape[d] for d in dims]) < 2
        op, arguments["correction"] = ("var", 0) if few else (op, int(rng.integers(2)))
    values = _values(rng, int(np.prod([shape[d] for d in dims]))) if op == "var" else "normal"
    return op, [Array(shape, values="ties" if op.startswith(("arg", "am")) else values)], arguments


STATISTICS: dict[str, Family] = {
    "batch_norm": Family(draw_batch_norm),
    "group_norm": Family(draw_group_norm),
    "row_norm": Family(draw_row_norm),
    "cross_entropy": Family(draw_cross_entropy, 1, "voxels"),
    "dice": Family(draw_dice, 0.7, "voxels"),
    "difference": Family(draw_difference, 0.7, "same"),
    "reduction": Family(draw_reduction),
}
