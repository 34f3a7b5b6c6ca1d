"""Messages under computation: the same bits and words on and off, in flight while products run, no hang in errors.

Whether a message is in flight is read from the order of events, never from a clock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.parallel import GradientSync
from hpcpar.parallel.grids import FourD, Grid, Summa
from hpcpar.primitives import under_way
from hpcpar.primitives.repartition import plan
from hpcpar.tensors import PendingTensor
from hpcpar.testing import assert_close_everywhere, collective_assert, mpi_run, operand
from hpcpar.transport import counter

F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()
SAMPLES, WIDTH, HIDDEN = 12, 48, 96
ROLES = {"*.up": "first", "*.down": "second", "*.query": "first", "*.key": "first", "*.back": "second"}
ALL = ("reduce", "scatter", "gather")


class Mlp(nn.Module):
    """Two branches behind one tensor, that a product of their results closes, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: hp.Tensor) -> hp.Tensor:
        y = F.tanh(x)
        x = x + self.back(F.tanh(self.query(y)) * self.key(y))
        return x + self.down(F.gelu(self.up(F.tanh(x))))


def cases() -> list[tuple[Grid, tuple[str, ...]]]:
    if RANKS == 4:
        return [(grid, ALL) for grid in (FourD(2, 2), FourD(1, 2, 2), FourD(1, 1, 2, 2), FourD(1, 4), Summa(2))]
    alone = [(FourD(y=RANKS), ("reduce",)), (FourD(z=RANKS), ("scatter",)), (FourD(z=RANKS), ("gather",))]
    return [*alone, *[(grid, ALL) for grid in (FourD(y=RANKS), FourD(z=RANKS), FourD(x=RANKS))]]


def build(grid: Grid, overlap: tuple[str, ...] | None, keep: str = "source") -> nn.Module:
    hp.manual_seed(5)
    with grid.mesh() as mesh, nn.default_dtype("float64"):
        model = nn.Sequential(Mlp(), Mlp())
    model.mesh = mesh
    return hp.parallelize(model, grid.plan(ROLES, 2, keep=keep, overlap=overlap))


def step(model: nn.Module, grid: Grid, sync: GradientSync, number: int) -> tuple[float, hp.Tensor]:
    rng = np.random.default_rng([6, number])
    x, target = (operand(rng.standard_normal((SAMPLES, WIDTH)), model.mesh, grid.stream(2)) for _ in range(2))
    x.requires_grad_()
    loss = F.mse_loss(model(x), target)
    model.zero_grad()
    sync.backward(loss)
    return loss.item(), x.grad


def train(grid: Grid, overlap: tuple[str, ...] | None, keep: str = "source") -> tuple[dict[str, np.ndarray], dict]:
    """Two steps with momentum: shards of weights, the input's gradient and losses; and what was sent."""
    model = build(grid, overlap, keep)
    sync, optimizer = GradientSync(model), hp.optim.SGD(model, lr=0.1, momentum=0.9)
    losses, kept = [], {}
    with counter.counting() as sent:
        for number in range(2):
            loss, grad = step(model, grid, sync, number)
            losses.append(loss)
            kept[f"input {number}"] = grad.shard.copy()
            optimizer.step()
    kept.update({"losses": np.array(losses), **{name: p.shard.copy() for name, p in model.named_parameters()}})
    model.mesh.free()
    return kept, {key: (tally.messages, round(tally.bytes)) for key, tally in sent.items()}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("grid", "overlap"), cases(), ids=str)
def test_bits_do_not_depend_on_overlap_and_words_do_not_on_the_plan(grid: Grid, overlap: tuple[str, ...]) -> None:
    plain, plain_words = train(grid, None)
    with under_way.overlap(False):
        at_once, words_at_once = train(grid, overlap)
    late, words_late = train(grid, overlap)
    world = grid.mesh()
    collective_assert(world.world, words_late == words_at_once == plain_words, f"{plain_words}, but {words_late}")
    for name, value in plain.items():
        same = np.array_equal(late[name], at_once[name])
        collective_assert(world.world, same, f"{name} has other bits where messages are waited for late")
        assert_close_everywhere(world.world, late[name], value, 1e-11, name)
    world.free()


