"""Losses: sums and counts are reduced first and divided then, and what is returned is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.ops.core import Op, Rule, as_tensor
from hpcpar.ops.elementwise import abs as _abs
from hpcpar.ops.elementwise import add, div, mul, sub
from hpcpar.ops.reduction import mean
from hpcpar.ops.reduction import sum as _sum
from hpcpar.ops.repartition import resolve
from hpcpar.ops.shape import index
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor
from hpcpar.transport import Comm

REDUCTIONS = ("mean", "sum", "none")


def _voxels(x: Signature) -> Signature:
    """The signature of one value a position: that of x (N, C, *spatial) without its channels."""
    shape, dims = (x.shape[0], *x.shape[2:]), (x.dims[0], *x.dims[2:])
    return signature(x.mesh, shape, Layout(*dims))


class CrossEntropy(Op):
    """Cross entropy of (N, C, *spatial) logits with (N, *spatial) classes; any dims split, the channels too.

    A position with target t and class weights w has the loss ``(1 - e) w_t (lse - x_t) + e/C sum_c w_c (lse - x_c)``,
    e the label smoothing; the mean divides by the sum of w_t over all valid positions of all ranks.
    """

    name = "cross_entropy"

    def rule(self, sigs: tuple[Signature, ...], reduction: str, masked: bool) -> Rule:
        x = sigs[0].resolved
        if len(x.shape) < 2:
            raise ValueError(f"cross_entropy takes logits (N, C, ...), got shape {x.shape}")
        voxels = _voxels(x)
        for sig, what in zip(sigs[1:], ("target", "mask"), strict=False):
            if sig.shape != voxels.shape:
                raise ValueError(f"cross_entropy: logits {x.shape} need a {what} of {voxels.shape}, got {sig.shape}")
        out = voxels if reduction == "none" else signature(x.mesh, (), Layout())
        moves = [x, *[voxels] * (len(sigs) - 1)]
        comms = (x.mesh.comm(*x.dims[1]), x.mesh.comm(*voxels.split_axes))
        return Rule(out, moves, moves, sigs, (reduction, masked, x.box[1], x.shape[1], *comms))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        logits, target = arrays[:2]
        reduction, masked, (lo, hi), classes, across, along = rule.plan
        weight, ignore_index, smoothing = extra
        valid = target != ignore_index
        _check_classes(target, valid, classes, along)
        if masked:
            valid = valid & arrays[2].astype(bool)
        local = np.where(valid, target - lo, -1)
        lse, picked = kernels.cross_entropy_forward(logits, local)
        lse, picked = _merge_classes(across, lse, picked)
        # 0 where nothing counts, as `picked` is: logits of -inf there must not turn 0 * inf into NaN
        zero = logits.dtype.type(0)
        lse = np.where(valid, lse, zero)
        of_target = valid.astype(logits.dtype)
        if weight is not None:
            of_target = of_target * np.take(weight, np.where(valid, target, 0))
        loss = of_target * (lse - picked) * (1 - smoothing)
        total_weight = float(classes)
        if smoothing:
            own = np.ones(hi - lo, logits.dtype) if weight is None else weight[lo:hi]
            total_weight = float(classes if weight is None else weight.sum())
            weighted = across.all_reduce(np.einsum("nc...,c->n...", logits, own))
            loss = loss + (smoothing / classes) * (total_weight * lse - np.where(valid, weighted, zero))
        if reduction == "none":
            return loss, (logits, local, lse, valid, of_target, extra, 1.0, total_weight)
        numbers = np.array([loss.sum(dtype=np.float64), of_target.sum(dtype=np.float64)])
        total, count = along.all_reduce(numbers)
        scale = 1.0 if reduction == "sum" else (1.0 / count if count else float("nan"))
        saved = (logits, local, lse, valid, of_target, extra, scale, total_weight)
        return np.asarray(total * scale, logits.dtype), saved

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        logits, local, lse, valid, of_target, (weight, _, smoothing), scale, total_weight = saved
        _, _, (lo, hi), classes, _, _ = rule.plan
        upstream = g * logits.dtype.type(scale)
        hard = np.where(valid, upstream * of_target * (1 - smoothing), 0).astype(logits.dtype)
        soft, smooth = hard, None
        if smoothing:
            smooth = np.where(valid, upstream * (smoothing / classes), 0).astype(logits.dtype)
            soft = hard + smooth * logits.dtype.type(total_weight)
        own = None if weight is None else weight[lo:hi]
        dx = kernels.cross_entropy_backward(logits, local, lse, soft, hard, smooth, own)
        return (dx, *[None] * (len(needs) - 1))


def _check_integers(name: str, target: Tensor) -> None:
    if target.dtype.kind not in "iu":
        raise ValueError(f"{name}: targets are classes as integers, got dtype {target.dtype}")


def _check_classes(target: Any, valid: Any, classes: int, along: Comm) -> None:
    """A label outside the classes ends in one error on all ranks, not in a wrong loss."""
    wrong = valid & ((target < 0) | (target >= classes))
    found = along.all_reduce(np.array([int(target[wrong].max(initial=-1)) if wrong.any() else -(2**62)]), "max")
    if int(found[0]) != -(2**62):
        raise ValueError(f"cross_entropy: a target is {int(found[0])}, the logits have the classes 0 to {classes - 1}")


def _merge_classes(across: Comm, lse: Any, picked: Any) -> tuple[Any, Any]:
    """Merge log-sum-exp and picked logit over a split of the classes: a maximum, then both sums in one message."""
    if across.size == 1:
        return lse, picked
    top = across.all_reduce(lse, "max")
    safe = np.where(np.isfinite(top), top, 0).astype(lse.dtype)
    both = across.all_reduce(np.stack([np.exp(lse - safe), picked]))
    with np.errstate(divide="ignore"):
        return np.log(both[0]) + safe, both[1]


class OverlapSums(Op):
    """For each sample and class the sums over positions of p * t, p and t (t the one-hot target): (3, N, C).

    Partial over the axes that split positions. The raw material of Dice and Jaccard losses and scores.
    """

    name = "overlap_sums"

    def rule(self, sigs: tuple[Signature, ...], masked: bool) -> Rule:
        x = sigs[0].resolved
        voxels = _voxels(x)
        for sig in sigs[1:]:
            if sig.shape != voxels.shape:
                raise ValueError(f"dice: probabilities {x.shape} need targets of {voxels.shape}, got {sig.shape}")
        spatial = x.mesh.sort([a for stack in x.dims[2:] for a in stack])
        out = signature(x.mesh, (3, *x.shape[:2]), Layout(None, x.dims[0], x.dims[1], partial=spatial))
        moves = [x, *[voxels] * (len(sigs) - 1)]
        return Rule(out, moves, moves, sigs, (x.box[1][0], masked))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        probabilities, target = arrays[:2]
        lo, masked = rule.plan
        valid = target != extra
        if masked:
            valid = valid & arrays[2].astype(bool)
        chosen = np.where(valid, target - lo, -1)
        n, c = probabilities.shape[:2]
        sums = kernels.array_module(probabilities).zeros((3, n, c), np.float64)
        positions = tuple(range(1, chosen.ndim))
        for k in range(c):  # one class at a time: no one-hot copy of the volume
            here = chosen == k
            p = probabilities[:, k]
            sums[0, :, k] = np.where(here, p, 0).sum(axis=positions, dtype=np.float64)
            sums[1, :, k] = np.where(valid, p, 0).sum(axis=positions, dtype=np.float64)
            sums[2, :, k] = here.sum(axis=positions)
        return sums.astype(probabilities.dtype), (chosen, valid, probabilities.shape, probabilities.dtype)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        chosen, valid, shape, dtype = saved
        dx = kernels.empty_channels_last(shape, dtype, g)
        ones = (1,) * (chosen.ndim - 1)
        for k in range(shape[1]):
            both = (g[0, :, k] + g[1, :, k]).reshape(g.shape[1], *ones)
            alone = g[1, :, k].reshape(g.shape[1], *ones)
            dx[:, k] = np.where(valid, np.where(chosen == k, both, alone), 0)
        return (dx, *[None] * (len(needs) - 1))


_cross_entropy, _overlap_sums = CrossEntropy(), OverlapSums()


def _whole(weight: Any, like: Tensor) -> Any:
    """Class weights as a whole array on this rank."""
    if weight is None:
        return None
    if isinstance(weight, Tensor):
        return weight.moved(signature(weight.mesh, weight.shape, Layout())).astype(like.dtype, copy=False)
    return as_tensor(weight, like).shard


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Cross entropy between logits and class indices.

    Parameters
    ----------
    input : Tensor
        Logits (N, C, *spatial); any dims split, the classes too (then no rank holds a whole row).
    target : Tensor
        Integer classes (N, *spatial); laid out as the logits without classes, or less split (it is then sliced).
    weight : array_like or Tensor, optional
        (C,) weights of the classes.
    ignore_index : int
        Positions with this target count nowhere.
    reduction : {"mean", "sum", "none"}
        The mean divides by the weights of all valid positions of all ranks; without any it is NaN, as in torch.
    label_smoothing : float
        0 to 1.
    mask : Tensor, optional
        (N, *spatial); positions where it is zero count nowhere.

    Returns
    -------
    Tensor
        A replicated scalar, or (N, *spatial).
    """
    _check_reduction("cross_entropy", reduction)
    _check_integers("cross_entropy", target)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing is between 0 and 1, got {label_smoothing}")
    whole = _whole(weight, input)
    if whole is not None and whole.shape != (input.shape[1],):
        raise ValueError(f"cross_entropy: {input.shape[1]} classes need as many weights, got shape {whole.shape}")
    operands = (input, target) if mask is None else (input, target, mask)
    return _cross_entropy(operands, (reduction, mask is not None), (whole, ignore_index, label_smoothing))


