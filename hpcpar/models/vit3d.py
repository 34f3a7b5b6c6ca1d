"""Vision transformer for volumes (Dosovitskiy et al. 2021, arXiv 2010.11929, in three dims).

Every token sees every other one, wherever the axes of depth, height and width have put it: see `ops.grid_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models.attention import FromHeads, ToHeads
from hpcpar.models.placement import Spread
from hpcpar.models.volume_tokens import (
    Block,
    PatchEmbedding,
    ToVoxels,
    sin_cos_positions,
    small_weights,
    triple,
)
from hpcpar.nn import init
from hpcpar.ops.grid_attention import CONTEXTS
from hpcpar.parallel import Column, Placement, Row
from hpcpar.parallel.plan import Entry
from hpcpar.tensors import Tensor

Lengths = int | Sequence[int]


class GlobalAttention(nn.Module):
    """Self-attention over all tokens of a grid (N, D, H, W, C).

    Attributes
    ----------
    context : {"auto", "ring", "all_to_all", "gather"}
        How a split grid is served; see `functional.grid_attention`.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which queries, keys, weights and values are multiplied; see `nn.set_compute_dtype`.
    """

    compute_dtype = "float32"
    option_choices = {"context": CONTEXTS}

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        for name in "qkv":
            self.add_module(name, ToHeads(heads, width // heads, width, True, small_weights))
        self.o = FromHeads(heads, width // heads, width, True, small_weights)
        self.context = "auto"

    def forward(self, x: Tensor) -> Tensor:
        # heads stand before the last dim of tokens, and are wanted before the first
        q, k, v = (F.permute(layer(x), 0, 3, 1, 2, 4, 5) for layer in (self.q, self.k, self.v))
        mixed = F.grid_attention(q, k, v, context=self.context, compute_dtype=self.compute_dtype)
        return self.o(F.permute(mixed, 0, 2, 3, 1, 4, 5))


class ViT3d(nn.Module):
    """A transformer over the patches of a volume, which segments it or predicts numbers.

    Parameters
    ----------
    in_channels : int
    classes : int, optional
        For segmentation: the result is logits (N, classes, D, H, W).
    outputs : int, optional
        For classification and regression: the result is (N, outputs), from the mean over all tokens. One of `classes`
        and `outputs` is given.
    width, depth, heads : int
        Channels of a token, number of blocks, heads of each; ``width`` is a multiple of ``heads``.
    patch : int or tuple of int
        Edges of a patch in voxels.
    mlp_ratio : float
        Hidden channels of the MLP, in units of width.
    positions : {"sincos", "learned"}
        Fixed waves, for volumes of any size, or a trained parameter for volumes of `size`.
    size : int or tuple of int, optional
        (D, H, W) of the volumes, for learned positions.
    refine : int
        Of a segmentation: so many features of each voxel, and the input itself, go through a 3^3 convolution before
        the classes; 0: tokens are mapped to the classes of their voxels directly.
    dropout : float

    Notes
    -----
    Input (N, in_channels, D, H, W), any extents: volumes are filled up with zeros to whole patches, and what was filled
    up is a token like others.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int | None = None,
        outputs: int | None = None,
        *,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
        patch: Lengths = 8,
        mlp_ratio: float = 4.0,
        positions: str = "sincos",
        size: Lengths | None = None,
        refine: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if (classes is None) == (outputs is None):
            raise ValueError(f"ViT3d takes one of classes and outputs, got {classes} and {outputs}")
        if width % heads:
            raise ValueError(f"ViT3d: {width} channels do not divide into {heads} heads")
        if positions not in ("sincos", "learned") or (positions == "learned") != (size is not None):
            raise ValueError(f"ViT3d: positions are 'sincos', or 'learned' with a size, got {positions!r} and {size}")
        self.in_channels, self.classes, self.patch = in_channels, classes, triple(patch, "patch")
        self.embedding = PatchEmbedding(in_channels, width, self.patch)
        tokens = None if size is None else [-(-n // p) for n, p in zip(triple(size, "size"), self.patch, strict=True)]
        learned = None if tokens is None else init.parameter((*tokens, width), small_weights)
        self.register_parameter("positions", learned)
        self.drop = nn.Dropout(dropout)
        hidden = round(mlp_ratio * width)
        self.blocks = nn.ModuleList(Block(width, GlobalAttention(width, heads), hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.refine = None
        if outputs is not None:
            self.head = nn.Linear(width, outputs)
            return
        self.voxels = ToVoxels(width, refine or classes, self.patch)
        if refine:
            self.refine = nn.Conv3d(refine + in_channels, refine, 3, padding=1, bias=False)
            self.refine_norm = nn.InstanceNorm3d(refine, affine=True, negative_slope=0.0)
            self.head = nn.Conv3d(refine, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes, D, H, W), or (N, outputs).

        Raises
        ------
        ValueError
            x has another shape than the network takes.
        """
        if x.ndim != 5 or x.shape[1] != self.in_channels:
            raise ValueError(f"ViT3d takes (N, {self.in_channels}, D, H, W), got {x.shape}")
        tokens = self.embedding(x)
        if self.positions is not None and self.positions.shape != tokens.shape[1:]:
            raise ValueError(
                f"ViT3d has learned positions of {self.positions.shape[:3]} tokens, not of {tokens.shape[1:4]}"
            )
        tokens = self.drop(tokens + (sin_cos_positions(tokens) if self.positions is None else self.positions))
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        if self.classes is None:
            return F.resolve(self.head(F.mean(tokens, (1, 2, 3))))
        y = self.voxels(tokens, x.shape[2:])
        if self.refine is not None:
            y = self.head(self.refine_norm(self.refine(F.cat([y, x], dim=1))))
        return F.resolve(y)

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return the plan: heads and hidden channels split by `spread.channels`, learned positions like the grid.

        Each half of a block then ends in one reduction. Patches and norms, a small part of the weights, are on every
        rank. Attention serves a split grid as `spread.context` says.
        """
        plan: dict[str, Entry] = {}
        split = tuple(a for a in spread.channels if mesh.shape[a] > 1)
        if split:
            plan |= {f"blocks.*.attention.{name}": Column(split) for name in "qkv"}
            plan |= {"blocks.*.attention.o": Row(split), "blocks.*.mlp.up": Column(split)}
            plan |= {"blocks.*.mlp.down": Row(split)}
            if self.refine is not None:
                plan |= {"refine": Column(split), "head": Row(split)}
        if max(spread.parts(mesh)) > 1:
            plan["blocks.*.attention"] = Placement(options={"context": spread.context})
            if self.positions is not None:
                plan["positions"] = Layout(*spread.space)
        return plan
