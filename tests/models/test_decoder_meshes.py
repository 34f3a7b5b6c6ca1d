"""A decoder on every mesh: twenty steps equal the serial run; what the plan's modes send and keep, by closed forms.

3 or 4 heads, 37 tokens of vocabulary, texts of 7 tokens: nothing divides evenly on 2 to 4 ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn, optim
from hpcpar.models import Decoder, Spread, gpt, llama, place
from hpcpar.parallel import GradientSync
from hpcpar.testing import collective_assert, shared_mesh
from hpcpar.transport import counter

F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()
VOCABULARY, TEXTS, TOKENS, STEPS = 37, 3, 7, 20

TENSOR, SEQUENCE_PARALLEL = Spread(), Spread(sequence_parallel=True)
SHARDED = Spread(sequence_parallel=True, shard_weights=True)
RING, RING_ZIGZAG = Spread(context="ring"), Spread(context="ring", order="zigzag")
ALL_TO_ALL, GATHER_ZIGZAG = Spread(context="all_to_all"), Spread(context="gather", order="zigzag")
RING_SHARDED = replace(RING_ZIGZAG, sequence_parallel=True, shard_weights=True)

Case = tuple[str, dict[str, int], Spread]


def cases(n: int) -> list[Case]:
    """Each mode with one of the two families: at 2 ranks every one, at 4 two at a time, at 3 where nothing is even."""
    if n == 1:
        return [("gpt", {"model": 1}, SHARDED), ("llama", {"sequence": 1}, RING_SHARDED)]
    if n == 4:
        return [
            ("gpt", {"batch": 2, "model": 2}, TENSOR),
            ("llama", {"batch": 2, "model": 2}, SHARDED),
            ("llama", {"sequence": 2, "model": 2}, RING_SHARDED),
            ("gpt", {"sequence": 2, "model": 2}, ALL_TO_ALL),
            ("gpt", {"sequence": 2, "model": 2}, GATHER_ZIGZAG),
            ("gpt", {"batch": 2, "sequence": 2}, RING_SHARDED),
            ("llama", {"model": 4}, SEQUENCE_PARALLEL),
        ]
    both = [
        ("gpt", {"batch": n}, SHARDED),
        ("llama", {"model": n}, TENSOR),
        ("gpt", {"model": n}, SEQUENCE_PARALLEL),
        ("llama", {"sequence": n}, RING_ZIGZAG),
        ("gpt", {"sequence": n}, GATHER_ZIGZAG),
    ]
    if n == 3:
        return both
    further = [
        ("llama", {"batch": n}, TENSOR),
        ("gpt", {"sequence": n}, RING),
        ("llama", {"sequence": n}, ALL_TO_ALL),
        ("gpt", {"sequence": n}, RING_SHARDED),
    ]
    return both + further


def name_of(case: Case) -> str:
    family, axes, spread = case
    flags = [f for f in ("sequence_parallel", "shard_weights") if getattr(spread, f)]
    context = [spread.context, spread.order] if "sequence" in axes else []
    return "-".join([family, *[f"{a}{n}" for a, n in axes.items()], *context, *flags])


def make(family: str) -> Decoder:
    """GPT-2's with 3 heads; Llama's with 4 heads on 2 of keys and values, a window and an untied head."""
    hp.manual_seed(11)
    with nn.default_dtype("float64"):
        if family == "gpt":
            return gpt(VOCABULARY, 12, 2, 3, max_positions=16, init_std=0.2)
        return llama(VOCABULARY, 8, 2, 4, kv_heads=2, head_dim=4, hidden=10, window=5, init_std=0.3)


def batch(step: int, mesh: hp.Mesh, model: Decoder, spread: Spread) -> tuple[hp.Tensor, hp.Tensor]:
    """Inputs and targets, in the order that the model takes."""
    texts = np.random.default_rng(step).integers(0, VOCABULARY, (TEXTS, TOKENS + 1))
    order, layout = model.token_order(TOKENS), spread.on(mesh).tokens
    return tuple(hp.tensor(t[:, order], mesh=mesh, layout=layout) for t in (texts[:, :-1], texts[:, 1:]))


def loss_of(model: Decoder, inputs: hp.Tensor, targets: hp.Tensor) -> hp.Tensor:
    return F.cross_entropy(model(inputs).transpose(1, 2), targets)


def train(
    mesh: hp.Mesh, spread: Spread, family: str, steps: int = STEPS
) -> tuple[list[float], Decoder, optim.Optimizer]:
    """AdamW for the one family, SGD with momentum for the other."""
    with mesh:
        model = make(family)
        place(model, mesh, spread)
    sync = GradientSync(model)
    optimizer = optim.AdamW(model, lr=1e-2) if family == "gpt" else optim.SGD(model, lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(step % 4, mesh, model, spread))
        sync.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model, optimizer


@cache
def serial(family: str) -> tuple[list[float], dict[str, np.ndarray]]:
    mesh = hp.Mesh(MPI.COMM_SELF, batch=1)
    losses, model, _ = train(mesh, Spread(), family)
    result = losses, model.state_dict(numpy=True)
    mesh.free()
    return result


@pytest.mark.parametrize("case", cases(RANKS), ids=name_of)
def test_twenty_steps_equal_the_serial_run(case: Case) -> None:
    family, axes, spread = case
    expected, weights = serial(family)
    assert expected[-4] < 0.8 * expected[0], "the serial run learns"
    losses, model, _ = train(shared_mesh(**axes), spread, family)
    np.testing.assert_allclose(losses, expected, rtol=1e-10, atol=0)
    for name, value in model.state_dict(numpy=True).items():
        np.testing.assert_allclose(value, weights[name], rtol=1e-8, atol=1e-10, err_msg=name)


# ---- what is sent


def placed(family: str, spread: Spread, **axes: int) -> tuple[hp.Mesh, Decoder]:
    mesh = shared_mesh(**axes)
    with mesh:
        model = make(family)
        place(model, mesh, spread)
    return mesh, model


def messages_of_step(mesh: hp.Mesh, model: Decoder, spread: Spread) -> tuple[dict, dict, float]:
    """Messages along `model` of forward and of backward, and the bytes of one all-reduce of the stream."""
    stream_bytes = 2 * (mesh.shape["model"] - 1) / mesh.shape["model"] * TEXTS * TOKENS * model.config.width * 8
    found = []
    inputs, targets = batch(0, mesh, model, spread)
    with counter.counting() as sent:
        logits = model(inputs)
    found.append(_large(sent))
    loss = F.cross_entropy(logits.transpose(1, 2), targets)
    with counter.counting() as sent:
        loss.backward()
    found.append(_large(sent))
    return *found, stream_bytes


def _large(sent: dict) -> dict[str, counter.Tally]:
    """What was sent along `model`, by kind; the check of positions is one number."""
    return {kind: t for (kind, axis), t in sent.items() if axis == "model" and t.bytes > 16 * t.messages}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tensor_parallel_sums_once_in_each_half_block_and_each_direction(family: str) -> None:
    if family == "llama" and RANKS != 2:
        pytest.skip("2 heads of keys and values are split by 2 ranks")
    mesh, model = placed(family, TENSOR, model=RANKS)
    forward, backward, stream = messages_of_step(mesh, model, TENSOR)
    halves = 2 * model.config.layers
    assert list(forward) == list(backward) == ["all_reduce"]
    # forward the embedding too, whose vocabulary is split; backward the gradient of the head's input instead
    assert forward["all_reduce"].messages == backward["all_reduce"].messages == halves + 1
    assert forward["all_reduce"].bytes == pytest.approx((halves + 1) * stream)
    assert backward["all_reduce"].bytes == pytest.approx((halves + 1) * stream)


@pytest.mark.ranks(min=2)
def test_sequence_parallel_moves_the_same_bytes_as_gathers_and_scatters() -> None:
    mesh, model = placed("gpt", SEQUENCE_PARALLEL, model=RANKS)
    forward, backward, stream = messages_of_step(mesh, model, SEQUENCE_PARALLEL)
    halves = 2 * model.config.layers
    for direction, kinds in (("forward", forward), ("backward", backward)):
        assert sorted(kinds) == ["all_gather", "reduce_scatter"], direction
        assert kinds["all_gather"].messages == kinds["reduce_scatter"].messages == halves + 1, direction
        total = sum(mesh.world.gather_objects(kinds["all_gather"].bytes + kinds["reduce_scatter"].bytes))
        assert total == pytest.approx((halves + 1) * stream * RANKS), direction


@pytest.mark.ranks(min=2)
def test_biases_are_added_once() -> None:
    """With weights of zero the logits are the biases, however many ranks could add them."""
    for spread in (TENSOR, SEQUENCE_PARALLEL):
        mesh, model = placed("gpt", spread, model=RANKS)
        for name, parameter in model.named_parameters():
            parameter.shard[...] = 0.0 if name.endswith("weight") and "embedding" not in name else 1.0
            parameter.changed()
        stream: list[hp.Tensor] = []
        model.norm.register_forward_pre_hook(lambda module, args, seen=stream: seen.append(args[0]))
        with hp.no_grad():
            model(batch(0, mesh, model, spread)[0])
        # two embeddings of ones, and the biases of attention and hidden layer in both blocks
        assert np.array_equal(stream[0].numpy(), np.full((TEXTS, TOKENS, 12), 2.0 + 4.0))


# ---- what is kept


def elements(tensors: Any) -> int:
    return sum(t.shard.size for t in tensors)


@pytest.mark.ranks(min=2)
def test_activations_between_the_split_parts_are_divided_by_sequence_parallelism() -> None:
    held = {}
    for spread in (TENSOR, SEQUENCE_PARALLEL):
        mesh, model = placed("gpt", spread, model=RANKS)
        sizes: list[int] = []
        for block in model.blocks:
            for module in (block, block.norm1, block.norm2):
                module.register_forward_hook(lambda module, args, result, s=sizes: s.append(result.shard.size))
        model(batch(0, mesh, model, spread)[0])
        held[spread] = mesh.world.gather_objects(sum(sizes))
    whole = 6 * TEXTS * TOKENS * 12
    assert held[TENSOR] == [whole] * RANKS
    assert sum(held[SEQUENCE_PARALLEL]) == whole


@pytest.mark.ranks(exactly=(2, 4))
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_parameters_gradients_and_optimizer_state_are_divided_as_the_plan_says(family: str) -> None:
    axes = {"batch": 2, "model": RANKS // 2}
    mesh = shared_mesh(**axes)
    _, model, optimizer = train(mesh, SHARDED, family, steps=1)
    small = {n for n, p in model.named_parameters() if p.ndim == 1 or "bias" in n or "position" in n}
    matrices = [p for n, p in model.named_parameters() if n not in small]
    split_kv = model.config.kv_heads % mesh.shape["model"] == 0 or model.config.kv_heads == model.config.heads
    collective_assert(mesh.world, split_kv, "keys and values are split here")
    total = sum(mesh.world.gather_objects(elements(matrices)))
    assert total == sum(p.numel() for p in matrices), "each element of a matrix is on one rank"
    assert elements(matrices) <= 1.4 * sum(p.numel() for p in matrices) / RANKS, "and they are shared out evenly"
    for name, parameter in model.named_parameters():
        states = [t for t in optimizer.state[name].values() if isinstance(t, hp.Tensor)]
        assert states and all(t.shard.size == parameter.shard.size for t in states), name
    assert all(p.keep == "source" for p in matrices)


@pytest.mark.ranks(min=2)
def test_sharded_weights_are_gathered_again_in_backward_and_their_gradients_scattered() -> None:
    spread = Spread(shard_weights=True)
    mesh, model = placed("gpt", spread, batch=RANKS)
    inputs, targets = batch(0, mesh, model, spread)
    with counter.counting() as sent:
        loss = loss_of(model, inputs, targets)
    gathers = sent["all_gather", "batch"].messages
    matrices = [p for n, p in model.named_parameters() if p.keep == "source" and n.endswith("weight")]
    assert gathers == len(matrices) + 1, "the tied embedding is used twice"
    with counter.counting() as sent:
        loss.backward()
    assert sent["all_gather", "batch"].messages == gathers - 1, "the embedding itself needs no weight in backward"
    assert sent["reduce_scatter", "batch"].messages == len(matrices)
    assert all(p.grad.sig is p.sig for p in matrices)


# ---- under observation


@pytest.mark.parametrize("case", cases(RANKS)[1::3], ids=name_of)
def test_the_checked_mode_finds_nothing_to_object_to(case: Case) -> None:
    family, axes, spread = case
    with hp.checked() as check:
        train(shared_mesh(**axes), spread, family, steps=1)
    assert len(check.log) > 60
