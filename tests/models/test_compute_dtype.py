"""Products in two bytes: no layer of a network leaves them out, and a split network has the results of a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.kernels import ROUNDINGS, compute_missing
from hpcpar.layout.layout import Layout
from hpcpar.models import CosmoFlow, SpaceTime, SpaceTimeConfig, Spread, Swin3d, UNet3d, ViT3d, gpt, llama, place
from hpcpar.models.cache import Cache
from hpcpar.ops import core
from hpcpar.testing import collective_assert, shared_mesh

RANKS = MPI.COMM_WORLD.Get_size()
DTYPE = "bfloat16"
pytestmark = [
    pytest.mark.skipif(bool(compute_missing(DTYPE)), reason=compute_missing(DTYPE)),
    pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning"),  # how a processor multiplies such numbers
]

TEXT = {"vocab_size": 32, "width": 16, "layers": 2, "heads": 4, "max_positions": 12, "init_std": 0.3}
VIDEO = SpaceTimeConfig(3, 2, frames=5, places=7, width=16, layers=1, heads=4, init_std=0.3)
GRID = (2, 1, 8, 8, 8)

# how to make a network, and the shape of its input; two numbers are texts
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt, tied": (lambda: gpt(**TEXT), (2, 12)),
    "gpt, untied": (lambda: gpt(**TEXT, tied=False), (2, 12)),
    "llama": (lambda: llama(**TEXT, kv_heads=2), (2, 12)),
    "vit": (lambda: ViT3d(1, 2, width=12, depth=1, heads=4, patch=2), GRID),
    "vit, refined": (lambda: ViT3d(1, 2, width=12, depth=1, heads=4, patch=2, refine=3), GRID),
    "vit, numbers": (lambda: ViT3d(1, outputs=3, width=12, depth=1, heads=4, patch=2), GRID),
    "swin": (lambda: Swin3d(1, 2, width=8, depths=(2, 2), heads=(2, 4), window=3, base=4, batch_norm=False), GRID),
    "space and time": (lambda: SpaceTime(VIDEO), (2, 5, 7, 3)),
    "unet": (lambda: UNet3d(1, 2, 4, 2), GRID),
    "cosmoflow": (lambda: CosmoFlow(16, 1), (2, 1, 16, 16, 16)),
}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference, relative to that of `b`."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class Products:
    """Writes down each operation that multiplies, and by how much it rounds before."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []

    def before(self, op: core.Op, rule: core.Rule, tensors: tuple[hp.Tensor, ...]) -> None:
        if op.flops(rule):
            self.found.append((op.name, op.rounding(rule)))

    def after(self, *_: Any) -> None:
        """Nothing more is to be known."""

    def __enter__(self) -> Products:
        core.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        core.observers.remove(self)


def make(name: str, mesh: hp.Mesh, dtype: str, spread: Spread) -> nn.Module:
    hp.manual_seed(4)
    with mesh:
        model = NETWORKS[name][0]()
    # first weights are so small that attention is a mean and the result hardly more than a bias
    grow = 8 if name.startswith(("vit", "swin")) else 1
    for path, p in model.named_parameters():
        p.set_data(p.shard * np.float32(0 if path.endswith("bias") else grow if "norm" not in path else 1))
    place(model, mesh, spread)
    nn.set_compute_dtype(model, dtype)
    return model


def input_of(name: str, mesh: hp.Mesh, spread: Spread) -> hp.Tensor:
    shape, spread = NETWORKS[name][1], spread.on(mesh)
    rng = np.random.default_rng(7)
    if len(shape) == 2:
        return hp.tensor(rng.integers(0, 32, shape), mesh, spread.tokens)
    layout = spread.volume if len(shape) == 5 else Layout()
    return hp.tensor(rng.standard_normal(shape).astype(np.float32), mesh, layout)


@pytest.mark.serial
@pytest.mark.parametrize("name", NETWORKS)
def test_no_product_of_a_network_is_left_out(name: str) -> None:
    mesh = shared_mesh(batch=1)
    for dtype in ("float32", DTYPE):
        model = make(name, mesh, dtype, Spread())
        with Products() as products:
            model(input_of(name, mesh, Spread()))
        assert len(products.found) > 4
        assert [found for found in products.found if found[1] != ROUNDINGS[dtype]] == []


