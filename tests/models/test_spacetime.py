"""Space and time: three ways to split a video equal the serial run and each other, and send what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.layout.layout import Layout
from hpcpar.models import Spread, place
from hpcpar.models.spacetime import SpaceTime, SpaceTimeConfig
from hpcpar.parallel import GradientSync
from hpcpar.testing import assert_close_everywhere, collective_assert, operand, shared_mesh
from hpcpar.transport import counter

F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()
SCHEMES = ("switch", "ring", "all_to_all")
UNEVEN = SpaceTimeConfig(3, 2, frames=5, places=7, width=12, layers=2, heads=3, hidden=10, causal=True, init_std=0.3)


def make(mesh: hp.Mesh, config: SpaceTimeConfig) -> SpaceTime:
    hp.manual_seed(3)
    with mesh, nn.default_dtype(np.float64):
        return SpaceTime(config)


def step(mesh: hp.Mesh, scheme: str, config: SpaceTimeConfig, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Output, loss and every gradient of one step, whole."""
    rng = np.random.default_rng(2)
    x, target = rng.standard_normal((*shape, config.channels)), rng.standard_normal((*shape, config.outputs))
    model = make(mesh, config)
    place(model, mesh, Spread(context=scheme))
    tokens = hp.tensor(x, mesh, requires_grad=True)
    y = model(tokens)
    loss = F.mse_loss(y, hp.tensor(target, mesh))
    GradientSync(model).backward(loss)
    found = {"output": y.numpy(), "loss": loss.numpy(), "input": tokens.grad.numpy()}
    found.update({name: p.grad.resolve().numpy() for name, p in model.named_parameters()})
    return found


