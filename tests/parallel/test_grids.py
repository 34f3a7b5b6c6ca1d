"""Grids as plans: an MLP and a transformer block train as on one rank, hold and send what the closed forms say.

Three steps with AdamW and with momentum: a gradient that was not summed over some axis shows in the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.models.attention import FromHeads, ToHeads
from hpcpar.parallel import GradientSync
from hpcpar.parallel.grids import Cube, FourD, Grid, Held, Integrated, Summa, Tesseract, Words
from hpcpar.testing import assert_close_everywhere, collective_assert, mpi_run, operand
from hpcpar.transport import counter

F = hp.functional
SAMPLES, TOKENS, WIDTH, HEADS, DEPTH, HIDDEN = 8, 3, 16, 4, 4, 32
OPTIMIZERS = {
    "AdamW": lambda model: hp.optim.AdamW(model, lr=0.01),
    "momentum": lambda model: hp.optim.SGD(model, lr=0.1, momentum=0.9),
}


def four_d(ranks: int) -> list[FourD]:
    """All ways to share `ranks` out among the four axes."""
    return [FourD(*shape) for shape in product(range(1, ranks + 1), repeat=4) if prod(shape) == ranks]


OF_FOUR: list[Grid] = [
    *[Integrated(4 // n, n, gather) for n in (1, 2, 4) for gather in ("out", "input")],
    Summa(2),
    Tesseract(2, 1),
    *four_d(4),
]
BLOCKS_OF_FOUR: list[Grid] = [
    Integrated(2, 2),
    Integrated(4, 1, "input"),
    Summa(2),
    *[FourD(*shape) for shape in [(2, 2), (1, 2, 2), (2, 1, 1, 2), (1, 1, 2, 2), (4,)]],
]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: hp.Tensor) -> hp.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        projection = nn.init.default_weight_
        self.query, self.key, self.value = (ToHeads(HEADS, DEPTH, WIDTH, False, projection) for _ in range(3))
        self.merge, self.mlp = FromHeads(HEADS, DEPTH, WIDTH, False, projection), Mlp()

    def forward(self, x: hp.Tensor) -> hp.Tensor:
        y = self.norm1(x)
        x = x + self.merge(F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y)))
        return x + self.mlp(self.norm2(x))


MODELS = {"mlp": Mlp, "block": Block}
ROLES = {
    "mlp": {"up": "first", "down": "second"},
    "block": {"norm?": "norm", "mlp.up": "first", "mlp.down": "second"},
}
UNBIASED = {
    "mlp": {},
    "block": {"query": "heads", "key": "heads", "value": "heads", "merge": "merge"},
}


def expected_words(grid: Grid, kind: str, keep: str | None) -> Words:
    """Closed forms of a model whose input needs a gradient; q, k and v are one product."""
    m = SAMPLES * (1 if kind == "mlp" else TOKENS)
    rest = {"bias": True, "keep": keep}
    mlp = grid.words(m, WIDTH, HIDDEN, **rest) + grid.words(m, HIDDEN, WIDTH, second=True, **rest)
    if kind == "mlp":
        return mlp
    heads = grid.words(m, WIDTH, 3 * WIDTH, keep=keep)
    merge = grid.words(m, WIDTH, WIDTH, second=True, keep=keep)
    return grid.norm_words(m, WIDTH) + heads + merge + grid.norm_words(m, WIDTH) + mlp


def build(grid: Grid, kind: str, mesh: hp.Mesh, keep: str | None = None) -> nn.Module:
    hp.manual_seed(3)
    with mesh, nn.default_dtype("float64"):
        model = MODELS[kind]()
    if kind == "block":  # ones and zeros would hide a weight that is taken for another's part
        rng = np.random.default_rng(8)
        for norm in (model.norm1, model.norm2):
            for parameter in norm.parameters():
                nn.state.assign(parameter, rng.standard_normal(WIDTH))
    ndim = 2 if kind == "mlp" else 3
    plan = {**grid.plan(ROLES[kind], ndim, keep=keep), **grid.plan(UNBIASED[kind], ndim, bias=False, keep=keep)}
    return hp.parallelize(model, plan) if mesh.size > 1 else model


def data(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    shape = (SAMPLES, WIDTH) if kind == "mlp" else (SAMPLES, TOKENS, WIDTH)
    return rng.standard_normal(shape), rng.standard_normal(shape)


def trained(grid: Grid, kind: str, mesh: hp.Mesh, optimizer: str, steps: int = 3) -> dict[str, np.ndarray]:
    """Losses and weights after some steps."""
    model = build(grid, kind, mesh)
    layout = grid.stream(2 if kind == "mlp" else 3) if mesh.size > 1 else None
    x, target = (operand(a, mesh, layout) for a in data(kind))
    sync, optimize, losses = GradientSync(model), OPTIMIZERS[optimizer](model), []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        losses.append(loss.item())
        model.zero_grad()
        sync.backward(loss)
        optimize.step()
    return {"losses": np.array(losses), **model.state_dict(numpy=True)}


@cache
def trained_alone(kind: str, optimizer: str) -> dict[str, np.ndarray]:
    alone = hp.Mesh(MPI.COMM_SELF)
    values = trained(FourD(), kind, alone, optimizer)
    alone.free()
    return values


def check(grid: Grid, kind: str, optimizers: Iterable[str] = OPTIMIZERS) -> None:
    """Training, what is held, what is sent. Collective over all ranks."""
    mesh = grid.mesh()
    for optimizer in optimizers:
        got, wanted = trained(grid, kind, mesh, optimizer), trained_alone(kind, optimizer)
        assert wanted["losses"][-1] < wanted["losses"][0]
        for name, value in wanted.items():
            assert_close_everywhere(mesh.world, got[name], value, 1e-10, f"{grid}, {optimizer}: {name}")
    for keep in (None, "source") if grid.weight_words(WIDTH, HIDDEN) else (None,):
        check_words(grid, kind, mesh, keep)
    mesh.free()


def words(sent: dict[tuple[str, str], counter.Tally]) -> dict[tuple[str, str], float]:
    return {key: round(tally.bytes / 8, 6) for key, tally in sent.items()}


def check_words(grid: Grid, kind: str, mesh: hp.Mesh, keep: str | None) -> None:
    model = build(grid, kind, mesh, keep)
    stream = grid.stream(2 if kind == "mlp" else 3)
    x, g = data(kind)
    x = operand(x, mesh, stream, requires_grad=True)
    sync = GradientSync(model)
    with counter.counting() as forward:
        y = model(x)
    collective_assert(mesh.world, y.layout == x.layout, f"{grid}: the block does not close: {y.layout}, {x.layout}")
    with counter.counting() as backward, sync.accumulate():
        y.backward(operand(g, mesh, stream))
    with counter.counting() as synchronisation:
        sync.finish()
    expected = expected_words(grid, kind, keep)
    for phase, sent in zip(Words._fields, (forward, backward, synchronisation), strict=True):
        wanted = {key: round(value, 6) for key, value in getattr(expected, phase).items()}
        collective_assert(mesh.world, words(sent) == wanted, f"{grid}, {phase}: {words(sent)} words, not {wanted}")
    if kind == "mlp":
        got = held(model, x)
        wanted = [grid.held(SAMPLES, WIDTH, HIDDEN), grid.held(SAMPLES, HIDDEN, WIDTH, second=True)]
        collective_assert(mesh.world, got == wanted, f"{grid} holds {got}, not {wanted}")


def held(model: Mlp, x: hp.Tensor) -> list[Held]:
    with hp.no_grad():
        hidden = model.up(x)
        y = model.down(hidden)
    return [
        Held(*[t.shard.size for t in operands])
        for operands in ((x, model.up.weight, hidden), (hidden, model.down.weight, y))
    ]


def check_eight(trained: list[Grid], counted: list[Grid]) -> int:
    """MLPs and blocks that train on eight ranks, and MLPs whose words are counted."""
    for grid in trained:
        check(grid, "mlp")
        check(grid, "block", ["AdamW"])
    for grid in counted:
        check(grid, "mlp", [])
    return len(trained) + len(counted)


@pytest.mark.ranks(exactly=4)
@pytest.mark.parametrize("grid", OF_FOUR, ids=str)
def test_an_mlp_on_four_ranks_trains_as_on_one_and_sends_what_the_papers_say(grid: Grid) -> None:
    check(grid, "mlp")


@pytest.mark.ranks(exactly=4)
@pytest.mark.parametrize("grid", BLOCKS_OF_FOUR, ids=str)
def test_a_transformer_block_on_four_ranks_trains_as_on_one_and_sends_what_the_papers_say(grid: Grid) -> None:
    check(grid, "block")


@pytest.mark.spawns_mpi
@pytest.mark.watchdog(200)
def test_eight_ranks_train_as_one_and_send_what_the_papers_say() -> None:
    trained = [Tesseract(2, 2), Cube(2), FourD(2, 2, 2)]
    counted = [grid for grid in four_d(8) if grid not in trained]
    run = mpi_run(8, check_eight, trained, counted, timeout=180).check()
    assert set(run.results.values()) == {2 + 20}


def test_plans_name_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="one of first, second, heads, .* got 'third'"):
        Summa(2).plan({"up": "third"})
    with pytest.raises(ValueError, match="FourD: y has length 0"):
        FourD(2, 0)
    with pytest.raises(ValueError, match="'out' or 'input', got 'both'"):
        Integrated(2, 2, "both")


def test_a_chain_of_layers_alternates() -> None:
    first, second, third = Cube(2).chain(["a", "b", "c"]).values()
    assert first == third and first.out == second.input and second.out == third.input
    assert first.parameters["weight"] == Layout(("j", "i"), "l") and second.parameters["weight"] == Layout(
        ("l", "i"), "j"
    )


def test_the_literature_counts_transfers_at_64_ranks() -> None:
    """Bian's 6 (q - 1) / q^3 for m = k = n = 1; the cube beats 8 x 8, and [4, 4, 4] beats [8, 8, 1]."""
    n = 64
    cube = Cube(4).words(n, n, n)
    assert sum(sum(bill.values()) for bill in cube) == n * n * 6 * (4 - 1) / 4**3

    def total(grid: Grid, m: int, k: int, n: int) -> float:
        return sum(sum(bill.values()) for bill in grid.words(m, k, n))

    hidden, tokens = 3072, 16 * 512
    assert total(Tesseract(4, 4), tokens, hidden, hidden) < total(Tesseract(8, 1), tokens, hidden, hidden)