def events_of(run: Callable[[], object]) -> list[tuple[str, str]]:
    """What happened meanwhile: ("start" | "end", steps of the move) and ("piece", "")."""
    seen: list[tuple[str, str]] = []

    def note(event: str, subject: under_way.Move | None) -> None:
        seen.append((event, "" if subject is None else str(plan(subject.source, subject.target))))

    under_way.observers.append(note)
    try:
        run()
    finally:
        under_way.observers.remove(note)
    return seen


def flights(seen: list[tuple[str, str]], kind: str) -> list[int]:
    """For each move of a kind, the pieces of products between its start and its end."""
    open_moves, found = [], []
    for event, what in seen:
        if event == "start" and kind in what:
            open_moves.append(0)
        elif event == "end" and kind in what:
            found.append(open_moves.pop(0))
        elif event == "piece":
            open_moves = [n + 1 for n in open_moves]
    return found


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("overlap", "kind"), [("reduce", "all_reduce(y)"), ("scatter", "reduce_scatter(dim"), ("gather", "all_gather(dim")]
)
def test_messages_are_in_flight_while_products_run(overlap: str, kind: str) -> None:
    grid = FourD(y=RANKS) if overlap == "reduce" else FourD(z=RANKS)
    model = build(grid, (overlap,))
    sync = GradientSync(model)
    step(model, grid, sync, 0)  # in the first step the order of the weights is learnt
    seen = events_of(lambda: step(model, grid, sync, 1))
    under = flights(seen, kind)
    collective_assert(model.mesh.world, not under_way.flying, "something still flies after backward")
    if overlap == "reduce":
        # up, query or key: the later of the two that share their input starts the message; back takes a product
        assert len(under) >= 3 and all(pieces >= 1 for pieces in under), seen
    elif overlap == "scatter":
        assert len(under) == 10 and sum(pieces >= 1 for pieces in under) >= 9, under
    else:
        # ten forward, ten backward; each weight but the first flies under the product of the one before
        assert len(under) == 20 and under[0] == 0 and all(pieces >= 1 for pieces in under[1:]), under
    with under_way.overlap(False):
        seen = events_of(lambda: step(model, grid, sync, 1))
    assert set(flights(seen, kind)) == {0}, "switched off, every message is waited for at once"
    model.mesh.free()


@pytest.mark.ranks(min=2)
def test_consumers_of_one_tensor_add_up_before_one_message() -> None:
    grid = FourD(y=RANKS)
    model = build(grid, ALL)
    sync = GradientSync(model)
    seen = events_of(lambda: step(model, grid, sync, 0))
    reductions = [what for event, what in seen if event == "start" and "all_reduce(y)" in what]
    assert len(reductions) == 4, "one for query and key together, one for up, in each of two blocks"
    model.mesh.free()


@pytest.mark.ranks(min=2)
def test_a_gradient_on_its_way_is_waited_for_by_who_reads_it() -> None:
    grid = FourD(z=RANKS)
    model = build(grid, ("scatter",))
    kinds, shards = [], []

    def read(parameter: hp.Tensor) -> None:
        kinds.append(type(parameter.grad))
        assert parameter.grad.dtype == np.float64 and parameter.grad.sig is parameter.sig
        assert type(parameter.grad) is kinds[-1], "what is known beforehand is told without a wait"
        shards.append(parameter.grad.shard.copy())
        assert type(parameter.grad) is hp.Tensor

    weight = model[0].up.weight
    weight.on_gradient(read)
    sync = GradientSync(model)
    for _ in range(2):
        with sync.accumulate():  # the second is added to the first
            step(model, grid, sync, 0)
    assert kinds == [PendingTensor, PendingTensor]
    assert np.array_equal(shards[0], shards[1]), "zero_grad was called between the steps"
    first = weight.grad.shard.copy()
    x = operand(np.random.default_rng([6, 0]).standard_normal((SAMPLES, WIDTH)), model.mesh, grid.stream(2))
    with sync.accumulate():
        sync.backward((model(x) * model(x)).sum())
    assert kinds[-1] is PendingTensor and not np.array_equal(weight.grad.shard, first)
    plain = build(grid, None)
    again = GradientSync(plain)
    with again.accumulate():
        step(plain, grid, again, 0)
        x = operand(x.numpy(), plain.mesh, grid.stream(2))
        again.backward((plain(x) * plain(x)).sum())
    assert_close_everywhere(model.mesh.world, weight.grad.shard, plain[0].up.weight.grad.shard, 1e-12)
    for net in (model, plain):
        net.mesh.free()


