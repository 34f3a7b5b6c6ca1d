"""How torch is called where it is not by the same name and arguments, and where it is known to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcpar.layout.maps import out_size
from hpcpar.testing import grid_twins, transformer_twins

if TYPE_CHECKING:
    from hpcpar.testing.cases import Case


def _padded_conv(ndim: int) -> Callable[..., Any]:
    """Convolution with a padding mode: torch has it in its modules only."""

    def call(x: Any, w: Any, b: Any = None, padding: Any = 0, padding_mode: str = "zeros", **rest: Any) -> Any:
        import torch.nn.functional as F

        function = getattr(F, f"conv{ndim}d")
        if padding_mode == "zeros":
            return function(x, w, b, padding=padding, **rest)
        if padding == "same":
            dilation = rest.get("dilation", 1)
            d = (dilation,) * ndim if isinstance(dilation, int) else dilation
            totals = [d[i] * (w.shape[i + 2] - 1) for i in range(ndim)]
            pairs = [(t // 2, t - t // 2) for t in totals]
        else:
            widths = (padding,) * ndim if isinstance(padding, int) else padding
            pairs = [(0, 0) if padding == "valid" else (p, p) for p in widths]
        flat = [p for pair in reversed(pairs) for p in pair]
        return function(F.pad(x, flat, mode=padding_mode), w, b, **rest)

    return call


def reject(case: Case) -> None:
    """Raise Rejected for arguments on which torch corrupts memory or contradicts itself."""
    from hpcpar.testing.cases import Rejected

    if case.op.startswith("max_pool") and empty_window(case):
        raise Rejected("torch writes out of bounds where a max pooling window holds no input")
    if case.op == "interpolate" and case.arguments.get("mode", "nearest").startswith("nearest") and torn_nearest(case):
        raise Rejected("forward and backward of torch's nearest interpolation take different positions here")
    if case.op == "pad" and case.arguments.get("mode", "constant") != "constant":
        widths, lengths = case.arguments.get("pad", ()), case.arrays[0].shape[::-1]
        pairs = list(zip(lengths, widths[::2], widths[1::2], strict=False))
        if any(n + lo + hi < 1 for n, lo, hi in pairs):
            raise Rejected("torch does not write the gradient of a result without elements")
        if case.arguments["mode"] == "circular" and any(
            max(lo, hi) > n + min(lo, 0) + min(hi, 0) for n, lo, hi in pairs
        ):
            raise Rejected("torch repeats memory not yet written where a cropped dim is wrapped around")


def empty_window(case: Case) -> bool:
    """Whether some window of a max pooling holds no input: all taps of one lie in padding."""
    shape = case.arrays[0].shape[2:]

    def each(name: str, default: Any) -> tuple[int, ...]:
        value = case.arguments.get(name, default)
        return (value,) * len(shape) if isinstance(value, int) else tuple(value)

    kernel, dilation, padding = each("kernel_size", 1), each("dilation", 1), each("padding", 0)
    stride, ceil = each("stride", kernel), bool(case.arguments.get("ceil_mode", False))
    for n, k, s, d, p in zip(shape, kernel, stride, dilation, padding, strict=True):
        for o in range(out_size("pool", n, k, s, d, p, p, ceil=ceil)):
            if not any(0 <= o * s - p + d * t < n for t in range(k)):
                return True
    return False


def torn_nearest(case: Case) -> bool:
    """Whether torch's gradient of a nearest interpolation is not the adjoint of its forward pass (the dot test)."""
    import torch

    generator = torch.Generator().manual_seed(7)
    x = torch.randn((1, 1, *case.arrays[0].shape[2:]), dtype=torch.float64, generator=generator, requires_grad=True)
    try:
        y = torch.nn.functional.interpolate(x, **case.arguments)
    except (RuntimeError, ValueError):
        return False
    g = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    (dx,) = torch.autograd.grad(y, x, g)
    return not torch.isclose((y * g).sum(), (x * dx).sum(), rtol=1e-9, atol=1e-9)


def _joined(name: str) -> Callable[..., Any]:
    def call(*parts: Any, dim: int = 0) -> Any:
        import torch

        return getattr(torch, name)(parts, dim)

    return call


def _pool_and_unpool(ndim: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch.nn.functional as F

        from hpcpar.testing.twins import pool_and_unpool

        return pool_and_unpool(F, ndim)(*args, **kwargs)

    return call


def _norm(name: str) -> Callable[..., Any]:
    def call(x: Any, weight: Any = None, bias: Any = None, **rest: Any) -> Any:
        import torch.nn.functional as F

        given = {"weight": weight} if name == "rms_norm" else {"weight": weight, "bias": bias}
        return getattr(F, name)(x, **given, **rest)

    return call


def _batch_norm(x: Any, weight: Any = None, bias: Any = None, training: bool = True, momentum: float = 0.1) -> Any:
    import torch

    mean, var = torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(x.shape[1], dtype=x.dtype)
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, training, momentum), mean, var


def _cross_entropy(x: Any, target: Any, mask: Any = None, weight: Any = None, **rest: Any) -> Any:
    import torch

    if mask is not None:
        target = torch.where(mask != 0, target, -100)
    weight = None if weight is None else torch.tensor(weight, dtype=x.dtype)
    return torch.nn.functional.cross_entropy(x, target, weight, **rest)


def _dice(
    x: Any, target: Any, mask: Any = None, smooth: float = 1e-5, per_sample: bool = False,
    include_background: bool = True,
) -> Any:  # fmt: skip
    import torch

    valid = target != -100 if mask is None else (target != -100) & (mask != 0)
    hot = torch.nn.functional.one_hot(torch.where(valid, target, 0), x.shape[1]).movedim(-1, 1) * valid[:, None]
    p, t = x * valid[:, None], hot.to(x.dtype)
    dims = tuple(range(2, x.ndim)) if per_sample else (0, *range(2, x.ndim))
    first = 0 if include_background else 1
    dice = (2 * (p * t).sum(dims) + smooth) / (p.sum(dims) + t.sum(dims) + smooth)
    return 1 - dice[..., first:].mean()


def _masked_difference(power: int) -> Callable[..., Any]:
    def call(x: Any, target: Any, mask: Any = None, reduction: str = "mean") -> Any:
        loss = (x - target).abs() ** power
        count = loss.numel() if mask is None else mask.sum()
        loss = loss if mask is None else loss * mask
        return loss if reduction == "none" else loss.sum() / (count if reduction == "mean" else 1)

    return call


TORCH: dict[str, Callable[..., Any]] = {
    **{f"conv{n}d": _padded_conv(n) for n in (1, 2, 3)},
    "cat": _joined("cat"),
    "stack": _joined("stack"),
    "index": lambda x, item: x[item],
    **{name: _norm(name) for name in ("group_norm", "instance_norm", "layer_norm", "rms_norm")},
    "batch_norm_and_statistics": _batch_norm,
    "masked_cross_entropy": _cross_entropy,
    "dice_loss": _dice,
    "masked_mse_loss": _masked_difference(2),
    "masked_l1_loss": _masked_difference(1),
    **{f"pool_and_unpool{n}d": _pool_and_unpool(n) for n in (1, 2, 3)},
    **transformer_twins.TORCH,
    **grid_twins.TORCH,
}
