"""Elementwise operations against torch under random layouts, broadcasting and partial values included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.testing import (
    collective_assert,
    compare_with_serial,
    draw_layout,
    draw_mesh,
    operand,
    run_cases,
    shared_mesh,
)
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional

SHAPES = [
    ((4, 5), (4, 5)),
    ((4, 5), (5,)),
    ((4, 1), (1, 5)),
    ((1, 7, 3), (2, 1, 3)),
    ((3,), ()),
    ((), ()),
    ((0, 4), (4,)),
    ((1, 2), (6, 2)),
]
BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (F.add, torch.add),
    "sub": (F.sub, torch.sub),
    "mul": (F.mul, torch.mul),
    "div": (lambda a, b: F.div(a, F.add(b, 9.0)), lambda a, b: torch.div(a, b + 9.0)),
    "maximum": (F.maximum, torch.maximum),
    "minimum": (F.minimum, torch.minimum),
    "pow": (lambda a, b: F.pow(F.abs(a) + 0.5, b), lambda a, b: torch.pow(torch.abs(a) + 0.5, b)),
    "where": (lambda a, b: F.where(a > b, F.mul(a, a), b), lambda a, b: torch.where(a > b, a * a, b)),
}
UNARY: dict[str, tuple[Callable, Callable]] = {
    "neg": (F.neg, torch.neg),
    "exp": (F.exp, torch.exp),
    "tanh": (F.tanh, torch.tanh),
    "sin": (F.sin, torch.sin),
    "cos": (F.cos, torch.cos),
    "abs": (F.abs, torch.abs),
    "log": (lambda x: F.log(F.add(F.abs(x), 1.0)), lambda x: torch.log(x.abs() + 1)),
    "sqrt": (lambda x: F.sqrt(F.add(F.abs(x), 1.0)), lambda x: torch.sqrt(x.abs() + 1)),
    "clamp": (lambda x: F.clamp(x, -0.5, 0.5), lambda x: torch.clamp(x, -0.5, 0.5)),
    "clamp below": (lambda x: F.clamp(x, min=0.1), lambda x: torch.clamp(x, min=0.1)),
    "square": (lambda x: x**2, lambda x: x**2),
    "power of zero": (lambda x: x**0, lambda x: x**0),
    "base": (lambda x: 2.0**x, lambda x: 2.0**x),
    "reciprocal": (lambda x: 3.0 / (x * x + 1.0), lambda x: 3.0 / (x * x + 1.0)),
    "numbers": (lambda x: (2.0 - x) * 3.0 / 7.0 + 1, lambda x: (2.0 - x) * 3.0 / 7.0 + 1),
    "same operand twice": (lambda x: x * x + x, lambda x: x * x + x),
}


def binary_case(name: str) -> Callable[[np.random.Generator], None]:
    ours, theirs = BINARY[name]

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shapes = SHAPES[rng.integers(len(SHAPES))]
        arrays = [rng.standard_normal(s) for s in shapes]
        layouts = [draw_layout(rng, s, mesh, partial=True) for s in shapes]
        compare_with_serial(ours, theirs, arrays, mesh, layouts, parameters=[1] if rng.integers(2) else [])

    return case


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_operands_equal_torch_under_every_layout(name: str) -> None:
    count = run_cases(binary_case(name), 16, seed=1)
    assert count.accepted > 5


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_operand_equal_torch_under_every_layout(name: str) -> None:
    ours, theirs = UNARY[name]

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = [(4, 3), (1, 7), (0, 2), (5,), ()][rng.integers(5)]
        compare_with_serial(ours, theirs, [rng.standard_normal(shape)], mesh, [draw_layout(rng, shape, mesh, True)])

    assert run_cases(case, 8, seed=2).refused == 0


def test_float32_stays_float32_and_agrees_with_torch() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        x = rng.standard_normal((6, 4)).astype(np.float32)
        layout = draw_layout(rng, x.shape, mesh)
        y = compare_with_serial(
            lambda x: F.exp(x * 0.5 + 1) / 3, lambda x: torch.exp(x * 0.5 + 1) / 3, [x], mesh, [layout]
        )
        assert y.dtype == np.float32

    run_cases(case, 4, seed=3)


# ---- partial values: the closed list


@pytest.mark.ranks(min=2)
def test_only_the_closed_list_keeps_a_value_partial() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    partial = Layout(partial="a")
    x = operand(np.arange(12.0).reshape(4, 3) / 4, mesh, partial)
    y = operand(np.ones((4, 3)), mesh, partial, stream=1)
    narrow = operand(np.ones((4, 3), np.float32), mesh, partial)
    keeps = {
        "add": x + y,
        "sub": x - y,
        "neg": -x,
        "add a number": x + 1,
        "scale": x * 2,
        "divide by a number": x / 2,
        "sum": x.sum(0),
        "mean": x.mean(),
        "transpose": x.transpose(0, 1),
        "reshape": x.reshape(12),
        "cat": hp.cat([x, y]),
        "slice": x[1:3],
        "expand": x.reshape(1, 4, 3).expand(2, 4, 3),
        "widening cast": narrow.to(np.float64),
    }
    resolves = {
        "mul": x * y,
        "div": x / (y + 9.0),
        "exp": F.exp(x),
        "maximum": F.maximum(x, y),
        "where": F.where(x > 0, x, y),
        "power": x**2,
        "amax": x.amax(),
        "var": x.var(),
        "narrowing cast": x.to(np.float32),
        "einsum": hp.einsum("nk,ok->no", x, y),
        "linear": F.linear(x, y),
        "matmul": x @ y.T,
    }
    for name, result in keeps.items():
        assert result.sig.partial == ("a",), name
    for name, result in resolves.items():
        assert result.sig.partial == (), name


@pytest.mark.ranks(min=2)
def test_a_number_or_a_replicated_operand_added_to_a_partial_value_counts_once() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = operand(np.zeros(3), mesh, Layout(partial="a"))
    for y in (x + 1.0, 1.0 + x, 1.0 - x, x + np.ones(3), x - np.full(3, -1.0), x + hp.tensor(np.ones(3), mesh)):
        assert y.sig.partial == ("a",)
        assert np.array_equal(y.numpy(), np.ones(3))


@pytest.mark.ranks(min=2)
def test_an_integer_partial_value_plus_a_fraction_has_one_dtype_on_all_ranks() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    y = operand(np.arange(3), mesh, Layout(partial="a")) + 0.5
    assert {str(d) for d in mesh.world.gather_objects(y.dtype)} == {"float64"}
    assert np.array_equal(y.numpy(), [0.5, 1.5, 2.5])


@pytest.mark.ranks(min=2)
def test_two_nonlinear_consumers_of_a_partial_value_share_one_all_reduce() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = operand(np.ones((4, 3)), mesh, Layout(partial="a"), requires_grad=True)
    with counter.counting() as sent:
        kept = [x * x, x * x, x**2, F.abs(x), F.log(x)]
    assert len(kept) == 5
    assert sum(t.messages for t in sent.values()) == 1


@pytest.mark.ranks(min=2)
def test_float_of_a_partial_or_split_tensor_raises_instead_of_waiting() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    with pytest.raises(RuntimeError, match="resolve"):
        float(operand(np.array(2.0), mesh, Layout(partial="a")))
    with pytest.raises(RuntimeError, match="resolve"):
        hp.tensor(np.ones(1), mesh, Layout("a")).item()
    assert float(operand(np.array(2.0), mesh, Layout(partial="a")).resolve()) == 2.0
    assert "partial='a'" in repr(operand(np.array(2.0), mesh, Layout(partial="a")))


# ---- pitfalls


@pytest.mark.ranks(min=2)
def test_summing_a_gradient_over_a_broadcast_split_dim_leaves_it_partial() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = hp.tensor(np.ones((6, 2)), mesh, Layout("a"))
    bias = operand(np.zeros(2), mesh, requires_grad=True, parameter=True)
    (x * 1.0 + bias).sum().backward()
    assert bias.grad.layout == Layout(partial="a")
    assert np.array_equal(bias.grad.numpy(), [6, 6])


def test_a_split_dim_of_length_one_is_gathered_before_it_is_broadcast() -> None:
    mesh, rng = shared_mesh(a=hp.current_mesh().size), np.random.default_rng(6)
    arrays = [rng.standard_normal((1, 3)), rng.standard_normal((5, 3))]
    compare_with_serial(F.mul, torch.mul, arrays, mesh, [Layout("a"), Layout("a")], out=Layout("a"))
    compare_with_serial(F.mul, torch.mul, arrays, mesh, [Layout("a"), None], out=Layout())


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "layouts",
    [
        (Layout("a"), Layout(None, "a")),
        (Layout(("a", "b")), Layout(("b", "a"))),
        (Layout("a"), Layout("b")),
    ],
)
def test_operands_split_differently_are_one_named_error_before_any_message(layouts: tuple[Layout, Layout]) -> None:
    ranks = hp.current_mesh().size
    mesh = shared_mesh(a=ranks) if len({*layouts[0].axes, *layouts[1].axes}) == 1 else None
    if mesh is None:
        if ranks != 4:
            pytest.skip("needs two axes longer than 1")
        mesh = shared_mesh(a=2, b=2)
    x, y = (hp.tensor(np.ones((4, 4)), mesh, layout) for layout in layouts)
    with counter.counting() as sent, pytest.raises(LayoutError, match=r"add: operands lie differently.*repartition"):
        _ = x + y
    collective_assert(mesh.world, not sent, f"{sent} was sent before the error")


OPERATIONS = {
    "add": lambda x, y: x + y,
    "einsum": lambda x, y: F.einsum("n,n->n", x, y),
    "cat": lambda x, y: F.cat([x, y]),
    "mse_loss": F.mse_loss,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operands_on_two_meshes_are_named_with_their_meshes(name: str) -> None:
    ranks = hp.current_mesh().size
    one, other = shared_mesh(a=ranks), shared_mesh(b=ranks)
    x, y = hp.tensor(np.ones(3), one, Layout("a")), hp.tensor(np.ones(3), other)
    with counter.counting() as sent, pytest.raises(LayoutError, match="two meshes") as raised:
        OPERATIONS[name](x, y)
    said = str(raised.value)
    assert f"operand 0, {x.sig!r}, lies on Mesh(a={ranks})" in said, said
    assert f"operand 1, {y.sig!r}, on Mesh(b={ranks}); make one mesh" in said, said
    assert not sent


def test_two_meshes_of_equal_axes_are_told_apart_in_words() -> None:
    ranks = hp.current_mesh().size
    one, again = hp.Mesh(a=ranks), hp.Mesh(a=ranks)
    x, y = hp.tensor(np.ones(3), one), hp.tensor(np.ones(3), again)
    with pytest.raises(LayoutError, match=r"on another Mesh\(a=\d\): two calls of Mesh make two meshes.*make one mesh"):
        _ = x * y
    part = one.sub(a=one.index("a"))
    z = hp.tensor(np.ones(3), part)
    with pytest.raises(LayoutError, match=f"the part at a={one.index('a')} of a larger mesh"):
        _ = x * z
    one.free()
    again.free()


def test_shapes_that_do_not_broadcast_are_named() -> None:
    with pytest.raises(ValueError, match=r"mul: shapes \(4, 3\) and \(4,\)"):
        _ = hp.tensor(np.ones((4, 3))) * hp.tensor(np.ones(4))


# ---- dtypes


def test_mixed_dtypes_give_the_wider_result_and_gradients_in_their_own() -> None:
    x = hp.tensor(np.ones(4, np.float32), requires_grad=True)
    w = hp.tensor(np.full(4, 3.0), requires_grad=True)
    y = (x * w).sum()
    assert y.dtype == np.float64
    y.backward()
    assert x.grad.dtype == np.float32 and w.grad.dtype == np.float64
    assert np.array_equal(x.grad.numpy(), np.full(4, 3.0))


def test_integers_beside_fractions_are_not_rounded() -> None:
    x = hp.tensor(np.array([0, 1, 2]))
    assert np.array_equal((x > 0.5).numpy(), [False, True, True])
    assert np.array_equal((x * np.array([0.5, 0.5, 0.5])).numpy(), [0, 0.5, 1])
    assert (x * hp.tensor(np.ones(3, np.float32))).dtype == np.float32, "as torch: the floating type wins"


def test_casting_to_integers_ends_the_history() -> None:
    x = hp.tensor(np.ones(3), requires_grad=True)
    assert not x.to(np.int64).requires_grad
    assert x.to(np.float32).requires_grad
    assert x.to(np.float64) is x


def test_power_has_torchs_derivatives_at_zero() -> None:
    a, b = np.array([0.0, 0.0, 2.0]), np.array([0.0, 2.0, 0.0])
    compare_with_serial(F.pow, torch.pow, [a, b], shared_mesh(a=hp.current_mesh().size), [None, None])


def test_ties_of_maximum_share_the_gradient() -> None:
    a, b = np.array([1.0, 2.0, np.inf]), np.array([1.0, 3.0, np.inf])
    mesh = shared_mesh(a=hp.current_mesh().size)
    compare_with_serial(F.maximum, torch.maximum, [a, b], mesh, [None, Layout("a")])
    compare_with_serial(F.minimum, torch.minimum, [a, b], mesh, [None, Layout("a")])
