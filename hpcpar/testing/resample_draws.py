"""Random arguments of operations that change spatial lengths: interpolation, adaptive pooling, unpooling, shuffles."""

from __future__ import annotations

from typing import Any

from hpcpar.testing.cases import Array
from hpcpar.testing.drawing import Drawn, Family, Rng, lengths, one_or_all, spatial_shape

_MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "nearest-exact", "trilinear", "area"],
}


def draw_interpolate(rng: Rng) -> Drawn:
    """Interpolation in all modes, by size or by scale factor, up and down."""
    ndim = int(rng.integers(1, 4))
    mode = str(rng.choice(_MODES[ndim]))
    shape = spatial_shape(rng, ndim, {1: 16, 2: 9, 3: 6}[ndim])
    arguments: dict[str, Any] = {"mode": mode}
    if rng.random() < 0.5:
        arguments["size"] = one_or_all(rng, lengths(rng, ndim, 1, {1: 40, 2: 18, 3: 11}[ndim]))
    else:
        choices = [[0.5, 2.0, 3.0, 1.0, round(0.3 + 2.2 * rng.random(), 2)] for _ in range(ndim)]
        factors = tuple(float(rng.choice(c)) for c in choices)
        arguments["scale_factor"] = factors[0] if rng.random() < 0.3 else factors
        if rng.random() < 0.3:
            arguments["recompute_scale_factor"] = True
    if mode.endswith(("linear", "cubic")) and rng.random() < 0.6:
        arguments["align_corners"] = bool(rng.integers(2))
    return "interpolate", [Array(shape)], arguments


def _output_size(rng: Rng, shape: tuple[int, ...]) -> Any:
    what = rng.random()
    if what < 0.2:
        return 1
    sizes = [int(rng.choice([1, int(rng.integers(1, n + 1)), int(rng.integers(1, 10))])) for n in shape[2:]]
    return sizes[0] if what < 0.3 else tuple(None if len(sizes) > 1 and rng.random() < 0.1 else m for m in sizes)


def draw_adaptive_avg(rng: Rng) -> Drawn:
    """Adaptive and global average pooling."""
    ndim = int(rng.integers(1, 4))
    shape = spatial_shape(rng, ndim)
    return f"adaptive_avg_pool{ndim}d", [Array(shape)], {"output_size": _output_size(rng, shape)}


def draw_adaptive_max(rng: Rng) -> Drawn:
    """Adaptive and global max pooling, values with ties, with and without indices."""
    ndim = int(rng.integers(1, 4))
    shape = spatial_shape(rng, ndim)
    arguments = {"output_size": _output_size(rng, shape), "return_indices": bool(rng.integers(2))}
    return f"adaptive_max_pool{ndim}d", [Array(shape, values=str(rng.choice(["normal", "ties"])))], arguments


def draw_lp_pool(rng: Rng) -> Drawn:
    """Lp pooling."""
    ndim = int(rng.integers(1, 4))
    norm = float(rng.choice([1.0, 2.0, 3.0, 2.5]))
    kernel = lengths(rng, ndim, 1, 5)
    arguments = {
        "norm_type": norm,
        "kernel_size": kernel[0] if ndim == 1 else one_or_all(rng, kernel),
        "stride": one_or_all(rng, lengths(rng, ndim, 1, 5)) if rng.random() < 0.7 else None,
        "ceil_mode": bool(rng.integers(2)),
    }
    values = "normal" if norm == 2.0 else "positive"
    n, c, *spatial = spatial_shape(rng, ndim)
    shape = (n, c, *(max(m, max(kernel)) for m in spatial))
    return f"lp_pool{ndim}d", [Array(shape, values=values)], arguments


def draw_unpool(rng: Rng) -> Drawn:
    """Max pooling and back: values and places both come from the pooling of the operand."""
    ndim = int(rng.integers(1, 4))
    kernel = lengths(rng, ndim, 1, 4)
    arguments = {
        "kernel_size": kernel,
        "stride": lengths(rng, ndim, 1, 5) if rng.random() < 0.6 else None,
        "padding": tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel),
    }
    return f"pool_and_unpool{ndim}d", [Array(spatial_shape(rng, ndim))], arguments


def draw_shuffle(rng: Rng) -> Drawn:
    """Pixel shuffle and unshuffle."""
    r = int(rng.integers(1, 4))
    n, c, h, w = spatial_shape(rng, 2, 7)
    if rng.random() < 0.5:
        return "pixel_shuffle", [Array((n, c * r * r, h, w))], {"upscale_factor": r}
    return "pixel_unshuffle", [Array((n, c, h * r, w * r))], {"downscale_factor": r}


RESAMPLING: dict[str, Family] = {
    "interpolate": Family(draw_interpolate, 3),
    "adaptive_avg": Family(draw_adaptive_avg),
    "adaptive_max": Family(draw_adaptive_max),
    "lp_pool": Family(draw_lp_pool),
    "unpool": Family(draw_unpool),
    "shuffle": Family(draw_shuffle),
}