def overlap_sums(probabilities: Tensor, target: Tensor, ignore_index: int = -100, mask: Tensor | None = None) -> Tensor:
    """Return (3, N, C): sums over positions of p t, p and t for each sample and class; partial over a spatial split."""
    _check_integers("overlap_sums", target)
    operands = (probabilities, target) if mask is None else (probabilities, target, mask)
    return _overlap_sums(operands, (mask is not None,), ignore_index)


def dice_loss(
    probabilities: Tensor,
    target: Tensor,
    smooth: float = 1e-5,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    per_sample: bool = False,
    include_background: bool = True,
) -> Tensor:
    """Return one minus the mean soft Dice coefficient (Milletari, Navab and Ahmadi 2016, with linear sums below).

    Parameters
    ----------
    probabilities : Tensor
        (N, C, *spatial), a softmax over classes.
    target : Tensor
        Integer classes (N, *spatial).
    smooth : float
        Added to numerator and denominator: ``(2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth)``.
    per_sample : bool
        A coefficient for each sample, then their mean; otherwise sums run over the whole batch, which stays stable
        where a class is missing in a sample.
    include_background : bool
        Count class 0.
    """
    sums = overlap_sums(probabilities, target, ignore_index, mask)
    if not per_sample:
        sums = _sum(sums, 1, keepdim=True)
    sums = resolve(sums)
    if not include_background:
        if sums.sig.dims[2]:
            from hpcpar.ops.repartition import repartition

            sums = repartition(sums, Layout(None, sums.sig.dims[1]))
        sums = index(sums, (slice(None), slice(None), slice(1, None)))
    overlap, p, t = index(sums, 0), index(sums, 1), index(sums, 2)
    dice = div(add(mul(overlap, 2.0), smooth), add(add(p, t), smooth))
    return resolve(sub(1.0, mean(dice)))


