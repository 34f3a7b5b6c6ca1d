"""Rotary position embedding against its formula in torch, under every split of samples, heads and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.rotary import TABLES_KEPT, _tables, frequencies
from hpcpar.testing import compare_with_serial, draw_layout, draw_mesh, operand, run_cases, shared_mesh

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def turned(x, positions, theta: float, dims: int, interleaved: bool, turns: Sequence[float] | None = None):
    """The same in torch."""
    turns = [theta ** (-2 * k / dims) for k in range(dims // 2)] if turns is None else turns
    angle = torch.as_tensor(positions, dtype=torch.float64)[..., None] * torch.tensor(turns, dtype=torch.float64)
    angle = angle[:, None] if angle.ndim == 3 else angle
    head, rest = x[..., :dims], x[..., dims:]
    pairs = head.unflatten(-1, (dims // 2, 2)) if interleaved else head.unflatten(-1, (2, dims // 2)).transpose(-1, -2)
    a, b, cosine, sine = pairs[..., 0], pairs[..., 1], torch.cos(angle), torch.sin(angle)
    pairs = torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1)
    return torch.cat([(pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2), rest], -1)


SHAPES = [(2, 3, 7, 6), (1, 4, 2, 8), (3, 1, 0, 4), (2, 2, 1, 2)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_rotary_equals_its_formula_under_every_layout_it_accepts(kind: str, interleaved: bool) -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = SHAPES[rng.integers(len(SHAPES))]
        n, _, tokens, features = shape
        # any order: natural, zigzag, several documents
        positions = rng.integers(0, 5000, (n, tokens) if rng.integers(2) else (tokens,))
        dims = 2 * int(rng.integers(1, features // 2 + 1))
        x = draw_layout(rng, shape, mesh, partial=True)
        arrays, layouts = [rng.standard_normal(shape)], [x]
        if kind == "tensor":
            arrays.append(positions)
            layouts.append(draw_layout(rng, positions.shape, mesh))
        compare_with_serial(
            lambda x, p=positions: F.rotary(x, p, 500.0, dims=dims, interleaved=interleaved),
            lambda x, p=positions: turned(x, p, 500.0, dims, interleaved),
            arrays,
            mesh,
            layouts,
            # the cosine of an angle of 5000 radians is known to 5000 units in the last place
            tolerance=1e-11,
        )

    assert run_cases(case, 30, seed=31).accepted > 10


def test_positions_are_natural_by_default_and_follow_the_split() -> None:
    mesh = shared_mesh(sequence=hp.current_mesh().size)
    x = np.random.default_rng(1).standard_normal((2, 3, 9, 4))
    y = F.rotary(operand(x, mesh, Layout(None, None, "sequence")))
    assert y.layout == Layout(None, None, "sequence").on(x.shape, mesh.shape)
    want = turned(torch.tensor(x), np.arange(9), 10000.0, 4, False).numpy()
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-12, atol=1e-12)


def test_far_positions_in_float32_keep_the_accuracy_of_their_angles() -> None:
    """Angles in float32 would be wrong by 0.06 radians at a million."""
    mesh = shared_mesh(sequence=hp.current_mesh().size)
    x = np.random.default_rng(1).standard_normal((1, 2, 8, 4)).astype(np.float32)
    positions = np.arange(8) + 1_000_003
    y = F.rotary(operand(x, mesh, Layout(None, None, "sequence")), positions).numpy()
    np.testing.assert_allclose(y, turned(torch.tensor(x.astype(float)), positions, 1e4, 4, False), atol=1e-6)


def test_scores_depend_on_the_distance_alone() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    q, k = (operand(np.random.default_rng(i).standard_normal((1, 1, 1, 8)), mesh) for i in (1, 2))

    def score(m: int, n: int) -> float:
        return (F.rotary(q, [m], scaling=LLAMA3) * F.rotary(k, [n], scaling=LLAMA3)).sum().item()

    assert score(12, 7) == pytest.approx(score(1005, 1000), rel=1e-9)
    assert abs(score(12, 7) - score(12, 8)) > 1e-3


def test_frequencies_are_scaled_as_llama_3_and_linear_scaling_say() -> None:
    plain = frequencies(128, 500000.0)
    np.testing.assert_allclose(plain[[0, 1, 63]], [1, 500000.0 ** (-1 / 64), 500000.0 ** (-63 / 64)], rtol=1e-14)
    np.testing.assert_array_equal(frequencies(128, 500000.0, {"type": "linear", "factor": 2}), plain / 2)
    got, length = frequencies(128, 500000.0, LLAMA3), 2 * np.pi / plain
    for k in range(64):
        if length[k] < 8192 / 4:
            assert got[k] == plain[k]
        elif length[k] > 8192:
            assert got[k] == plain[k] / 8
        else:
            blend = (8192 / length[k] - 1) / 3
            assert got[k] == pytest.approx((1 - blend) * plain[k] / 8 + blend * plain[k], rel=1e-12)
    assert 0 < np.count_nonzero((got != plain) & (got != plain / 8)) < 10


def test_one_table_serves_all_layers_and_few_are_kept() -> None:
    mesh = hp.Mesh(a=hp.current_mesh().size)
    q, k = operand(np.ones((1, 4, 6, 4)), mesh), operand(np.ones((1, 2, 6, 4)), mesh)
    for positions in (np.arange(6), operand(np.arange(6), mesh)):
        for x in (q, k, q, k):
            F.rotary(x, positions)
    assert len(_tables[mesh]) == 1
    for start in range(3 * TABLES_KEPT):
        F.rotary(q, np.arange(6) + start)
    assert len(_tables[mesh]) == TABLES_KEPT
    mesh.free()


@pytest.mark.ranks(min=2)
def test_split_features_are_refused() -> None:
    mesh = shared_mesh(model=hp.current_mesh().size)
    x = operand(np.ones((2, 3, 4, 8)), mesh, Layout(None, None, None, "model"))
    with pytest.raises(LayoutError, match=r"rotary: features cannot be split, .* repartition it to Layout\("):
        F.rotary(x, np.arange(4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"positions": np.arange(3)}, r"takes integer positions \(4,\) or \(2, 4\), got int64 of shape \(3,\)"),
        ({"positions": np.ones(4)}, "got float64"),
        ({"dims": 3}, "even number of the 8 features, got dims=3"),
        ({"scaling": {"rope_type": "yarn", "factor": 2}}, "of the rope_type linear, llama3, got 'yarn'"),
        ({"scaling": {"rope_type": "llama3", "factor": 2}}, "has factor, low_freq_factor, .* got factor"),
    ],
)
def test_wrong_arguments_are_named(options: dict, text: str) -> None:
    x = operand(np.ones((2, 3, 4, 8)), shared_mesh(a=hp.current_mesh().size))
    with pytest.raises(ValueError, match=text):
        F.rotary(x, **options)


def test_swiglu_equals_torch_under_every_layout_it_accepts() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = [(3, 5, 4), (7,), (2, 0, 3)][rng.integers(3)]
        arrays = [rng.standard_normal(shape) for _ in range(2)]
        layouts = [draw_layout(rng, shape, mesh, partial=True) for _ in range(2)]
        compare_with_serial(
            F.swiglu, lambda gate, up: torch.nn.functional.silu(gate) * up, arrays, mesh, layouts, parameters=[1]
        )

    assert run_cases(case, 30, seed=33).accepted > 10
    mesh = shared_mesh(a=hp.current_mesh().size)
    with pytest.raises(ValueError, match=r"swiglu: gate is float64 of shape \(3,\), up float64 of shape \(2,\)"):
        F.swiglu(operand(np.ones(3), mesh), operand(np.ones(2), mesh))
