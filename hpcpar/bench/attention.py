"""The attention kernel beside torch's, and large matrix products by their kernels: one process, one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.bench.measure import Measure, in_turns, missing, rate, ratio, spread, stopwatch
from hpcpar.bench.options import Options
from hpcpar.kernels import Visible

HEADS, WIDTH = 8, 64
LENGTHS = (512, 1024, 2048)
PRODUCTS = {"tokens x weights": (2048, 512, 2048), "gradient of weights": (512, 2048, 2048), "skinny": (64, 16384, 128)}
PASSES = ("forward", "forward and backward")


def measure(options: Options) -> list[Measure]:
    """Return times of attention and their ratios to torch's, and the rates of products in every dtype."""
    found: list[Measure] = []
    for length in (64,) if options.quick else LENGTHS:
        for causal in (False, True):
            found += _pair(length, causal, options)
    for name, shape in PRODUCTS.items():
        found += _products(name, tuple(n // 16 for n in shape) if options.quick else shape, options)
    return found


def _pair(length: int, causal: bool, options: Options) -> list[Measure]:
    random = np.random.default_rng(length)
    arrays = [random.standard_normal((1, length, HEADS, WIDTH), np.float32).transpose(0, 2, 1, 3) for _ in range(4)]
    label = f"attention, {length} tokens, {HEADS} heads of {WIDTH}{', causal' if causal else ''}"
    runs = {f"ours {name}": run for name, run in zip(PASSES, _ours(arrays, causal), strict=True)}
    theirs, why = _theirs(arrays, causal)
    runs |= {f"theirs {name}": run for name, run in zip(PASSES, theirs, strict=False)}
    watches = {name: stopwatch(run, options.least) for name, run in runs.items()}
    seconds = in_turns(watches, options.rounds(9))
    found = []
    for name in PASSES:
        ours = seconds[f"ours {name}"]
        found.append(spread("attention", f"{label}: {name}", ours, "ms", 1e3))
        compared = f"{label}: {name}, hpcpar / torch"
        other = seconds.get(f"theirs {name}")
        found.append(
            missing("attention", compared, "ratio", why) if other is None else ratio("attention", compared, ours, other)
        )
    return found


def _ours(arrays: list[Any], causal: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    query, key, value, g = arrays
    visible, scale = Visible(causal=causal), WIDTH**-0.5

    def forward() -> tuple[Any, Any]:
        return kernels.attention_forward(query, key, value, scale, visible)

    def both() -> tuple[Any, ...]:
        return kernels.attention_backward(g, query, key, value, *forward(), scale, visible)

    return forward, both


def _theirs(arrays: list[Any], causal: bool) -> tuple[tuple[Callable[[], Any], ...], str]:
    """torch's two passes, or none and the reason."""
    try:
        import torch
    except ImportError as error:
        return (), f"torch is not installed: {error}"
    torch.set_num_threads(1)
    *operands, g = (torch.from_numpy(a) for a in arrays)
    leaves = [a.clone().requires_grad_() for a in operands]
    apply = torch.nn.functional.scaled_dot_product_attention

    def forward() -> None:
        with torch.no_grad():
            apply(*operands, is_causal=causal)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        apply(*leaves, is_causal=causal).backward(g)

    return (forward, both), ""


def _products(name: str, shape: tuple[int, int, int], options: Options) -> list[Measure]:
    m, k, n = shape
    random = np.random.default_rng(m)
    a, b = random.standard_normal((m, k), np.float32), random.standard_normal((n, k), np.float32).T
    work = 2e-9 * m * k * n
    label = f"product, {name}, {m} x {k} x {n}"
    runs: dict[str, Callable[[], Any]] = {"NumPy": lambda: a.dot(b)}
    absent = {}
    for dtype in kernels.COMPUTE_DTYPES:
        why = kernels.compute_missing(dtype)
        if why:
            absent[dtype] = why
        else:
            runs[dtype] = lambda dtype=dtype: kernels.matmul(a, b, dtype)
    seconds = in_turns({key: stopwatch(run, options.least) for key, run in runs.items()}, options.rounds(5))
    found = [rate("attention", f"{label}: {key}", took, work, "GFLOP/s") for key, took in seconds.items()]
    return [*found, *[missing("attention", f"{label}: {key}", "GFLOP/s", why) for key, why in absent.items()]]
