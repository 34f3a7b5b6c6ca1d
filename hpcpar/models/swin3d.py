"""Swin transformer for volumes: attention inside windows that shift from block to block, and a U-shaped decoder.

After Liu et al. 2021 (arXiv 2103.14030) and, for the segmentation of volumes, Hatamizadeh et al. 2022 (arXiv
2201.01266). Windows need not end where the blocks of ranks end: `functional.window_partition` brings the tokens of a
window together and `functional.window_merge` takes them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models.attention import FromHeads, ToHeads
from hpcpar.models.placement import Spread
from hpcpar.models.unet3d import DoubleConv
from hpcpar.models.volume_tokens import Block, PatchEmbedding, small_weights, triple, volume
from hpcpar.nn import init
from hpcpar.parallel import Column, Placement, Row
from hpcpar.parallel.plan import Entry
from hpcpar.tensors import Tensor

Lengths = int | Sequence[int]
Sizes = tuple[int, ...]


class WindowedAttention(nn.Module):
    """Self-attention inside windows of a grid of tokens (N, D, H, W, C), with biases of relative positions.

    Parameters
    ----------
    window : tuple of int
        The largest window; a grid that is smaller along a dim has windows of its own length there.
    shifted : bool

    Attributes
    ----------
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which queries, keys, weights and values are multiplied; see `nn.set_compute_dtype`.
    """

    compute_dtype = "float32"

    def __init__(self, width: int, heads: int, window: Sizes, shifted: bool) -> None:
        super().__init__()
        self.window, self.shifted = window, shifted
        for name in "qkv":
            self.add_module(name, ToHeads(heads, width // heads, width, True, small_weights))
        self.bias_table = init.parameter((prod(2 * w - 1 for w in window), heads), small_weights)
        self.o = FromHeads(heads, width // heads, width, True, small_weights)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1:-1]
        window, shift = self.fitted(size)
        tokens = F.window_partition(x, window, shift)
        y = F.window_attention(
            self.q(tokens), self.k(tokens), self.v(tokens), self.bias_table,
            size=size, window_size=window, shift_size=shift, table_window=self.window,
            compute_dtype=self.compute_dtype,
        )  # fmt: skip
        return F.window_merge(self.o(y), window, size, shift)

    def fitted(self, size: Sizes) -> tuple[Sizes, Sizes]:
        """Return window and shift for a grid: where a dim fits into the window, the window is the dim and stays."""
        window = tuple(min(w, n) for w, n in zip(self.window, size, strict=True))
        return window, tuple(w // 2 if self.shifted and w < n else 0 for w, n in zip(window, size, strict=True))


class PatchMerging(nn.Module):
    """From tokens (N, D, H, W, C) to (N, D/2, H/2, W/2, 2C): each 2^3 tokens are normalised and mapped to one.

    A dim of odd length is filled up with zeros. The weight is kept as (2C, 8, C); ``state_dict(numpy=True)`` shows
    torch's (2C, 8C).
    """

    compute_dtype = "float32"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((8, width))
        self.weight = init.parameter((2 * width, 8, width), small_weights)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(F.window_partition(x, 2))
        return F.einsum("nabctx,otx->nabco", tokens, self.weight, compute_dtype=self.compute_dtype)

    def shown_shape(self, name: str) -> tuple[int, ...] | None:
        out, eight, width = self.weight.shape
        return (out, eight * width) if name == "weight" else None


class Swin3d(nn.Module):
    """A hierarchy of window attention that segments volumes.

    Parameters
    ----------
    in_channels, classes : int
    width : int
        Channels of a token of the first stage; doubled from stage to stage.
    depths, heads : sequence of int
        Blocks and heads of each stage; every second block has shifted windows.
    window, patch : int or tuple of int
        Edges of a window in tokens, and of a patch in voxels.
    mlp_ratio : float
        Hidden channels of the MLP, in units of width.
    base : int
        Channels of the convolutions at full resolution.
    batch_norm : bool
    norm_scope : {"all", "sample", "rank"}
        Of the convolutions of the decoder; see `UNet3d`.
    dropout : float

    Notes
    -----
    Input (N, in_channels, D, H, W), output logits (N, classes, D, H, W); any extents. The decoder doubles the extents
    by transposed convolutions and joins the tokens of each stage, at last the input itself.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 3,
        *,
        width: int = 48,
        depths: Sequence[int] = (2, 2, 2),
        heads: Sequence[int] = (3, 6, 12),
        window: Lengths = 7,
        patch: Lengths = 2,
        mlp_ratio: float = 4.0,
        base: int = 24,
        batch_norm: bool = True,
        norm_scope: str = "all",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [width << stage for stage in range(len(depths))]
        if not depths or len(depths) != len(heads) or any(w % h for w, h in zip(widths, heads, strict=True)):
            raise ValueError(
                f"Swin3d takes as many heads as depths, and heads that divide the channels of each stage, got "
                f"{tuple(heads)} for depths {tuple(depths)} and {tuple(widths)} channels"
            )
        self.in_channels, self.classes, self.stages = in_channels, classes, len(depths)
        size, patch = triple(window, "window"), triple(patch, "patch")
        self.embedding = PatchEmbedding(in_channels, width, patch)
        for i, (w, blocks, h) in enumerate(zip(widths, depths, heads, strict=True)):
            if i:
                self.add_module(f"merging{i}", PatchMerging(widths[i - 1]))
            shifts = [j % 2 == 1 for j in range(blocks)]
            made = [Block(w, WindowedAttention(w, h, size, s), round(mlp_ratio * w), dropout) for s in shifts]
            self.add_module(f"stage{i}", nn.Sequential(*made))
            self.add_module(f"norm{i}", nn.LayerNorm(w))
        for i, w in reversed(list(enumerate(widths[:-1]))):
            self.add_module(f"up{i}", nn.ConvTranspose3d(2 * w, w, 2, stride=2, bias=False))
            self.add_module(f"join{i}", DoubleConv(2 * w, w, w, batch_norm, norm_scope))
        self.up = nn.ConvTranspose3d(width, base, patch, stride=patch, bias=False)
        self.join = DoubleConv(base + in_channels, base, base, batch_norm, norm_scope)
        self.head = nn.Conv3d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes, D, H, W).

        Raises
        ------
        ValueError
            x has another shape than the network takes.
        """
        if x.ndim != 5 or x.shape[1] != self.in_channels:
            raise ValueError(f"Swin3d takes (N, {self.in_channels}, D, H, W), got {x.shape}")
        layer, tokens, skips = self._modules, self.embedding(x), []
        for i in range(self.stages):
            tokens = layer[f"stage{i}"](layer[f"merging{i}"](tokens) if i else tokens)
            skips.append(volume(layer[f"norm{i}"](tokens)))
        y = skips.pop()
        for i in reversed(range(self.stages - 1)):
            skip = skips.pop()
            y = layer[f"join{i}"](F.cat([_grown(layer[f"up{i}"], y, skip), skip], dim=1))
        return F.resolve(self.head(self.join(F.cat([_grown(self.up, y, x), x], dim=1))))

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return the plan: heads, hidden channels and the decoder's channels split by `spread.channels`.

        Each half of a block ends in one reduction, as does each pair of convolutions. Embedding and merging of patches
        and the norms, a small part of the weights, are on every rank. Space stays split everywhere: stages with fewer
        windows than ranks leave some of them idle.
        """
        split = tuple(a for a in spread.channels if mesh.shape[a] > 1)
        if not split:
            return {}
        plan: dict[str, Entry] = {f"*.attention.{name}": Column(split) for name in "qkv"}
        plan["*.attention"] = Placement(bias_table=Layout(None, split))
        plan |= {"*.attention.o": Row(split), "*.mlp.up": Column(split), "*.mlp.down": Row(split)}
        return plan | {"join*.conv1": Column(split), "join*.conv2": Row(split), "up*": Row(split)}


def _grown(up: nn.ConvTranspose3d, x: Tensor, like: Tensor) -> Tensor:
    """Multiply the extents of x, and drop what was filled up when they were divided."""
    return F.crop(F.resolve(up(x)), like.shape[2:], (0, 0, 0))
