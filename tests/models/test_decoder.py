"""The decoder on one mesh: names and shapes as torch's, initial weights, what a token sees, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.models import Decoder, DecoderConfig, Spread, gpt, llama, place
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.testing import shared_mesh

F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()
SMALL = {"vocab_size": 37, "width": 12, "layers": 2, "heads": 3}


def small(**options: Any) -> Decoder:
    hp.manual_seed(5)
    with nn.default_dtype("float64"):
        return Decoder(DecoderConfig(**{**SMALL, "max_positions": 16, "init_std": 0.3, **options}))


def logits(model: Decoder, tokens: Any, **arguments: Any) -> np.ndarray:
    with hp.no_grad():
        return model(hp.tensor(np.asarray(tokens)), **arguments).numpy()


TOKENS = np.random.default_rng(8).integers(0, 37, (2, 9))


# ---- names, shapes, weights


def test_the_families_have_the_sizes_of_their_papers() -> None:
    """124 million and 8 billion parameters; on a mesh without storage."""
    with VirtualMesh({"batch": 1}):
        assert sum(p.numel() for p in gpt().parameters()) == 124_439_808
        assert sum(p.numel() for p in llama().parameters()) == 8_030_261_248


def test_the_state_has_torchs_shapes() -> None:
    state = small(activation="swiglu", heads=4, kv_heads=2, head_dim=5, hidden=7, tied=False).state_dict(numpy=True)
    shapes = {name: value.shape for name, value in state.items()}
    assert shapes["embedding.weight"] == shapes["head.weight"] == (37, 12)
    assert shapes["position_embedding.weight"] == (16, 12)
    assert shapes["blocks.1.attention.q.weight"] == (20, 12) and shapes["blocks.1.attention.q.bias"] == (20,)
    assert shapes["blocks.0.attention.k.weight"] == (10, 12) and shapes["blocks.0.attention.v.bias"] == (10,)
    assert shapes["blocks.0.attention.o.weight"] == (12, 20) and shapes["blocks.0.attention.o.bias"] == (12,)
    assert shapes["blocks.0.mlp.gate.weight"] == shapes["blocks.0.mlp.up.weight"] == (7, 12)
    assert shapes["blocks.0.mlp.down.weight"] == (12, 7)
    assert "head.weight" not in small().state_dict(), "a tied head is no parameter of its own"


def test_a_state_in_torchs_shapes_is_loaded_block_by_block() -> None:
    state = {n: v + 1.0 for n, v in small(heads=4, kv_heads=2, head_dim=5).state_dict(numpy=True).items()}
    mesh = shared_mesh(batch=1, model=RANKS)
    with mesh:
        model = small(heads=4, kv_heads=2, head_dim=5)
        place(model, mesh)
    model.load_state_dict(state)
    for name, value in model.state_dict(numpy=True).items():
        assert np.array_equal(value, state[name]), name


def test_initial_weights_are_gpt2s() -> None:
    model = small(width=24, heads=4, hidden=64, layers=8, init_std=0.02)
    for name, p in model.named_parameters():
        value = p.numpy()
        if "norm" in name:
            assert np.all(value == (1.0 if name.endswith("weight") else 0.0)), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            residual = name.endswith(("attention.o.weight", "down.weight"))
            assert value.std() == pytest.approx(0.02 / (4 if residual else 1), rel=0.15), name


# ---- what a token sees


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_token_sees_the_tokens_before_it_alone(positions: str) -> None:
    model = small(positions=positions)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 37
    before, after = logits(model, TOKENS), logits(model, changed)
    assert np.array_equal(before[:, :5], after[:, :5])
    assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(axis=2) > 1e-6)


def test_a_window_hides_what_lies_further_back() -> None:
    model = small(window=3, layers=1)
    changed = TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 37
    moved = np.abs(logits(model, TOKENS) - logits(model, changed)).max(axis=(0, 2)) > 1e-9
    assert moved.tolist() == [False, False, True, True, True, False, False, False, False]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_packed_documents_do_not_see_each_other(positions: str) -> None:
    model = small(positions=positions)
    documents = hp.tensor(np.array([[0] * 4 + [1] * 5] * 2))
    where = np.array([0, 1, 2, 3, 0, 1, 2, 3, 4])
    packed = logits(model, TOKENS, positions=where, documents=documents)
    apart = [logits(model, TOKENS[:, :4]), logits(model, TOKENS[:, 4:])]
    np.testing.assert_allclose(packed, np.concatenate(apart, axis=1), rtol=1e-12, atol=1e-12)
    rows = logits(model, TOKENS, positions=np.array([where, where]), documents=documents)
    np.testing.assert_allclose(packed, rows, rtol=1e-12, atol=1e-12)


def test_rotary_positions_count_distances() -> None:
    model = small(positions="rotary")
    far = logits(model, TOKENS, positions=np.arange(100, 109))
    np.testing.assert_allclose(far, logits(model, TOKENS), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "geglu", "swiglu"])
def test_every_activation_learns(activation: str) -> None:
    model = small(activation=activation)
    x, y = hp.tensor(TOKENS[:, :-1]), hp.tensor(TOKENS[:, 1:])
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None and p.grad.shard.any(), p.name
            p.set_data(p.shard - 0.1 * p.grad.resolve().shard)
            p.grad = None
        losses.append(float(loss))
    assert losses[2] < losses[0]


def test_dropout_is_of_training_and_the_same_on_every_mesh() -> None:
    def run(mesh: hp.Mesh, spread: Spread) -> np.ndarray:
        with mesh:
            model = small(dropout=0.3)
            place(model, mesh, spread)
            hp.manual_seed(9)
            return model(hp.tensor(TOKENS, mesh=mesh)).numpy()

    serial = run(hp.Mesh(MPI.COMM_SELF, batch=1), Spread())
    assert not np.allclose(serial, logits(small(dropout=0.3).eval(), TOKENS))
    for axis in ("batch", "model", "sequence"):
        for spread in (Spread(), Spread(sequence_parallel=True)):
            found = run(shared_mesh(**{axis: RANKS}), spread)
            np.testing.assert_allclose(found, serial, rtol=1e-10, atol=1e-12, err_msg=axis)


def test_what_the_plan_decided_is_told_with_the_name_of_every_part() -> None:
    mesh = shared_mesh(model=RANKS)
    with mesh:
        told = place(small(), mesh)
    names = [line.partition(": ")[0] for line in told]
    assert all(names) and bool(names) == (RANKS > 1)
    assert "Decoder" in names or RANKS == 1


# ---- what is refused


def test_a_configuration_names_all_its_faults() -> None:
    with pytest.raises(ValueError) as raised:
        DecoderConfig(37, 12, 0, 4, kv_heads=3, norm="batch", activation="tanh", dropout=1.0, window=0)
    text = str(raised.value)
    assert text.count("; ") == 4
    for part in ("layers is at least 1, got 0", "norm is one of layer, rms, got 'batch'", "got 'tanh'", "dropout"):
        assert part in text
    with pytest.raises(ValueError, match="4 heads cannot share 3 heads"):
        DecoderConfig(37, 12, 1, 4, kv_heads=3)
    with pytest.raises(ValueError, match="width 32 does not divide into 5 heads; give head_dim"):
        DecoderConfig(37, 32, 1, 5)
    assert DecoderConfig(37, 32, 1, 5, head_dim=6).head_dim == 6
    with pytest.raises(ValueError, match="pairs of numbers, head_dim is 3"):
        DecoderConfig(37, 12, 1, 4, positions="rotary")


def test_what_does_not_fit_is_said() -> None:
    model = small()
    with pytest.raises(ValueError, match="has learned 16 positions, a text has 17 tokens"):
        logits(model, np.zeros((1, 17), np.int64))
    with pytest.raises(ValueError, match=r"takes integers \(N, S\), got float64"):
        logits(model, np.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"integers \(9,\) or \(2, 9\), got int64 of shape \(8,\)"):
        logits(model, TOKENS, positions=np.arange(8))
