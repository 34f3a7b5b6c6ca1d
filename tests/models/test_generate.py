"""Generated text: what is cached is what is computed anew, every mesh writes the same, choices are as defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.layout.layout import LayoutError
from hpcpar.models import Cache, Decoder, Spread, gpt, llama, place
from hpcpar.models.generate import generate
from hpcpar.models.sampling import Sampling
from hpcpar.testing import shared_mesh

RANKS = MPI.COMM_WORLD.Get_size()
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


def make(family: str, mesh: hp.Mesh, spread: Spread) -> Decoder:
    hp.manual_seed(2)
    with mesh, nn.default_dtype("float64"):
        if family == "gpt":
            model = gpt(37, 12, 2, 3, max_positions=24, init_std=0.5, dropout=0.1)
        else:
            model = llama(37, 12, 2, 4, kv_heads=2, head_dim=4, hidden=10, window=5, init_std=0.5)
        place(model, mesh, spread)
    return model


def alone(family: str) -> Decoder:
    return make(family, hp.Mesh(MPI.COMM_SELF, batch=1), Spread())


def places() -> list[tuple[hp.Mesh, Spread]]:
    if RANKS == 4:
        both = {"batch": 2, "model": 2}
        pairs = [(both, Spread(sequence_parallel=True, shard_weights=True)), ({"model": 4}, Spread())]
    else:
        pairs = [
            ({"batch": RANKS}, Spread(shard_weights=True)),
            ({"model": RANKS}, Spread(sequence_parallel=True)),
            ({"sequence": 1, "model": RANKS}, Spread(context="ring", order="zigzag")),
        ]
    return [(shared_mesh(**axes), spread) for axes, spread in pairs]


# ---- the cache


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("pieces", [[9], [4, 5], [1] * 9, [3, 1, 4, 1]])
def test_cached_logits_equal_uncached_ones(family: str, pieces: list[int]) -> None:
    tokens = np.random.default_rng(0).integers(0, 37, (3, 9))
    for mesh, spread in places():
        model = make(family, mesh, spread).eval()

        def run(part: np.ndarray, model: Decoder = model, mesh: hp.Mesh = mesh, **arguments: Any) -> np.ndarray:
            with hp.no_grad():
                return model(hp.tensor(part, mesh=mesh), **arguments).numpy()

        whole, cache, at, found = run(tokens), Cache(2, 9), 0, []
        for n in pieces:
            found.append(run(tokens[:, at : at + n], positions=np.arange(at, at + n), cache=cache))
            at += n
        np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(exactly=(1, 2, 4))
def test_a_cache_holds_the_share_of_the_rank() -> None:
    mesh = shared_mesh(batch=1, model=RANKS) if RANKS < 4 else shared_mesh(batch=2, model=2)
    model, cache = make("llama", mesh, Spread()).eval(), Cache(2, 10)
    with hp.no_grad():
        model(hp.tensor(np.zeros((4, 6), np.int64), mesh=mesh), cache=cache)
    # keys and values of 2 blocks, 4 texts, 10 slots, 2 heads of 4
    assert cache.nbytes == 2 * 2 * 4 * 10 * 2 * 4 * 8 // RANKS


def test_a_cache_that_is_full_or_split_is_refused() -> None:
    mesh = shared_mesh(batch=RANKS)
    model = make("gpt", mesh, Spread()).eval()
    with hp.no_grad(), pytest.raises(ValueError, match="the cache has 4 slots, positions go from 0 to 4"):
        model(hp.tensor(np.zeros((1, 5), np.int64), mesh=mesh), cache=Cache(2, 4))
    if RANKS > 1:
        model = make("gpt", shared_mesh(sequence=RANKS), Spread())
        with pytest.raises(LayoutError, match=r"use Spread\(sequence=\(\)\)"):
            generate(model, PROMPTS, 2)


# ---- whole texts


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 4}], ids=["greedy", "drawn"]
)
def test_every_mesh_writes_the_same_text(family: str, options: dict[str, Any]) -> None:
    expected = generate(alone(family), PROMPTS, 12, **options)
    assert [len(text) for text in expected] == [12, 12, 12]
    assert len({token for text in expected for token in text}) > 5
    for mesh, spread in places():
        model = make(family, mesh, spread)
        found = generate(model, PROMPTS, 12, **options)
        assert found == expected, (mesh, spread)
        assert all(mesh.world.gather_objects(found)[r] == found for r in range(mesh.size))
        assert model.training, "as it was before"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_text_does_not_depend_on_its_neighbours(family: str) -> None:
    model = alone(family)
    together = generate(model, PROMPTS, 8)
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert generate(model, [prompt], 8) == [text]


def test_greedy_text_is_what_the_whole_network_finds_most_probable() -> None:
    model = alone("gpt").eval()
    text = list(PROMPTS[0])
    for _ in range(6):
        with hp.no_grad():
            text.append(
                int(model(hp.tensor(np.array([text]), mesh=model.embedding.weight.mesh)).numpy()[0, -1].argmax())
            )
    assert generate(model, [PROMPTS[0]], 6) == [text[3:]]


def test_a_stop_token_ends_its_text_alone() -> None:
    model = alone("llama")
    full = generate(model, PROMPTS, 10)
    stop = full[0][3]
    steps: list[list[int]] = []
    cut = generate(model, PROMPTS, 10, stop=stop, each=lambda tokens: steps.append(tokens.tolist()))
    for before, after in zip(full, cut, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)
    assert len(cut[0]) <= 3 and steps[len(cut[0])][0] == -1


def test_what_cannot_be_generated_is_said() -> None:
    model = alone("gpt")
    with pytest.raises(ValueError, match="a prompt and 20 tokens are 27, the model has learned 24 positions"):
        generate(model, PROMPTS, 20)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [[1], []], 2)
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            generate(model, PROMPTS, 1, **wrong)


# ---- choices


LOGITS = np.log(np.array([[0.05, 0.4, 0.3, 0.2, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]]))


def test_probabilities_are_cut_and_sharpened_as_defined() -> None:
    def first(**options: Any) -> list[float]:
        return Sampling(**{"temperature": 1.0, **options}).probabilities(LOGITS)[0].round(12).tolist()

    assert first() == [0.05, 0.4, 0.3, 0.2, 0.05]
    assert first(top_k=2) == [0, round(4 / 7, 12), round(3 / 7, 12), 0, 0]
    assert first(top_p=0.6) == [0, round(4 / 7, 12), round(3 / 7, 12), 0, 0]
    assert first(top_p=0.7) == [0, round(4 / 7, 12), round(3 / 7, 12), 0, 0]
    assert first(top_p=0.71) == [0, round(4 / 9, 12), round(3 / 9, 12), round(2 / 9, 12), 0]
    assert first(top_p=1e-9) == [0, 1, 0, 0, 0]
    squares = np.array([0.05, 0.4, 0.3, 0.2, 0.05]) ** 2
    np.testing.assert_allclose(first(temperature=0.5), squares / squares.sum(), atol=1e-12)


def test_draws_have_these_probabilities_and_follow_the_seed_alone() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=7)
    rows = np.repeat(LOGITS[:1], 20_000, axis=0)
    tokens = sampling.choose(rows, 3)
    wanted = sampling.probabilities(LOGITS)[0]
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / len(tokens), wanted, atol=0.015)
    assert not np.any(tokens[None] == np.flatnonzero(wanted == 0)[:, None])
    assert np.array_equal(sampling.choose(rows[:10], 3), tokens[:10]), "a row's draw is its own"
    assert not np.array_equal(sampling.choose(rows, 4), tokens)
    assert not np.array_equal(Sampling(temperature=1.0, top_p=0.95, seed=8).choose(rows, 3), tokens)
    assert Sampling().choose(LOGITS, 0).tolist() == [1, 0], "the first of equals"
