"""Arguments of convolutions: checked, one entry for each spatial dim, and the lengths that follow."""

from __future__ import annotations

from typing import Any, NamedTuple

from hpcpar.kernels.bfloat16 import COMPUTE_DTYPES
from hpcpar.layout.maps import PAD_MODES, out_size, same_padding
from hpcpar.ops.spatial import per_dim, remembered

Pairs = tuple[tuple[int, int], ...]


class Geometry(NamedTuple):
    """The arguments of a convolution: one entry for each spatial dim."""

    stride: tuple[int, ...]
    padding: Pairs
    dilation: tuple[int, ...]
    groups: int
    mode: str = "zeros"
    extra: tuple[int, ...] = ()
    compute_dtype: str = "float32"

    def steps(self, kernel: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        """Return (kernel, stride, dilation, padding before) of each dim."""
        return [
            (k, s, d, lo) for k, s, d, (lo, _) in zip(kernel, self.stride, self.dilation, self.padding, strict=True)
        ]


def conv_sizes(x: tuple[int, ...], w: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Return the spatial output lengths; an error names what does not fit."""
    if x[1] != w[1] * geometry.groups or w[0] % geometry.groups:
        raise ValueError(f"conv: x of shape {x} does not fit a weight of shape {w} with {geometry.groups} groups")
    sizes = tuple(
        out_size("conv", n, k, s, d, lo, hi)
        for n, k, s, d, (lo, hi) in zip(x[2:], w[2:], geometry.stride, geometry.dilation, geometry.padding, strict=True)
    )
    if min(sizes) < 0 or (min(sizes) < 1 and 0 not in x[2:]):
        raise ValueError(
            f"conv: a kernel of {w[2:]} with dilation {geometry.dilation} is larger than the padded input {x[2:]}"
        )
    return sizes


def transposed_sizes(x: tuple[int, ...], w: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Return the spatial output lengths of a transposed convolution."""
    if x[1] != w[0] or x[1] % geometry.groups:
        raise ValueError(f"conv_transpose: x of shape {x} does not fit a weight {w} with {geometry.groups} groups")
    sizes = []
    for d, n in enumerate(x[2:]):
        extra, stride, dilation = geometry.extra[d], geometry.stride[d], geometry.dilation[d]
        if not 0 <= extra < max(stride, dilation):
            raise ValueError(
                f"conv_transpose: output_padding {extra} must be smaller than stride {stride} or dilation {dilation}"
            )
        sizes.append(out_size("transposed", n, w[d + 2], stride, dilation, *geometry.padding[d], extra=extra))
    if min(sizes) < 1:
        raise ValueError(f"conv_transpose: input {x[2:]} with padding {geometry.padding} leaves no output")
    return tuple(sizes)


@remembered
def make_geometry(
    name: str, ndim: int, w: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int, mode: str,
    compute_dtype: str | None,
) -> Geometry:  # fmt: skip
    """Return checked arguments, one entry for each dim, for a weight of shape `w`."""
    if len(w) != ndim + 2:
        raise ValueError(f"{name} takes weights with {ndim + 2} dims, got shape {w}")
    stride, dilation = per_dim(name, "stride", stride, ndim), per_dim(name, "dilation", dilation, ndim)
    if min(stride) < 1 or min(dilation) < 1 or groups < 1:
        raise ValueError(f"{name}: stride, dilation and groups are at least 1, got {stride}, {dilation}, {groups}")
    if mode not in PAD_MODES:
        raise ValueError(f"{name}: padding_mode is one of {', '.join(PAD_MODES)}, got {mode!r}")
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ValueError(f"{name}: padding='same' needs stride 1, got {stride}")
        pairs = tuple(same_padding(k, d) for k, d in zip(w[2:], dilation, strict=True))
    elif padding == "valid":
        pairs = ((0, 0),) * ndim
    elif isinstance(padding, str):
        raise ValueError(f"{name}: padding is 'same', 'valid' or integers, got {padding!r}")
    else:
        pairs = tuple((p, p) for p in per_dim(name, "padding", padding, ndim))
    if min(min(p) for p in pairs) < 0:
        raise ValueError(f"{name}: padding is not negative, got {padding!r}; use pad to crop")
    compute_dtype = compute_dtype or "float32"
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"{name}: compute_dtype is one of {', '.join(COMPUTE_DTYPES)}, got {compute_dtype!r}")
    return Geometry(stride, pairs, dilation, groups, mode, compute_dtype=compute_dtype)


def check_padding_mode(name: str, shape: tuple[int, ...], geometry: Geometry) -> None:
    """Reflection and wrap-around need enough input, as in torch."""
    if geometry.mode == "zeros":
        return
    for n, (lo, hi) in zip(shape[2:], geometry.padding, strict=True):
        most = {"reflect": n - 1, "circular": n, "replicate": max(lo, hi) if n else 0}.get(geometry.mode, max(lo, hi))
        if max(lo, hi) > most:
            raise ValueError(f"{name}: padding {(lo, hi)} is too wide for {geometry.mode!r} on a dim of length {n}")