def same(mesh: hp.Mesh, got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Equal to 1e-11 of the largest value, or of 1e-3: the bias of keys has no influence, hence no gradient."""
    collective_assert(mesh.world, got.keys() == wanted.keys(), "other names")
    for name, array in wanted.items():
        apart, scale = np.abs(got[name] - array).max(), max(np.abs(array).max(), 1e-3)
        collective_assert(mesh.world, apart <= 1e-11 * scale, f"{name} on {mesh!r}: {apart} of {scale}")


@pytest.fixture(scope="module")
def serial() -> Any:
    mesh, kept = hp.Mesh(MPI.COMM_SELF, batch=1, sequence=1, model=1), {}

    def run(config: SpaceTimeConfig, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
        if (config, shape) not in kept:
            kept[config, shape] = step(mesh, "switch", config, shape)
        return kept[config, shape]

    yield run
    mesh.free()


def meshes() -> list[hp.Mesh]:
    shapes = [(1, RANKS, 1), (2, 2, 1), (1, 2, 2)] if RANKS == 4 else [(1, RANKS, 1), (1, 1, RANKS)]
    return [shared_mesh(batch=a, sequence=b, model=c) for a, b, c in dict.fromkeys(shapes)]


CASES = {
    **{f"uneven {scheme}": (scheme, (3, 5, 7)) for scheme in (*SCHEMES, "gather")},
    **{f"few {scheme}": (scheme, (1, 2, 3)) for scheme in SCHEMES},
    "one frame": ("switch", (2, 1, 5)),
}


@pytest.mark.parametrize(("scheme", "shape"), CASES.values(), ids=CASES)
def test_a_step_equals_the_serial_one(serial: Any, scheme: str, shape: tuple[int, int, int]) -> None:
    """5 frames and 7 places divide by nothing; with 2 frames and 3 places, or one frame, ranks are left without any."""
    wanted = serial(UNEVEN, shape)
    for mesh in meshes():
        same(mesh, step(mesh, scheme, UNEVEN, shape), wanted)


def test_the_schemes_agree_with_each_other() -> None:
    mesh = meshes()[0]
    first, *others = (step(mesh, scheme, UNEVEN, (2, 4, 6)) for scheme in SCHEMES)
    for other in others:
        same(mesh, other, first)


def test_a_network_that_sees_no_other_frame_or_place_differs() -> None:
    """What a frame or place elsewhere holds matters: the comparison above would find a stage left out."""
    mesh = meshes()[0]
    model = make(mesh, UNEVEN)
    place(model, mesh, Spread(context="switch"))
    x = np.random.default_rng(5).standard_normal((1, 5, 7, 3))
    y = model(operand(x, mesh)).numpy()
    changed = x.copy()
    changed[0, 2, 3] += 1
    moved = np.abs(model(operand(changed, mesh)).numpy() - y).max(axis=-1)[0]
    assert not moved[:2].any(), "frames before see nothing of it: causal"
    assert (moved[2:] > 0).all(), "its own frame by space, later ones by time, all places by both"


def bills(config: SpaceTimeConfig, scheme: str, n: int) -> tuple[dict, dict]:
    """Bytes this rank sends, forward and backward, by operation; without the gradients of parameters."""
    mesh = shared_mesh(batch=1, sequence=RANKS, model=1)
    model = make(mesh, config)
    place(model, mesh, Spread(context=scheme))
    layout = Layout(None, "sequence") if scheme == "switch" else Layout(None, None, "sequence")
    x = operand(np.ones((n, config.frames, config.places, config.channels)), mesh, layout)
    with counter.counting() as ahead:
        y = model(x)
    with counter.counting() as back:
        y.backward(operand(np.ones(y.shape), mesh, y.layout))
    return tuple({op: (t.messages, t.bytes) for (op, _), t in sums.items()} for sums in (ahead, back))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("layers", [1, 3])
def test_the_switch_is_two_all_to_alls_of_m_over_n_a_block(layers: int) -> None:
    p, n = RANKS, 2
    config = SpaceTimeConfig(3, 2, 2 * p, 3 * p, width=8, layers=layers, heads=2, hidden=8)
    stream = n * 2 * p * 3 * p * 8 * 8
    ahead, back = bills(config, "switch", n)
    expected = {"exchange": (2 * layers * (p - 1), 2 * layers * stream / p * (p - 1) / p)}
    assert ahead == expected and back == expected


@pytest.mark.ranks(min=2)
def test_the_ring_sends_n_times_as_much_and_heads_for_places_twice_as_much() -> None:
    p, n, heads = RANKS, 2, 2 * RANKS
    config = SpaceTimeConfig(3, 2, 2 * p, 3 * p, width=4 * heads, layers=2, heads=heads, hidden=8)
    stream = n * 2 * p * 3 * p * config.width * 8
    ring, ring_back = bills(config, "ring", n)
    assert ring == {"ring": (2 * (p - 1), 2 * 2 * stream * (p - 1) / p)}
    assert ring_back == {"ring": (2 * 2 * (p - 1), 2 * 4 * stream * (p - 1) / p)}
    heads_for_places, back = bills(config, "all_to_all", n)
    expected = {"exchange": (2 * 4 * (p - 1), 2 * 4 * stream / p * (p - 1) / p)}
    assert heads_for_places == back == expected
    switch, _ = bills(config, "switch", n)
    assert 2 * switch["exchange"][1] == heads_for_places["exchange"][1]
    assert p * switch["exchange"][1] == ring["ring"][1]


def test_dropout_is_the_same_under_every_scheme() -> None:
    config = SpaceTimeConfig(3, 2, 4, 5, width=8, layers=1, heads=2, dropout=0.4, init_std=0.3)
    x = np.random.default_rng(6).standard_normal((2, 4, 5, 3))
    for mesh in meshes():
        results = []
        for scheme in SCHEMES:
            model = make(mesh, config)
            place(model, mesh, Spread(context=scheme))
            results.append(model(operand(x, mesh)).numpy())
            collective_assert(mesh.world, not np.array_equal(results[-1], model(operand(x, mesh)).numpy()), scheme)
        for other in results[1:]:
            assert_close_everywhere(mesh.world, other, results[0], 1e-11, "output")


def test_what_makes_no_sense_is_named() -> None:
    mesh = meshes()[0]
    model = make(mesh, UNEVEN)
    with pytest.raises(ValueError, match="one of switch, auto, ring"):
        place(model, mesh, Spread(context="torus"))
    with pytest.raises(ValueError, match="<= 5, <= 7, 3"):
        model(operand(np.ones((1, 6, 7, 3)), mesh))
    with pytest.raises(ValueError, match="5 heads do not divide the width 12"):
        SpaceTimeConfig(3, 2, 5, 7, width=12, heads=5)
