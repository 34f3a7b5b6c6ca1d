"""A transformer block under data, tensor and sequence parallelism: twenty steps with momentum equal the serial run.

The block is written once; the layouts of its weights and of three activations decide how it is parallel. 5 samples of 7
tokens and 4 heads: nothing divides evenly on 2 to 4 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.layout.layout import Layout
from hpcpar.testing import collective_assert, operand, shared_mesh
from hpcpar.transport import counter

F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()
SAMPLES, TOKENS, WIDTH, HEADS, DEPTH, HIDDEN = 5, 7, 8, 4, 2, 12


@dataclass(frozen=True)
class Plan:
    """Layouts: `stream` of the residual stream, `heads` and `hidden` of what is split inside a branch."""

    stream: Layout = Layout()
    weights: Layout = Layout()
    back: Layout = Layout()
    up: Layout = Layout()
    down: Layout = Layout()
    heads: Layout | None = None
    hidden: Layout | None = None
    returned: Layout | None = None


SERIAL = Plan()
DATA = Plan(stream=Layout("batch"))
TENSOR = Plan(
    stream=Layout("batch"),
    weights=Layout("model"),
    back=Layout(None, "model"),
    up=Layout("model"),
    down=Layout(None, "model"),
)
SEQUENCE = Plan(
    stream=Layout("batch", "model"),
    weights=Layout("model"),
    back=Layout(None, "model"),
    up=Layout("model"),
    down=Layout(None, "model"),
    heads=Layout("batch", None, "model"),
    hidden=Layout("batch", None, "model"),
    returned=Layout("batch", "model"),
)


def parameters(mesh: hp.Mesh, plan: Plan) -> dict[str, hp.Tensor]:
    """Weights (heads, depth, width) of q, k, v; (width, heads, depth) back; the two layers behind; two norms."""
    rng = np.random.default_rng(4)
    shapes = {
        **dict.fromkeys("qkv", ((HEADS, DEPTH, WIDTH), plan.weights)),
        "back": ((WIDTH, HEADS, DEPTH), plan.back),
        "up": ((HIDDEN, WIDTH), plan.up),
        "up bias": ((HIDDEN,), plan.up),
        "down": ((WIDTH, HIDDEN), plan.down),
        "down bias": ((WIDTH,), Layout()),
        "norm 1": ((WIDTH,), Layout()),
        "norm 2": ((WIDTH,), Layout()),
    }
    return {
        name: operand(rng.standard_normal(shape) / 3, mesh, layout, requires_grad=True, parameter=True)
        for name, (shape, layout) in shapes.items()
    }


def norm(x: hp.Tensor, weight: hp.Tensor) -> hp.Tensor:
    x = x.resolve()
    centred = x - x.mean(-1, keepdim=True)
    return centred / F.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * (weight + 1.0)


def block(x: hp.Tensor, p: dict[str, hp.Tensor], plan: Plan) -> hp.Tensor:
    y = norm(x, p["norm 1"])
    q, k, v = (hp.einsum("bsc,hdc->bshd", y, p[name], out=plan.heads) for name in "qkv")
    scores = hp.einsum("bshd,bthd->bhst", q, k) / DEPTH**0.5
    mixed = hp.einsum("bhst,bthd->bshd", F.softmax(scores, -1), v)
    x = x + hp.einsum("bshd,chd->bsc", mixed, p["back"], out=plan.returned)
    y = F.linear(norm(x, p["norm 2"]), p["up"], p["up bias"], out=plan.hidden)
    return x + F.linear(F.tanh(y), p["down"], p["down bias"], out=plan.returned)


def loss_of(x: hp.Tensor, target: hp.Tensor, p: dict[str, hp.Tensor], plan: Plan) -> hp.Tensor:
    difference = block(x, p, plan).resolve() - target
    return (difference * difference).sum() / (SAMPLES * TOKENS * WIDTH)


def train(
    mesh: hp.Mesh, plan: Plan, micro_batches: int = 1, steps: int = 20
) -> tuple[list[float], dict[str, hp.Tensor]]:
    """Momentum steps; returns the losses and the parameters."""
    rng = np.random.default_rng(5)
    x, target = (rng.standard_normal((SAMPLES, TOKENS, WIDTH)) for _ in range(2))
    p, speed, losses = parameters(mesh, plan), {}, []
    for _ in range(steps):
        loss = 0.0
        for part in np.array_split(np.arange(SAMPLES), micro_batches):
            piece = loss_of(operand(x[part], mesh, plan.stream), operand(target[part], mesh, plan.stream), p, plan)
            loss += piece.resolve().item()
            piece.backward()
        losses.append(loss)
        for name, w in p.items():
            grad = w.grad.resolve()
            collective_assert(mesh.world, grad.layout == w.layout, f"gradient of {name} as {grad.layout}")
            speed[name] = 0.9 * speed.get(name, 0.0) + grad.shard
            w.set_data(w.shard - 0.05 * speed[name])
            w.grad = None
    return losses, p


@pytest.fixture(scope="module")
def serial() -> tuple[list[float], dict[str, np.ndarray]]:
    mesh = hp.Mesh(MPI.COMM_SELF, batch=1, model=1)
    losses, p = train(mesh, SERIAL)
    result = losses, {name: w.numpy() for name, w in p.items()}
    mesh.free()
    return result


def meshes() -> list[hp.Mesh]:
    shapes = [(2, 2)] if RANKS == 4 else [(RANKS, 1), (1, RANKS)]
    return [shared_mesh(batch=batch, model=model) for batch, model in dict.fromkeys(shapes)]


PLANS = pytest.mark.parametrize("plan", [DATA, TENSOR, SEQUENCE], ids=["data", "tensor", "sequence"])


@PLANS
def test_twenty_steps_equal_the_serial_run_and_keep_replicas_equal(
    serial: tuple[list[float], dict[str, np.ndarray]], plan: Plan
) -> None:
    expected, weights = serial
    assert expected[-1] < 0.7 * expected[0], "the serial run learns"
    for mesh in meshes():
        losses, p = train(mesh, plan)
        assert np.allclose(losses, expected, rtol=1e-12, atol=0), (mesh, losses[-1], expected[-1])
        for name, w in p.items():
            assert np.allclose(w.numpy(), weights[name], rtol=1e-10, atol=1e-12), (mesh, name)
            replicas = [a for a in mesh.axes if a not in w.sig.split_axes]
            assert len(set(mesh.comm(*replicas).gather_objects(w.shard.tobytes()))) == 1, f"replicas of {name} differ"


@PLANS
def test_unequal_micro_batches_take_the_same_steps(
    serial: tuple[list[float], dict[str, np.ndarray]], plan: Plan
) -> None:
    losses, _ = train(meshes()[-1], plan, micro_batches=3, steps=4)
    assert np.allclose(losses, serial[0][:4], rtol=1e-12, atol=0)


def test_the_checked_mode_finds_nothing_to_object_to() -> None:
    with hp.checked() as check:
        train(meshes()[-1], SEQUENCE, steps=1)
    assert len(check.log) > 60


@pytest.mark.ranks(min=2)
def test_branches_that_are_added_while_partial_are_reduced_once() -> None:
    mesh = shared_mesh(batch=1, model=RANKS)
    x = operand(np.ones((6, 4 * RANKS)), mesh, Layout(None, "model"))
    attention, mlp = (operand(np.ones((2, 4 * RANKS)), mesh, Layout(None, "model"), parameter=True) for _ in range(2))
    bias = operand(np.ones(2), mesh)
    with counter.counting() as sent:
        y = (F.linear(x, attention) + F.linear(x, mlp) + bias).resolve()
    assert [t.messages for t in sent.values()] == [1] and list(sent) == [("all_reduce", "model")]
    assert np.array_equal(y.numpy(), np.full((6, 2), 8.0 * RANKS + 1))