def _difference_loss(
    name: str, function: Any, input: Tensor, target: Tensor, reduction: str, mask: Tensor | None
) -> Tensor:
    _check_reduction(name, reduction)
    if input.shape != target.shape:
        raise ValueError(f"{name}: input has shape {input.shape}, target {target.shape}")
    loss = function(sub(input, target))
    count: Any = loss.numel()
    if mask is not None:
        loss = mul(loss, mask)
        from hpcpar.ops.shape import expand

        count = resolve(_sum(expand(mask, loss.shape) if mask.shape != loss.shape else mask))
    if reduction == "none":
        return loss
    total = resolve(_sum(loss))
    return total if reduction == "sum" else div(total, count)


def mse_loss(input: Tensor, target: Tensor, reduction: str = "mean", mask: Tensor | None = None) -> Tensor:
    """Return the squared difference, averaged over the true global count (over the mask where there is one)."""
    return _difference_loss("mse_loss", lambda d: mul(d, d), input, target, reduction, mask)


def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean", mask: Tensor | None = None) -> Tensor:
    """Return the absolute difference, averaged over the true global count (over the mask where there is one)."""
    return _difference_loss("l1_loss", _abs, input, target, reduction, mask)


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is one of {', '.join(REDUCTIONS)}, got {reduction!r}")