@pytest.mark.serial
@pytest.mark.parametrize("name", ["gpt, tied", "llama"])
def test_generating_with_a_cache_rounds_as_the_whole_text_does(name: str) -> None:
    mesh = shared_mesh(batch=1)
    tokens = input_of(name, mesh, Spread())
    found = {}
    for dtype in ("float32", DTYPE):
        model, cache = make(name, mesh, dtype, Spread()).eval(), Cache(2, 12)
        with hp.no_grad():
            whole = model(tokens).numpy()
            with Products() as products:
                parts = [
                    model(tokens[:, a:b], positions=np.arange(a, b), cache=cache).numpy() for a, b in ((0, 9), (9, 12))
                ]
        assert {rounding for _, rounding in products.found} == {ROUNDINGS[dtype]}
        found[dtype] = whole, np.concatenate(parts, axis=1)
    (exact, by_parts), (whole, parts) = found["float32"], found[DTYPE]
    assert distance(by_parts, exact) < 1e-5
    assert ROUNDINGS[DTYPE] / 10 < distance(whole, exact) < 10 * ROUNDINGS[DTYPE]
    assert distance(parts, whole) < distance(whole, exact)


@pytest.mark.serial
def test_the_table_of_a_tied_decoder_has_the_name_of_its_embedding() -> None:
    mesh = shared_mesh(batch=1)
    with mesh:
        tied, untied = gpt(**TEXT), gpt(**TEXT, tied=False)
    assert "embedding" in nn.set_compute_dtype(tied, DTYPE)
    assert "embedding" not in nn.set_compute_dtype(tied, DTYPE, keep=["embedding"])
    names = nn.set_compute_dtype(untied, DTYPE)
    assert "head" in names and "embedding" not in names


SPLITS = [
    ("vit", {"depth": RANKS}, {"context": "ring"}),
    ("vit", {"depth": RANKS}, {"context": "gather"}),
    ("vit", {"model": RANKS}, {}),
    ("swin", {"depth": RANKS}, {}),
    ("swin", {"model": RANKS}, {}),
    ("space and time", {"sequence": RANKS}, {"context": "switch"}),
    ("space and time", {"sequence": RANKS}, {"context": "ring"}),
    ("space and time", {"model": RANKS}, {}),
    ("gpt, tied", {"model": RANKS}, {"sequence_parallel": True}),
    ("gpt, tied", {"sequence": RANKS}, {"context": "ring"}),
]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("name", "split", "options"), SPLITS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_a_split_network_has_the_results_of_a_whole_one(name: str, split: dict, options: dict) -> None:
    """A ring rounds the weights of a block before it knows those of the others; all else rounds the same numbers."""
    alone, mesh = shared_one(), shared_mesh(**split)

    def results(mesh: hp.Mesh, dtype: str, spread: Spread) -> dict[str, np.ndarray]:
        model = make(name, mesh, dtype, spread)
        y = model(input_of(name, mesh, spread))
        hp.functional.mean(y * y).backward()
        return {"result": y.numpy(), **{n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}}

    exact, whole = (results(alone, dtype, Spread()) for dtype in ("float32", DTYPE))
    parts = results(mesh, DTYPE, Spread(**options))
    assert parts.keys() == whole.keys()
    for names in (["result"], exact.keys() - {"result"}):  # all gradients together: some of them cancel out
        full, rounded, got = (np.concatenate([a[n].ravel() for n in sorted(names)]) for a in (exact, whole, parts))
        away, apart = distance(rounded, full), distance(got, rounded)
        limit = away if options.get("context") == "ring" else away / 10
        good = ROUNDINGS[DTYPE] / 10 < away < 20 * ROUNDINGS[DTYPE] and apart < limit
        collective_assert(mesh.world, good, f"{sorted(names)[0]}: {away:.2g} {apart:.2g}")


def shared_one() -> hp.Mesh:
    """A mesh of this rank alone."""
    if not _alone:
        _alone.append(hp.Mesh(MPI.COMM_SELF, batch=1))
    return _alone[0]


_alone: list[hp.Mesh] = []
