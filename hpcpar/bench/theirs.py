"""The training step of torch, as a contestant: ``python -m hpcpar.bench.theirs CASE WEIGHTS STYLE [RANK RANKS STORE]``.

Networks, names of parameters, loss and optimizer are those of `hpcpar.bench.ours`. STYLE is ``best`` (channels_last_3d,
fused optimizer; the environment raises malloc's thresholds), or torch as users get it: ``channels_last`` or ``plain``.
With RANK it is one process of a data-parallel job over gloo, whose processes meet in the file STORE.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hpcpar.bench import cases, process
from hpcpar.bench.cases import Case
from hpcpar.models.cosmoflow import FILTERS, SLOPE, STRIDED

STYLES = ("best", "channels_last", "plain")


class CosmoFlow(nn.Module):
    """As `hpcpar.models.CosmoFlow`."""

    def __init__(self, width: int, base: int) -> None:
        super().__init__()
        channels, self.pooled = cases.CHANNELS["cosmoflow"], []
        for i, filters in enumerate((base * f for f in FILTERS), 1):
            stride = 2 if i == STRIDED else 1
            self.add_module(f"conv{i}", nn.Conv3d(channels, filters, 3, stride=stride, padding=1, bias=False))
            width = (width - 1) // stride + 1
            self.pooled.append(width > 2)
            width = (width - 1) // 2 + 1 if self.pooled[-1] else width
            channels = filters
        self.fc1 = nn.Linear(channels * width**3, 128 * base)
        self.fc2 = nn.Linear(128 * base, 16 * base)
        self.fc3 = nn.Linear(16 * base, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, pooled in enumerate(self.pooled, 1):
            x = F.leaky_relu(getattr(self, f"conv{i}")(x), SLOPE, inplace=True)
            if pooled:
                x = F.avg_pool3d(x, 3, 2, 1)
        x = F.leaky_relu(self.fc1(x.flatten(1)), SLOPE, inplace=True)
        return self.fc3(F.leaky_relu(self.fc2(x), SLOPE, inplace=True))


class DoubleConv(nn.Module):
    """As the block of `hpcpar.models.UNet3d`."""

    def __init__(self, channels: int, middle: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(channels, middle, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm3d(middle)
        self.conv2 = nn.Conv3d(middle, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm3d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(x)), inplace=True)


class UNet3d(nn.Module):
    """As `hpcpar.models.UNet3d`, for extents that halve without a rest."""

    def __init__(self, base: int, levels: int) -> None:
        super().__init__()
        self.levels, channels = levels, cases.CHANNELS["unet3d"]
        for level in range(levels):
            width = base << level
            self.add_module(f"down{level}", DoubleConv(channels, width, 2 * width))
            channels = 2 * width
        self.bottom = DoubleConv(channels, base << levels, 2 * base << levels)
        channels = 2 * base << levels
        for level in reversed(range(levels)):
            out = 2 * base << level
            self.add_module(f"up{level}", nn.ConvTranspose3d(channels, channels, 2, stride=2, bias=False))
            self.add_module(f"merge{level}", DoubleConv(channels + out, out, out))
            channels = out
        self.head = nn.Conv3d(channels, cases.CLASSES, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in range(self.levels):
            x = getattr(self, f"down{level}")(x)
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = self.bottom(x)
        for level in reversed(range(self.levels)):
            x = torch.cat([getattr(self, f"up{level}")(x), skips.pop()], 1)
            x = getattr(self, f"merge{level}")(x)
        return self.head(x)


class Step:
    """Network, data and optimizer of one case; of a data-parallel job, the share of one process."""

    def __init__(self, case: Case, weights: str, style: str, rank: int = 0, ranks: int = 1) -> None:
        self.case, self.rank = case, rank
        network = CosmoFlow(case.edge, case.base) if case.network == "cosmoflow" else UNet3d(case.base, case.levels)
        state = {name: torch.from_numpy(array) for name, array in np.load(weights).items()}
        network.load_state_dict(state, strict=False)
        strays = set(network.state_dict()) ^ set(state)
        assert all(name.endswith("num_batches_tracked") for name in strays), f"only one side has {sorted(strays)}"
        mine = slice(rank * case.batch // ranks, (rank + 1) * case.batch // ranks)
        x, y = (torch.from_numpy(array[mine]) for array in cases.data(case))
        if style != "plain":
            network = network.to(memory_format=torch.channels_last_3d)
            x = x.contiguous(memory_format=torch.channels_last_3d)
        self.x, self.y, self.parameters = x, y, dict(network.named_parameters())
        self.model = network
        if ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
        fused = {"fused": True} if style == "best" else {}
        self.optimizer = torch.optim.AdamW(network.parameters(), cases.LR, weight_decay=cases.WEIGHT_DECAY, **fused)

    def gradients(self, path: str) -> float:
        """Write the gradients at the present weights; returns the loss of this process."""
        loss = self._backward()
        if self.rank == 0:
            np.savez(path, **{name: p.grad.contiguous().numpy() for name, p in self.parameters.items()})
        self.optimizer.zero_grad()
        return loss

    def step(self) -> float:
        """Take one step; returns seconds."""
        begin = time.perf_counter()
        self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin

    def _backward(self) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.half):
            output = self.model(self.x)
        output = output.float()  # the loss is computed in float32 either way
        loss = F.mse_loss(output, self.y) if self.case.network == "cosmoflow" else F.cross_entropy(output, self.y)
        loss.backward()
        return loss.item()


def main(words: list[str]) -> None:
    """Serve, alone or as one of several processes."""
    torch.set_num_threads(1)
    rank, ranks = (int(words[3]), int(words[4])) if len(words) > 3 else (0, 1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{words[5]}", rank=rank, world_size=ranks)
    step = Step(cases.parse(words[0]), words[1], words[2], rank, ranks)
    process.serve({"gradients": step.gradients, "step": step.step})
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
