"""Gather maps and weights of resampling: interpolation and adaptive windows, one dim at a time.

Each output is a weighted sum of a few inputs, its *taps*. A rank's buffer is the hull of the taps of its block, and the
whole operation is a small matrix per dim whose transpose is the gradient.
"""

from __future__ import annotations

from math import floor

import numpy as np

from hpcpar.layout.maps import Map, interval_map

MODES = ("nearest", "nearest-exact", "linear", "cubic")

_CUBIC = -0.75  # the coefficient of Keys (1981) that torch and OpenCV use


def resampled_size(n: int, scale: float) -> int:
    """Return the output length for a scale factor, rounded down."""
    return floor(float(n) * scale)


def taps(
    n: int, o0: int, o1: int, out: int, mode: str, align: bool = False, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the taps of outputs ``[o0, o1)`` when a dim of length n is interpolated to length out.

    Parameters
    ----------
    n : int
        Input length, at least 1.
    o0, o1 : int
        Output block.
    out : int
        Output length, at least 1.
    mode : {"nearest", "nearest-exact", "linear", "cubic"}
        The dim's part of nearest, bilinear, trilinear, bicubic, ...
    align : bool
        ``align_corners``; no meaning for the nearest modes.
    scale : float, optional
        The scale factor, where it was given and is to be used in place of ``out / n``.

    Returns
    -------
    index : ndarray of int64, shape (o1 - o0, taps)
        Global input indices; they may repeat within an output.
    weight : ndarray of float64, shape (o1 - o0, taps)
        Their weights.

    Raises
    ------
    ValueError
        An unknown mode, or a length of 0.

    Notes
    -----
    Where torch contradicts itself, one rule is taken. The nearest modes compute the index in float32 for all dtypes, as
    torch does in two dims and in every gradient. With ``n == out`` nearest and linear, but not nearest-exact, are the
    identity whatever the scale says. Cubic convolution: Keys, IEEE ASSP 29 (1981), with a = -0.75.
    """
    if mode not in MODES:
        raise ValueError(f"interpolation mode {mode!r} is unknown; the modes are {', '.join(MODES)}")
    if n < 1 or out < 1:
        raise ValueError(f"interpolation needs lengths of at least 1, got {n} to {out}")
    o = np.arange(o0, o1)
    if mode.startswith("nearest"):
        return _nearest(n, out, o, mode, scale)[:, None], np.ones((o.size, 1))
    if n == out and mode == "linear":
        return o[:, None], np.ones((o.size, 1))
    if align:
        position = o * ((n - 1) / (out - 1) if out > 1 else 0.0)
    else:
        position = (o + 0.5) * _ratio(n, out, scale) - 0.5
    if mode == "linear":
        position = np.maximum(position, 0.0)
        low = np.minimum(np.floor(position).astype(np.int64), n - 1)
        part = position - low
        return np.stack([low, np.minimum(low + 1, n - 1)], 1), np.stack([1 - part, part], 1)
    low = np.floor(position).astype(np.int64)
    index = np.clip(low[:, None] + np.arange(-1, 3), 0, n - 1)
    return index, _cubic_weights(position - low)


def _ratio(n: int, out: int, scale: float | None) -> float:
    return n / out if scale is None else 1.0 / scale


def _nearest(n: int, out: int, o: np.ndarray, mode: str, scale: float | None) -> np.ndarray:
    if n == out and mode == "nearest":
        return o
    if out == 2 * n and mode == "nearest":
        return o // 2
    ratio = np.float32(n) / np.float32(out) if scale is None else np.float32(1.0 / scale)
    position = o.astype(np.float32) if mode == "nearest" else (o + 0.5).astype(np.float32)
    return np.clip(np.floor(position * ratio).astype(np.int64), 0, n - 1)


def _cubic_weights(t: np.ndarray) -> np.ndarray:
    """Weights of the four neighbours at offsets -1, 0, 1, 2 for positions t in [0, 1) after neighbour 0."""
    a = _CUBIC

    def near(x: np.ndarray) -> np.ndarray:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: np.ndarray) -> np.ndarray:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)


def taps_map(n: int, o0: int, o1: int, out: int, mode: str, align: bool = False, scale: float | None = None) -> Map:
    """Return the hull of the taps of outputs ``[o0, o1)``: an interval inside ``[0, n)``."""
    if o1 <= o0:
        return Map(0)
    # all modes are monotone in the output, so that the hull is given by the first and the last one
    ends = [taps(n, o, o + 1, out, mode, align, scale)[0] for o in (o0, o1 - 1)]
    return interval_map(n, int(min(e.min() for e in ends)), int(max(e.max() for e in ends)) + 1)


def taps_matrix(index: np.ndarray, weight: np.ndarray, start: int, size: int) -> np.ndarray:
    """Return the (outputs, size) matrix of taps whose buffer shows ``[start, start + size)``; repeated taps add up."""
    matrix = np.zeros((index.shape[0], size))
    rows = np.broadcast_to(np.arange(index.shape[0])[:, None], index.shape)
    np.add.at(matrix, (rows, index - start), weight)
    return matrix


def adaptive_windows(n: int, o0: int, o1: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the global windows ``[start, stop)`` of outputs ``[o0, o1)`` of adaptive pooling; windows may overlap."""
    o = np.arange(o0, o1)
    return o * n // out, -((o + 1) * -n // out)


def adaptive_map(n: int, o0: int, o1: int, out: int) -> Map:
    """Return the hull of the windows of outputs ``[o0, o1)`` of adaptive pooling from length n to length out."""
    return interval_map(n, o0 * n // out, -(o1 * -n // out)) if o1 > o0 else Map(0)
