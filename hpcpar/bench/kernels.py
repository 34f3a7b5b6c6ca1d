"""The kernels behind the layers of CosmoFlow and of the U-Net, one thread, as shares of the machine's own rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hpcpar import kernels
from hpcpar.bench import cases
from hpcpar.bench.cases import Case
from hpcpar.bench.measure import Measure, in_turns, rate, stopwatch
from hpcpar.bench.options import Options
from hpcpar.models.cosmoflow import FILTERS, STRIDED

ONES = (1, 1, 1)


@dataclass(frozen=True)
class Layer:
    """A convolution: channels, extent of the input, kernel, stride; padded to keep the extent if the kernel is odd."""

    name: str
    channels: int
    filters: int
    edge: int
    kernel: int = 3
    stride: int = 1

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Before and after, per dim."""
        return ((self.kernel // 2, self.kernel // 2) if self.kernel % 2 else (0, 0),) * 3

    @property
    def out(self) -> int:
        """Extent of the output."""
        return (self.edge + sum(self.padding[0]) - self.kernel) // self.stride + 1

    @property
    def work(self) -> float:
        """10^9 additions and multiplications, those with the zeros of the padding included."""
        return 2e-9 * self.kernel**3 * self.channels * self.filters * self.out**3


def layers(case: Case) -> list[Layer]:
    """Return the convolutions of a network, in order; a transposed one is the gradient of the one shown."""
    found, edge, channels = [], case.edge, cases.CHANNELS[case.network]
    if case.network == "cosmoflow":
        for i, filters in enumerate((case.base * f for f in FILTERS), 1):
            layer = Layer(f"CosmoFlow conv{i}", channels, filters, edge, stride=2 if i == STRIDED else 1)
            found.append(layer)
            edge, channels = layer.out, filters
            edge = (edge - 1) // 2 + 1 if edge > 2 else edge
        return found
    for level in range(case.levels + 1):
        name = f"U-Net down{level}" if level < case.levels else "U-Net bottom"
        width = case.base << level
        found += [Layer(f"{name}.conv1", channels, width, edge), Layer(f"{name}.conv2", width, 2 * width, edge)]
        channels, edge = 2 * width, edge // 2
    edge *= 2
    for level in reversed(range(case.levels)):
        out = 2 * case.base << level
        edge *= 2
        found.append(Layer(f"U-Net up{level} (transposed)", channels, channels, edge, kernel=2, stride=2))
        found.append(Layer(f"U-Net merge{level}.conv1", channels + out, out, edge))
        found.append(Layer(f"U-Net merge{level}.conv2", out, out, edge))
        channels = out
    return [*found, Layer("U-Net head", channels, cases.CLASSES, edge, kernel=1)]


def measure(options: Options, gemm: float, copy: float) -> list[Measure]:
    """Return the rate of every kernel; its note is the share of `gemm` (GFLOP/s) or `copy` (GB/s)."""
    random = np.random.default_rng(0)
    found: list[Measure] = []
    for case in cases.networks(options.quick):
        for layer in layers(case):
            found += _convolution(layer, options, random, gemm)
    for name, nbytes, call in _passes_over_memory(options, random):
        seconds = in_turns({name: stopwatch(call, options.least)}, options.rounds(5))
        found.append(_share(rate("kernels", name, seconds[name], 1e-9 * nbytes, "GB/s"), copy))
    return found


def _convolution(layer: Layer, options: Options, random: np.random.Generator, gemm: float) -> list[Measure]:
    k, stride = layer.kernel, (layer.stride,) * 3
    x = _volume(random, layer.channels, layer.edge)
    g = _volume(random, layer.filters, layer.out)
    w = random.standard_normal((k, k, k, layer.channels, layer.filters), np.float32).transpose(4, 3, 0, 1, 2)
    geometry = stride, layer.padding, ONES
    passes = {
        "forward": lambda: kernels.conv_forward(x, w, None, *geometry),
        "backward data": lambda: kernels.conv_backward_data(g, w, x.shape, *geometry),
        "backward weights": lambda: kernels.conv_backward_weight(x, g, w.shape, *geometry),
    }
    seconds = in_turns({name: stopwatch(call, options.least) for name, call in passes.items()}, options.rounds(5))
    shape = f"{layer.channels} -> {layer.filters}, {layer.edge}^3"
    return [
        _share(rate("kernels", f"{layer.name}, {shape}: {name}", took, layer.work, "GFLOP/s"), gemm)
        for name, took in seconds.items()
    ]


def _passes_over_memory(
    options: Options, random: np.random.Generator
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Names, bytes that must be read and written, and calls of the kernels that are bound by memory."""
    edge, weights = (8, 1 << 10) if options.quick else (64, 1 << 24)
    x = _volume(random, 32, edge)
    full, half = x.nbytes, x.nbytes // 8
    shape = f"32 x {edge}^3"
    window = (2,) * 3, (2,) * 3, ONES
    y, index = kernels.max_pool_forward(x, *window)
    moved = full + 2 * half
    yield f"max pooling 2^3, {shape}: forward", moved, lambda: kernels.max_pool_forward(x, *window)
    yield f"max pooling 2^3, {shape}: backward", moved, lambda: kernels.max_pool_backward(y, index, x.shape)
    wide, divisors = ((3,) * 3, (2,) * 3, ONES), [np.full(edge // 2, 3.0)] * 3
    yield f"average pooling 3^3, {shape}: forward", full + half, lambda: kernels.avg_pool_forward(x, *wide, divisors)
    yield (
        f"average pooling 3^3, {shape}: backward", full + half,
        lambda: kernels.avg_pool_backward(y, x.shape, *wide, divisors),
    )  # fmt: skip
    mean, m2 = kernels.channel_moments(x)
    inverse = 1 / np.sqrt(m2 / edge**3 + 1e-5)
    scale = np.ones(32, np.float32)
    yield f"batch norm, {shape}: statistics", full, lambda: kernels.channel_moments(x)
    yield (
        f"batch norm and ReLU, {shape}: normalize", 2 * full,
        lambda: kernels.channel_normalize(x, mean, inverse, scale, scale, 0.0),
    )  # fmt: skip
    yield (
        f"batch norm and ReLU, {shape}: gradient sums", 2 * full,
        lambda: kernels.channel_grad_sums(x, x, mean, inverse, scale, scale, 0.0),
    )  # fmt: skip
    yield (
        f"batch norm and ReLU, {shape}: gradient", 3 * full,
        lambda: kernels.channel_grad_input(x, x, mean, inverse, scale, mean, mean, scale, 0.0),
    )  # fmt: skip
    yield f"leaky ReLU, {shape}: forward", 2 * full, lambda: kernels.leaky_relu(x, 0.01)
    yield f"leaky ReLU, {shape}: backward", 3 * full, lambda: kernels.leaky_relu_backward(x, x, 0.01)
    yield f"GELU, {shape}: forward", 2 * full, lambda: kernels.gelu(x)
    p, g, m, v = (random.standard_normal(weights, np.float32) ** 2 for _ in range(4))
    yield f"AdamW, {weights:,} weights", 7 * p.nbytes, lambda: kernels.adamw_step(p, g, m, v, 10, 1e-6)
    yield f"SGD with momentum, {weights:,} weights", 5 * p.nbytes, lambda: kernels.sgd_step(p, g, m, 1e-6, 0.9)


def _volume(random: np.random.Generator, channels: int, edge: int) -> np.ndarray:
    return random.standard_normal((1, edge, edge, edge, channels), np.float32).transpose(0, 4, 1, 2, 3)


def _share(found: Measure, best: float) -> Measure:
    kind = "product" if found.unit == "GFLOP/s" else "copy"
    return replace(found, note=f"{found.value / best:.0%} of the {kind} rate")