@pytest.mark.ranks(min=2)
def test_after_an_error_in_backward_or_forward_nothing_flies_and_the_next_step_is_right() -> None:
    grid = FourD(y=RANKS // 2, z=2) if RANKS % 2 == 0 else FourD(z=RANKS)
    model = build(grid, ALL)
    sync = GradientSync(model)
    wanted = step(model, grid, sync, 1)[1].shard.copy()

    def fail(*_: object) -> None:
        raise FloatingPointError("on all ranks")

    hp.autograd.observers.append(lambda node, *_: fail() if node.op.name == "gelu" else None)
    try:
        with pytest.raises(FloatingPointError):
            step(model, grid, sync, 1)
    finally:
        hp.autograd.observers.pop()
    assert not under_way.flying
    sync.discard()
    hook = model[1].down.register_forward_pre_hook(fail)
    with pytest.raises(FloatingPointError):
        step(model, grid, sync, 1)
    hook.remove()
    for _ in range(2):
        again = step(model, grid, sync, 1)[1].shard
        collective_assert(model.mesh.world, np.array_equal(again, wanted), "another gradient after an error")
    model.mesh.free()


@pytest.mark.ranks(min=2)
def test_evaluation_between_steps_keeps_an_order_of_its_own() -> None:
    grid = FourD(z=RANKS)
    results = []
    for overlap in (None, ("gather",)):
        model = build(grid, overlap)
        sync = GradientSync(model)
        x = operand(np.random.default_rng(1).standard_normal((SAMPLES, WIDTH)), model.mesh, grid.stream(2))
        with counter.counting() as sent:
            for number in range(2):
                step(model, grid, sync, number)
                with hp.no_grad():
                    y, z = model(x), model(x)
        assert np.array_equal(y.shard, z.shard)
        results.append((y.shard, {key: (tally.messages, round(tally.bytes)) for key, tally in sent.items()}))
        model.mesh.free()
    assert np.allclose(results[0][0], results[1][0], rtol=1e-12)
    assert results[0][1] == results[1][1], "no weight was gathered in vain"


@pytest.mark.ranks(min=2)
def test_recomputed_blocks_gather_no_weight_in_vain() -> None:
    grid = FourD(z=RANKS)
    results = []
    for overlap in (None, ("gather",)):
        model = build(grid, overlap)
        nn.recompute(model, "1")
        sync = GradientSync(model)
        for number in range(2):  # from the second step on the order of weights is known
            with counter.counting() as sent:
                _, grad = step(model, grid, sync, number)
        results.append((grad.shard.copy(), {key: (t.messages, round(t.bytes)) for key, t in sent.items()}))
        model.mesh.free()
    assert np.allclose(results[0][0], results[1][0], rtol=1e-12)
    assert results[0][1] == results[1][1]


def fail_on_one_rank() -> None:
    grid = FourD(z=2)
    model = build(grid, ALL)
    sync = GradientSync(model)
    step(model, grid, sync, 0)
    if model.mesh.rank == 1:
        model[0].up.weight.on_gradient(lambda _: 1 / 0)
    step(model, grid, sync, 1)


@pytest.mark.spawns_mpi
def test_an_error_on_one_rank_ends_the_job_while_messages_fly() -> None:
    run = mpi_run(2, fail_on_one_rank, timeout=60)  # which raises where the job hangs
    assert run.returncode != 0 and "ZeroDivisionError" in run.transcript()


def test_plans_refuse_overlaps_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="a collection of reduce, scatter, gather, got \\('rescue',\\)"):
        hp.Placement(overlap=("rescue",))
    with pytest.raises(ValueError, match="got 'gather'"):
        hp.Placement(overlap="gather")
    shown = repr(next(iter(FourD(2).plan({"up": "first"}, keep="source", overlap=ALL).values())))
    assert "keep='source'" in shown and "overlap=('reduce', 'scatter', 'gather')" in shown
