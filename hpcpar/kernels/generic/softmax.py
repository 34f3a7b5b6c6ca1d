"""Softmax along any dim, and the parts of cross entropy along the channels."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, array_module, empty_channels_last, last


def softmax(x: Array, axis: int) -> Array:
    """``exp(x - max) / sum`` along ``axis``; memory order of x is kept."""
    if x.size == 0:
        return x.copy()
    y = np.subtract(x, x.max(axis=axis, keepdims=True))
    np.exp(y, out=y)
    y /= y.sum(axis=axis, keepdims=True)
    return y


def softmax_backward(g: Array, y: Array, axis: int) -> Array:
    """Gradient of `softmax` from its output y: ``y * (g - sum(g * y))``."""
    return y * (g - (g * y).sum(axis=axis, keepdims=True))


def log_softmax(x: Array, axis: int) -> Array:
    """``x - log(sum(exp(x)))`` along ``axis``."""
    if x.size == 0:
        return x.copy()
    y = np.subtract(x, x.max(axis=axis, keepdims=True))
    y -= np.log(np.exp(y).sum(axis=axis, keepdims=True))
    return y


def log_softmax_backward(g: Array, y: Array, axis: int) -> Array:
    """Gradient of `log_softmax` from its output y: ``g - exp(y) * sum(g)``."""
    return g - np.exp(y) * g.sum(axis=axis, keepdims=True)


def cross_entropy_forward(logits: Array, target: Array) -> tuple[Array, Array]:
    """Logarithm of the sum of exponentials over the channels, and the logit of the target class.

    The negative log-likelihood of a position is ``lse - picked``. Where the channels are split over ranks, each passes
    its own logits and targets less its first channel; lse merges by logaddexp, picked by a sum.

    Parameters
    ----------
    logits : array (N, C, *spatial)
    target : integer array (N, *spatial)
        Class of each position; a class outside [0, C), such as an ignored label, picks 0.

    Returns
    -------
    lse, picked : arrays (N, *spatial) in the dtype of logits; lse is -inf where C is 0.
    """
    xp = array_module(logits)
    lse = xp.full(target.shape, -np.inf, logits.dtype)
    picked = xp.zeros(target.shape, logits.dtype)
    if logits.size == 0:
        return lse, picked
    top = logits.max(axis=1)
    # All -inf: subtracting zero keeps the sum at 0 and the logarithm at -inf, where -inf - -inf were NaN.
    safe = xp.where(top == -np.inf, logits.dtype.type(0), top)
    shifted = logits - xp.expand_dims(safe, 1)
    np.exp(shifted, out=shifted)
    with np.errstate(divide="ignore"):
        lse = np.log(shifted.sum(axis=1)) + safe
    there, where = _inside(target, logits.shape[1])
    chosen = xp.take_along_axis(logits, xp.expand_dims(where, 1), axis=1)[:, 0]
    return lse, xp.where(there, chosen, logits.dtype.type(0))


def cross_entropy_backward(
    logits: Array,
    target: Array,
    lse: Array,
    soft: Array,
    hard: Array,
    smooth: Array | None = None,
    class_weight: Array | None = None,
) -> Array:
    """``softmax * soft - onehot(target) * hard - class_weight * smooth``: the gradient of every cross entropy.

    Parameters
    ----------
    logits : array (N, C, *spatial)
    target : integer array (N, *spatial)
        As in `cross_entropy_forward`.
    lse : array (N, *spatial)
        Over all channels (of all ranks); softmax is ``exp(logits - lse)``.
    soft, hard : arrays (N, *spatial)
        With upstream gradient g of the position's loss, weight w of its class, smoothing e and C classes of weights
        v: ``soft = g ((1 - e) w + e sum(v) / C)``, ``hard = g (1 - e) w``; zeros for ignored positions.
    smooth : array (N, *spatial), optional
        ``g e / C``; None without smoothing.
    class_weight : array (C,), optional
        v, used with ``smooth``; None is ones.

    Returns
    -------
    array (N, C, *spatial), channels last.
    """
    xp = array_module(logits)
    dx = empty_channels_last(logits.shape, logits.dtype, like=logits)
    if dx.size == 0:
        return dx
    np.subtract(logits, xp.expand_dims(lse, 1), out=dx)
    np.exp(dx, out=dx)
    dx *= xp.expand_dims(soft, 1)
    there, where = _inside(target.reshape(target.size), logits.shape[1])
    places = np.flatnonzero(there)
    rows = (last(dx) if dx.ndim > 2 else dx).reshape(target.size, logits.shape[1])
    rows[places, where[places]] -= hard.reshape(target.size)[places]
    if smooth is not None:
        weight = 1 if class_weight is None else class_weight.reshape(-1, *(1,) * (logits.ndim - 2))
        dx -= (xp.expand_dims(smooth, 1) * weight).astype(dx.dtype, copy=False)
    return dx


def _inside(target: Array, classes: int) -> tuple[Array, Array]:
    there = (target >= 0) & (target < classes)
    return there, array_module(target).where(there, target, 0)
