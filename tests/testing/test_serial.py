"""The comparison with the serial twin finds what it is for: each fault below is put in on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.core import Op, Rule
from hpcpar.testing import all_or_none, compare_with_serial, operand, shared_mesh

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional
X = np.arange(12.0).reshape(4, 3) - 5


def mesh() -> hp.Mesh:
    return shared_mesh(a=hp.current_mesh().size)


class Faulty(Op):
    """x * 2 with one fault."""

    name = "faulty"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def rule(self, sigs: tuple) -> Rule:
        return Rule(sigs[0], [sigs[0]], [sigs[0].resolved], sigs)

    def forward(self, rule: Rule, arrays: list, extra: Any) -> tuple[Any, Any]:
        if self.fault == "in place":
            arrays[0][...] += 1
            return (arrays[0] - 1) * 2, None
        if self.fault == "on the last rank" and rule.out.mesh.rank == rule.out.mesh.size - 1:
            return arrays[0] * 2 + 1e-9, None
        return arrays[0] * (2 if self.fault != "value" else 2.001), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g * (2 if self.fault != "gradient" else 3),)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("value", "result 0"),
        ("on the last rank", "result 0"),
        ("gradient", "gradient of operand 0"),
        ("in place", "operand 0 was changed in place"),
    ],
)
@pytest.mark.parametrize("layout", [None, Layout("a"), Layout(None, "a")])
def test_a_fault_is_named_on_all_ranks(fault: str, text: str, layout: Layout | None) -> None:
    op = Faulty(fault)
    with pytest.raises(AssertionError, match=text):
        compare_with_serial(lambda x: op((x,)), lambda x: x * 2, [X], mesh(), [layout])
    good = Faulty("none")
    y = compare_with_serial(lambda x: good((x,)), lambda x: x * 2, [X], mesh(), [layout])
    assert y.layout == (layout or Layout()).on(X.shape, mesh().shape)


def test_a_result_of_another_shape_number_or_layout_is_named() -> None:
    for ours, text in ((lambda x: x.sum(0), "has shape"), (lambda x: (x, x), "2 results, 1 expected")):
        with pytest.raises(AssertionError, match=text):
            compare_with_serial(ours, lambda x: x * 1, [X], mesh(), [None])
    if mesh().size > 1:
        with pytest.raises(AssertionError, match="result lies as"):
            compare_with_serial(lambda x: x * 1, lambda x: x * 1, [X], mesh(), [None], out=Layout("a"))


def test_a_missing_gradient_is_named() -> None:
    with pytest.raises((AssertionError, RuntimeError), match="no gradient|does not require"):
        compare_with_serial(lambda x: x.detach() * 2, lambda x: x * 2, [X], mesh(), [None])


@pytest.mark.ranks(min=2)
def test_a_layout_error_comes_from_all_ranks_or_is_a_failure() -> None:
    def some() -> None:
        if mesh().rank == 0:
            raise LayoutError("only here")

    with pytest.raises(AssertionError, match="disagree about a LayoutError"):
        all_or_none(mesh(), some)

    def everywhere() -> None:
        raise LayoutError("the same")

    with pytest.raises(LayoutError, match="the same"):
        all_or_none(mesh(), everywhere)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.bool_])
def test_a_partial_operand_is_given_as_shares_that_differ_and_add_up(dtype: type) -> None:
    values = (X > 0).astype(dtype) if dtype is np.bool_ else X.astype(dtype)
    x = operand(values, mesh(), Layout(partial="a"))
    shares = mesh().world.gather_objects(x.shard)
    assert np.array_equal(np.sum(shares, axis=0).astype(dtype), values)
    if dtype is not np.bool_:
        assert all(share.any() for share in shares), "zeros on the other ranks would hide a missing sum"


def test_functions_without_gradient_take_any_reference() -> None:
    compare_with_serial(
        lambda x: x.argmax(1), lambda x: x.numpy().argmax(1), [X], mesh(), [Layout(None, "a")], differentiable=()
    )
