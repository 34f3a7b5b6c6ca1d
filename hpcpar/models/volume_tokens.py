"""What transformers of volumes share: patches to tokens and back, positions, the layers of a block.

Tokens stay a grid (N, D, H, W, C), so that the axes which split depth, height and width of a volume split the same dims
of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hpcpar import functional as F
from hpcpar import kernels, nn
from hpcpar.layout.layout import Layout
from hpcpar.nn import init
from hpcpar.signature import signature
from hpcpar.tensors import Tensor
from hpcpar.transport.device import like as place

STD = 0.02
"""Standard deviation of the initial weights of linear layers, cut off at 2 (Dosovitskiy et al. 2021)."""


def small_weights(tensor: Tensor) -> Tensor:
    """Fill with normal numbers of standard deviation `STD`, none beyond two of them."""
    return init.trunc_normal_(tensor, std=STD, a=-2 * STD, b=2 * STD)


def triple(value: int | Sequence[int], what: str) -> tuple[int, int, int]:
    """Return one length for each of depth, height and width.

    Raises
    ------
    ValueError
        Another number of them, or one below 1.
    """
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3 or min(values) < 1:
        raise ValueError(f"{what} is one positive number, or three of them, got {value!r}")
    return values


def volume(tokens: Tensor) -> Tensor:
    """View tokens (N, D, H, W, C) as a volume (N, C, D, H, W)."""
    return F.permute(tokens, 0, 4, 1, 2, 3)


def grid(x: Tensor) -> Tensor:
    """View a volume (N, C, D, H, W) as tokens (N, D, H, W, C)."""
    return F.permute(x, 0, 2, 3, 4, 1)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel: from a volume (N, C, D, H, W) to tokens (N, D', H', W', width).

    Volumes are filled up with zeros at the end to whole patches. No message where borders of blocks are borders of
    patches.
    """

    def __init__(self, channels: int, width: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch = patch
        self.conv = nn.Conv3d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        missing = [m for n, p in zip(x.shape[:1:-1], self.patch[::-1], strict=True) for m in (0, -n % p)]
        return grid(self.conv(F.pad(x, missing)))


class ToVoxels(nn.Module):
    """A linear layer from tokens (N, D', H', W', width) to the voxels of their patches, a volume (N, outputs, D, H, W).

    The weight is kept as (voxels of a patch, outputs, width); ``state_dict(numpy=True)`` shows torch's
    (voxels * outputs, width).
    """

    compute_dtype = "float32"

    def __init__(self, width: int, outputs: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch = patch
        self.weight = init.parameter((prod(patch), outputs, width), small_weights)
        self.bias = init.parameter((prod(patch), outputs), init.zeros_)

    def forward(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Return the volume of `size`; voxels of patches that hang over its ends are dropped."""
        y = F.einsum("nabcx,tox->nabcto", tokens, self.weight, compute_dtype=self.compute_dtype) + self.bias
        return volume(F.window_merge(y, self.patch, size))

    def shown_shape(self, name: str) -> tuple[int, ...]:
        voxels, outputs, width = self.weight.shape
        return (voxels * outputs, width) if name == "weight" else (voxels * outputs,)


class MLP(nn.Module):
    """Two linear layers with GELU between them, over the last dim."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for layer in (self.up, self.down):
            small_weights(layer.weight)
            init.zeros_(layer.bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to what came in.

    Parameters
    ----------
    width : int
        Channels of a token.
    attention : Module
        From tokens (N, D, H, W, width) to what is added to them.
    hidden : int
        Channels inside the MLP.
    dropout : float
    """

    def __init__(self, width: int, attention: nn.Module, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.mlp = MLP(width, hidden, dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.resolve(x + self.drop(self.attention(self.norm1(x))))
        return F.resolve(x + self.drop(self.mlp(self.norm2(x))))


def sin_cos_positions(tokens: Tensor) -> Tensor:
    """Return sines and cosines of the positions in a grid (N, D, H, W, C): (D, H, W, C), split like the grid.

    Each dim has a third of the channels: sines of ``position / 10000 ** (i / m)`` for i in ``range(m)``, and cosines,
    with ``m = C // 6``; channels that are left are zero. Any size of grid will do, and nothing is trained (Vaswani et
    al. 2017, for three dims).
    """
    sig = tokens.sig
    own = signature(sig.mesh, sig.shape[1:], Layout(*sig.dims[1:-1]))
    if sig.mesh.virtual:
        return Tensor(kernels.outline.empty(own.local_shape, tokens.dtype), own)
    channels = own.shape[-1]
    m = channels // 6
    table = np.zeros(own.local_shape, tokens.dtype)
    rates = 10000.0 ** (-np.arange(m) / max(m, 1))
    for d, (a, b) in enumerate(own.box[:-1]):
        angle = np.arange(a, b)[:, None] * rates
        waves = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
        shape = [1, 1, 1, 2 * m]
        shape[d] = b - a
        table[..., 2 * m * d : 2 * m * (d + 1)] = waves.reshape(shape)
    return Tensor(place(table, tokens.shard), own)
