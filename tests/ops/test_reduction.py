"""Reductions over whole, split and partial dims against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout
from hpcpar.testing import compare_with_serial, draw_layout, draw_mesh, operand, run_cases, shared_mesh
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional

SHAPES = [(4, 5), (1, 7), (2, 3, 5), (5,)]
REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (F.sum, torch.sum),
    "mean": (F.mean, torch.mean),
    "amax": (F.amax, torch.amax),
    "amin": (F.amin, torch.amin),
    "var": (
        lambda x, dims, keepdim: F.var(x, dims, 0, keepdim),
        lambda x, dims, keepdim: torch.var(x, dims, correction=0, keepdim=keepdim),
    ),
    "logsumexp": (F.logsumexp, torch.logsumexp),
}


def draw_dims(rng: np.random.Generator, ndim: int) -> tuple[int, ...]:
    count = int(rng.integers(1, ndim + 1))
    dims = rng.choice(ndim, count, replace=False)
    return tuple(int(d) - ndim * int(rng.integers(2)) for d in dims)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_equal_torch_under_every_layout(name: str) -> None:
    ours, theirs = REDUCTIONS[name]

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = SHAPES[rng.integers(len(SHAPES))]
        dims, keepdim = draw_dims(rng, len(shape)), bool(rng.integers(2))
        x = rng.standard_normal(shape)
        compare_with_serial(
            lambda x: ours(x, dims, keepdim=keepdim),
            lambda x: theirs(x, dims, keepdim=keepdim),
            [x],
            mesh,
            [draw_layout(rng, shape, mesh, partial=True)],
        )

    assert run_cases(case, 14, seed=4).refused == 0


def test_all_dims_are_reduced_by_default() -> None:
    x = hp.tensor(np.arange(6.0).reshape(2, 3), layout=Layout("batch"))
    assert x.sum().resolve().item() == 15 and x.mean().resolve().item() == 2.5
    assert x.amax().item() == 5 and x.amin().item() == 0
    assert x.sum().shape == ()


def test_empty_dims_sum_to_zero_and_have_no_extreme() -> None:
    x = hp.tensor(np.ones((0, 3)), layout=Layout("batch"))
    assert np.array_equal(x.sum(0).numpy(), np.zeros(3))
    assert np.isnan(x.mean(0).numpy()).all()
    with pytest.raises(ValueError, match="amax: an empty dim"):
        x.amax(0)


def test_the_mean_is_never_a_mean_of_means() -> None:
    """Blocks of 1 and 2 of 3 elements, or more: shards' means would weigh them alike."""
    ranks = hp.current_mesh().size
    values = np.arange(2 * ranks + 1.0) ** 2
    x = hp.tensor(values, layout=Layout("batch"))
    assert abs(x.mean().resolve().item() - values.mean()) <= 1e-15 * values.mean()
    assert hp.tensor(np.ones(49)).mean().item() == 1.0, "a division, not a product with 1/49"


@pytest.mark.ranks(min=2)
def test_a_sum_over_a_split_dim_is_partial_and_costs_nothing_until_resolved() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = hp.tensor(np.ones((6, 2)), mesh, Layout("a"), requires_grad=True)
    with counter.counting() as sent:
        total = x.sum(0)
        mean = x.mean(0)
    assert total.layout == mean.layout == Layout(partial="a") and not sent
    with counter.counting() as sent:
        total.sum().backward()
    assert not sent, "the gradient is expanded straight into the layout of x"
    assert np.array_equal(x.grad.numpy(), np.ones((6, 2)))


@pytest.mark.ranks(min=2)
def test_ties_across_ranks_share_the_gradient() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    values = np.array([3.0, 1, 3, 0, 3, 3, 2])
    for ours, theirs in ((F.amax, torch.amax), (F.amin, torch.amin)):
        compare_with_serial(lambda x, f=ours: f(x, 0), lambda x, f=theirs: f(x, 0), [values], mesh, [Layout("a")])


@pytest.mark.ranks(min=2)
def test_nan_on_any_rank_is_the_maximum_on_every_rank() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    for where in range(mesh.size):
        values = np.arange(float(mesh.size))
        values[where] = np.nan
        x = hp.tensor(values, mesh, Layout("a"))
        answers = mesh.world.gather_objects([np.isnan(x.amax().item()), np.isnan(x.amin().item())])
        assert all(all(pair) for pair in answers)


def test_variance_resolves_a_partial_value_before_its_first_sum() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    for f in (F.var, F.logsumexp):
        x = operand(np.arange(12.0).reshape(4, 3), mesh, Layout(partial="a"))
        with counter.counting() as sent:
            f(x, 1)
        assert sum(t.messages for t in sent.values()) == (mesh.size > 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_argmax_and_argmin_find_the_first_global_index(dtype: type) -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = SHAPES[rng.integers(len(SHAPES))]
        x = rng.integers(0, 3, shape).astype(dtype)
        dim, keepdim = int(rng.integers(len(shape))), bool(rng.integers(2))
        layout = draw_layout(rng, shape, mesh)
        for ours, theirs in ((F.argmax, np.argmax), (F.argmin, np.argmin)):
            compare_with_serial(
                lambda x, f=ours: f(x, dim, keepdim),
                lambda x, f=theirs: f(x.numpy(), dim, keepdims=keepdim),
                [x],
                mesh,
                [layout],
                differentiable=(),
            )

    assert run_cases(case, 8, seed=5).refused == 0


def test_argmax_of_nan_is_its_index_as_in_torch() -> None:
    x = hp.tensor(np.array([1.0, 5.0, np.nan, 7.0, np.nan]), layout=Layout("batch"))
    assert x.argmax(0).item() == 2


def test_logsumexp_does_not_overflow_and_keeps_minus_infinity() -> None:
    x = np.array([[1000.0, 1000.0, -1000.0], [-np.inf, -np.inf, -np.inf]])
    mesh = shared_mesh(a=hp.current_mesh().size)
    with np.errstate(divide="ignore"):
        y = F.logsumexp(hp.tensor(x, mesh, Layout(None, "a")), 1).numpy()
    assert np.allclose(y, [1000 + np.log(2), -np.inf], rtol=1e-15)


def test_standard_deviation_and_its_correction() -> None:
    x = np.random.default_rng(0).standard_normal((7, 3))
    mesh = shared_mesh(a=hp.current_mesh().size)
    compare_with_serial(lambda x: F.std(x, 0), lambda x: torch.std(x, 0), [x], mesh, [Layout("a")])
    assert np.isnan(F.var(hp.tensor(np.ones((1, 2))), 0).numpy()).all()


def test_dims_that_do_not_exist_or_repeat_are_named() -> None:
    x = hp.tensor(np.ones((4, 3)))
    with pytest.raises(IndexError, match="sum: dim 2"):
        x.sum(2)
    with pytest.raises(ValueError, match="twice"):
        x.sum((0, -2))
