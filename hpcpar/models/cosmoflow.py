"""CosmoFlow: cosmological parameters from the distribution of matter, after Oyama et al. 2020 (arXiv 2007.12856).

The network is the one of that paper's public configuration: 3^3 convolutions without bias, average pooling of 3^3 with
stride 2 and padding 1 (padding counted, as torch's default), leaky ReLU, and three fully connected layers.
"""

from __future__ import annotations

from math import log2

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models.placement import Spread
from hpcpar.parallel import Column, Row
from hpcpar.parallel.plan import Entry
from hpcpar.tensors import Tensor

FILTERS = (1, 2, 4, 8, 16, 16, 16)
"""Filters of the convolutions, in units of those of the first."""
STRIDED = 4
"""The convolution with stride 2."""
SLOPE = 0.01


class CosmoFlow(nn.Module):
    """Seven convolutions and three fully connected layers: 9,437,636 parameters by default, at any width from 64 on.

    Parameters
    ----------
    width : int
        Edge of the input cube: 128, 256 and 512 are the variants of the paper. Average pooling follows each convolution
        whose output is wider than 2.
    in_channels, outputs : int
        Redshifts, and cosmological parameters.
    batch_norm : bool
        Before each leaky ReLU of the convolutions.
    norm_scope : {"all", "sample", "rank"}
    dropout : float
        Probability of zero before each fully connected layer.
    base : int
        Filters of the first convolution; everything else is a multiple of it.
    norm_momentum : float
        Of the running statistics; 0.001 is the paper's, for long runs.

    Notes
    -----
    Input (N, in_channels, width, width, width), output (N, outputs). Weights are Glorot uniform, biases of the fully
    connected layers 0.1.
    """

    def __init__(
        self,
        width: int = 128,
        in_channels: int = 4,
        outputs: int = 4,
        batch_norm: bool = False,
        norm_scope: str = "all",
        dropout: float = 0.2,
        base: int = 16,
        norm_momentum: float = 0.001,
    ) -> None:
        super().__init__()
        if width < 8:
            raise ValueError(f"CosmoFlow takes cubes of at least 8^3, got width {width}")
        self.width, self.in_channels = width, in_channels
        self.inputs: list[int] = []  # width of the input of each convolution
        self.pooled: list[bool] = []
        channels = in_channels
        for i, filters in enumerate((base * f for f in FILTERS), 1):
            stride = 2 if i == STRIDED else 1
            conv = nn.Conv3d(channels, filters, 3, stride=stride, padding=1, bias=False)
            nn.init.xavier_uniform_(conv.weight)
            self.add_module(f"conv{i}", conv)
            if batch_norm:
                norm = nn.BatchNorm3d(filters, momentum=norm_momentum, scope=norm_scope, negative_slope=SLOPE)
                self.add_module(f"norm{i}", norm)
            self.inputs.append(width)
            width = (width - 1) // stride + 1
            self.pooled.append(width > 2)
            if self.pooled[-1]:
                fused = None if batch_norm else SLOPE  # the activation is taken along by the norm, else by the pooling
                self.add_module(f"pool{i}", nn.AvgPool3d(3, stride=2, padding=1, negative_slope=fused))
                width = (width - 1) // 2 + 1
            channels = filters
        self.batch_norm = batch_norm
        self.act = nn.LeakyReLU(SLOPE)
        self.drop = nn.Dropout(dropout)
        features = channels * width**3
        self.fc1 = nn.Linear(features, 128 * base, in_dims=(channels, width, width, width))
        self.fc2 = nn.Linear(128 * base, 16 * base)
        self.fc3 = nn.Linear(16 * base, outputs)
        for layer in (self.fc1, self.fc2, self.fc3):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs) from volumes (N, in_channels, width, width, width).

        Raises
        ------
        ValueError
            x has another shape than the network takes.
        """
        if x.shape[1] != self.in_channels or any(n != self.width for n in x.shape[2:]):
            raise ValueError(f"CosmoFlow takes (N, {self.in_channels}, {self.width}^3), got {x.shape}")
        for i, pooled in enumerate(self.pooled, 1):
            x = self._modules[f"conv{i}"](x)
            if self.batch_norm:
                x = self._modules[f"norm{i}"](x)
            elif not pooled:
                x = self.act(x)
            if pooled:
                x = self._modules[f"pool{i}"](x)
        x = self.act(self.fc1(self.drop(x)))
        x = self.act(self.fc2(self.drop(x)))
        return F.resolve(self.fc3(self.drop(x)))

    def last_partitioned_pooling(self, groups: int, min_width: int | None = None) -> int:
        """Return the last pooling with split space, the paper's log2(width) - log2(max(groups, min_width)) + 1."""
        return int(log2(self.width) - log2(max(groups, min_width or groups))) + 1

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return the plan: filters split in turn by output and input, and by the axes of space where that is gathered.

        Layers alternate between `Column` and `Row`, so that one all-reduce serves two of them. Space is given up where
        the paper's rule says so, or before: at the first layer with more weights than numbers in and out. From there on
        the ranks that shared space share the filters: what is gathered there is small, and neither the weights nor
        their optimizer state, most of them in these layers, are held twice or summed over these ranks.
        """
        names = [f"conv{i}" for i in range(1, 8)] + ["fc1", "fc2", "fc3"]
        split = [a for a in spread.channels if mesh.shape[a] > 1]
        space = [a for axes in spread.space for a in axes if mesh.shape[a] > 1]
        gather = self._gathered_at(spread.parts(mesh))
        plan: dict[str, Entry] = {}
        for i, name in enumerate(names):
            row, layout = i % 2 == 1, None
            if name == gather:
                split = mesh.sort([*split, *space])
                layout = Layout(spread.batch, tuple(split) if row else None)
            if split:
                plan[name] = (Row if row else Column)(tuple(split), input=layout)
        return plan

    def _gathered_at(self, parts: tuple[int, ...]) -> str | None:
        """Name of the layer before which space is gathered."""
        if max(parts) == 1:
            return None
        last = self.last_partitioned_pooling(max(parts))
        for i, width in enumerate(self.inputs, 1):
            conv = self._modules[f"conv{i}"]
            result = ((width - 1) // conv.stride[0] + 1) ** 3 * conv.out_channels
            if i > last or conv.weight.sig.size > width**3 * conv.in_channels + result:
                return f"conv{i}"
        return "fc1"
