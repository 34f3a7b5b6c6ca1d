"""3D U-Net for segmentation (Cicek et al. 2016, arXiv 1606.06650), same-padded as in Oyama et al. 2020."""

from __future__ import annotations

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.mesh import Mesh
from hpcpar.models.placement import Spread
from hpcpar.parallel import Column, Row
from hpcpar.parallel.plan import Entry
from hpcpar.tensors import Tensor


class DoubleConv(nn.Module):
    """Twice: 3^3 convolution, batch norm, ReLU."""

    def __init__(self, channels: int, middle: int, out: int, batch_norm: bool, norm_scope: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(channels, middle, 3, padding=1, bias=False)
        self.conv2 = nn.Conv3d(middle, out, 3, padding=1, bias=False)
        for name, filters in (("norm1", middle), ("norm2", out)):
            norm = nn.BatchNorm3d(filters, scope=norm_scope, negative_slope=0.0) if batch_norm else nn.ReLU()
            self.add_module(name, norm)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Return the result for x, or for x and further channels, which are not concatenated."""
        return self.norm2(self.conv2(self.norm1(self.conv1(x, *more))))


class UNet3d(nn.Module):
    """3D U-Net; with the defaults and three classes 19,070,560 parameters.

    Parameters
    ----------
    in_channels, classes : int
    base : int
        Filters of the first convolution; a level has (base, 2 base), doubled with each level.
    levels : int
        Number of max poolings.
    batch_norm : bool
        Without it ReLU follows the convolutions directly.
    norm_scope : {"all", "sample", "rank"}
        Statistics of batch norm: "rank" depends on the partition.
    dropout : float
        Probability of zero at the bottom.

    Notes
    -----
    Input (N, in_channels, D, H, W), output logits (N, classes, D, H, W). Any extents of at least ``2**levels``: where
    pooling dropped a last plane, the transposed convolution puts one back. No convolution has a bias.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 3,
        base: int = 32,
        levels: int = 3,
        batch_norm: bool = True,
        norm_scope: str = "all",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.levels, self.in_channels, self.classes = levels, in_channels, classes
        widths = [base << level for level in range(levels + 1)]
        channels = in_channels
        for level, width in enumerate(widths[:-1]):
            self.add_module(f"down{level}", DoubleConv(channels, width, 2 * width, batch_norm, norm_scope))
            channels = 2 * width
        self.pool = nn.MaxPool3d(2)
        self.bottom = DoubleConv(channels, widths[-1], 2 * widths[-1], batch_norm, norm_scope)
        self.drop = nn.Dropout(dropout)
        channels = 2 * widths[-1]
        for level in reversed(range(levels)):
            out = 2 * widths[level]
            self.add_module(f"up{level}", nn.ConvTranspose3d(channels, channels, 2, stride=2, bias=False))
            self.add_module(f"merge{level}", DoubleConv(channels + out, out, out, batch_norm, norm_scope))
            channels = out
        self.head = nn.Conv3d(channels, classes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes, D, H, W).

        Raises
        ------
        ValueError
            x has another shape than the network takes.
        """
        if x.ndim != 5 or x.shape[1] != self.in_channels or min(x.shape[2:]) < 1 << self.levels:
            raise ValueError(
                f"UNet3d takes (N, {self.in_channels}, D, H, W), extents of at least {1 << self.levels}, got {x.shape}"
            )
        skips = []
        for level in range(self.levels):
            x = self._modules[f"down{level}"](x)
            skips.append(x)
            x = self.pool(x)
        x = self.drop(self.bottom(x))
        for level in reversed(range(self.levels)):
            skip = skips.pop()
            x = F.resolve(self._grow(self._modules[f"up{level}"], x, skip))
            x = self._modules[f"merge{level}"](x, skip)
        return F.resolve(self.head(x))

    @staticmethod
    def _grow(up: nn.ConvTranspose3d, x: Tensor, skip: Tensor) -> Tensor:
        """Double the extents of x, and one more where the skip has an odd extent."""
        return up(x, output_size=skip.shape[2:])

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return the plan: with a split of channels the two convolutions of a block are `Column` and `Row`.

        Space stays split everywhere: blocks that grow empty at the bottom idle, and a gather would cost more than it
        spares. Transposed convolutions take split inputs (`Row`): their result is summed once, before the skip joins.
        """
        split = [a for a in spread.channels if mesh.shape[a] > 1]
        if not split:
            return {}
        axis = split[0]
        return {"*.conv1": Column(axis), "*.conv2": Row(axis), "up*": Row(axis)}
