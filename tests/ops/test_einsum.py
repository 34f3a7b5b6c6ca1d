"""Einsum, matmul and linear under random layouts against torch; what is refused, and why."""

from __future__ import annotations

import logging

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

LENGTHS = dict(zip("bmknoijcd", (2, 5, 4, 6, 3, 4, 5, 3, 4), strict=True))
EQUATIONS = [
    "mk,kn->mn",
    "nk,ok->no",
    "mk,kn->nm",
    "bmk,bkn->bmn",
    "bmk,nk->bmn",
    "i,j->ij",
    "ij,ij->",
    "ij,j->i",
    "bic,bjc->bij",
    "ncdm,ocdm->no",
    "bmk,kn->mn",
    "ij->ji",
    "bij->j",
    "ij->",
]


def draw_case(rng: np.random.Generator) -> tuple[hp.Mesh, str, list[np.ndarray], list[Layout], list[int]]:
    mesh = draw_mesh(rng, ("a", "b"))
    equation = EQUATIONS[rng.integers(len(EQUATIONS))]
    arrays = [rng.standard_normal([LENGTHS[c] for c in labels]) for labels in equation.split("->")[0].split(",")]
    layouts = [draw_layout(rng, a.shape, mesh, partial=True) for a in arrays]
    return mesh, equation, arrays, layouts, [1] if len(arrays) == 2 and rng.integers(2) else []


def test_einsum_equals_torch_under_every_layout_it_accepts() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh, equation, arrays, layouts, parameters = draw_case(rng)
        compare_with_serial(
            lambda *x: hp.einsum(equation, *x),
            lambda *x: torch.einsum(equation, *x),
            arrays,
            mesh,
            layouts,
            parameters=parameters,
        )

    assert run_cases(case, 60, seed=9).accepted > 20


def test_einsum_with_a_layout_of_the_result_equals_torch_and_lies_so() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh, equation, arrays, layouts, parameters = draw_case(rng)
        result = equation.split("->")[1]
        out = draw_layout(rng, [LENGTHS[c] for c in result], mesh, partial=True)
        compare_with_serial(
            lambda *x: hp.einsum(equation, *x, out=out),
            lambda *x: torch.einsum(equation, *x),
            arrays,
            mesh,
            layouts,
            parameters=parameters,
            out=out,
        )

    assert run_cases(case, 60, seed=10).accepted > 20


MATMULS = [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5))]
MATMULS += [((2, 1, 3, 4), (1, 6, 4, 5)), ((3, 0), (0, 2)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,))]


def test_matmul_equals_torch_for_vectors_matrices_and_broadcast_batches() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shapes = MATMULS[rng.integers(len(MATMULS))]
        arrays = [rng.standard_normal(s) for s in shapes]
        layouts = [draw_layout(rng, s, mesh, partial=True) for s in shapes]
        compare_with_serial(F.matmul, torch.matmul, arrays, mesh, layouts)

    assert run_cases(case, 40, seed=11).accepted > 12


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_linear_equals_torch_and_adds_its_bias_once(ndim: int) -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shapes = [(*(2, 3, 5)[: ndim - 1], 4), (6, 4), (6,)]
        arrays = [rng.standard_normal(s) for s in shapes]
        layouts = [draw_layout(rng, s, mesh, partial=i == 0) for i, s in enumerate(shapes)]
        compare_with_serial(F.linear, torch.nn.functional.linear, arrays, mesh, layouts, parameters=[1, 2])

    assert run_cases(case, 16, seed=12).accepted >= 5


# ---- the rules


@pytest.mark.ranks(min=2)
def test_layouts_fall_as_the_labels_say() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)

    def result(x: Layout, w: Layout, out: Layout | None = None, parameter: bool = False) -> Layout:
        w = operand(np.ones((4, 6)), mesh, w, parameter=parameter)
        return hp.einsum("mk,kn->mn", operand(np.ones((5, 4)), mesh, x), w, out=out).layout

    whole, rows, columns, summed = Layout(), Layout("a"), Layout(None, "a"), Layout(partial="a")
    assert result(whole, whole) == whole, "redundant compute"
    assert result(rows, whole) == rows, "data parallel"
    assert result(whole, columns) == columns, "tensor parallel, first layer"
    assert result(columns, rows) == summed, "tensor parallel, second layer"
    assert result(columns, whole) == summed, "the replicated operand is sliced"
    assert result(whole, whole, out=columns) == columns, "nobody is split: the result decides"
    assert result(rows, rows, parameter=True) == rows, "sharded state: gathered on use"
    assert result(rows, columns, out=columns) == columns, "sequence parallel"
    assert result(columns, rows, out=rows) == rows, "sequence parallel, second layer"
    assert result(rows, rows, out=summed) == summed, "a partial result names the contracted label"


@pytest.mark.ranks(min=2)
def test_a_weight_is_never_split_again_silently() -> None:
    """x:S(k), w:S(n) on one axis: gathering on use would be wrong, as k is a label of the weight."""
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = operand(np.ones((6, 4)), mesh, Layout(None, "a"))
    w = operand(np.ones((4, 8)), mesh, Layout(None, "a"), parameter=True)
    with counter.counting() as sent, pytest.raises(LayoutError) as raised:
        hp.einsum("mk,kn->mn", x, w)
    text = str(raised.value)
    assert f"axis 'a' splits k and n in (6, 4) {Layout(None, 'a')!r} and (4, 8)" in text
    assert f"out={Layout(partial='a')!r} moves" in text and f"out={Layout(None, 'a')!r} moves" in text
    collective_assert(mesh.world, not sent, "a message before the error")
    for out in (Layout(partial="a"), Layout(None, "a")):
        assert hp.einsum("mk,kn->mn", x, w, out=out).layout == out


@pytest.mark.ranks(exactly=4)
def test_a_conflict_names_full_layouts_to_paste() -> None:
    mesh = shared_mesh(a=2, b=2)
    x = operand(np.ones((4, 4)), mesh, Layout("a", "b"))
    w = operand(np.ones((4, 4)), mesh, Layout("a"))
    with pytest.raises(LayoutError) as raised:
        hp.einsum("mk,kn->mn", x, w)
    # k over b is settled, so both candidates have P(b) or are refused: over a it is m or k
    assert repr(Layout("a")) in str(raised.value) and repr(Layout(partial="a")) in str(raised.value)


@pytest.mark.ranks(min=2)
def test_of_two_contracted_labels_in_conflict_a_partial_result_takes_the_cheaper() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    rng = np.random.default_rng(5)
    values = rng.standard_normal((2, 6, 8)), rng.standard_normal((30, 6, 8))
    x, w = operand(values[0], mesh, Layout(None, "a")), operand(values[1], mesh, Layout(None, None, "a"))
    with pytest.raises(LayoutError) as raised:
        hp.einsum("ncd,ocd->no", x, w)
    offers = str(raised.value).split("the result keeps: ")[1]
    assert offers.count("out=") == 1 and offers.startswith(f"out={Layout(partial='a')!r} moves")
    with counter.counting() as sent:
        y = hp.einsum("ncd,ocd->no", x, w, out=Layout(partial="a"))
    moved = sum(tally.bytes for tally in sent.values())
    collective_assert(mesh.world, 0 < moved <= x.shard.nbytes, f"only the smaller operand moves, {sent}")
    np.testing.assert_allclose(y.numpy(), np.einsum("ncd,ocd->no", *values), atol=1e-12)


@pytest.mark.ranks(min=2)
def test_gathering_a_parameter_on_use_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    mesh = hp.Mesh(line=hp.current_mesh().size)  # its own, so that the rule is made here
    x = operand(np.ones((4, 4)), mesh, Layout("line"))
    w = operand(np.ones((4, 4)), mesh, Layout("line"), parameter=True)
    with caplog.at_level(logging.INFO, "hpcpar.layout"):
        hp.einsum("mk,kn->mn", x, w)
        hp.einsum("mk,kn->mn", x, w)
    assert [r.getMessage() for r in caplog.records] == [
        "einsum mk,kn->mn: the parameter is gathered over 'line' where it is used"
    ]
    mesh.free()


@pytest.mark.ranks(min=2)
def test_flatten_and_linear_under_a_spatial_split_is_one_all_reduce() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    p, rng = mesh.size, np.random.default_rng(3)
    x = operand(rng.standard_normal((2, 3, 7, 2, 2)), mesh, Layout(None, None, "a"), requires_grad=True)
    w = operand(rng.standard_normal((5, 3, 7, 2, 2)), mesh, Layout(), requires_grad=True, parameter=True)
    with counter.counting() as sent:
        y = hp.einsum("ncdhw,ocdhw->no", x, w).resolve()
    assert list(sent) == [("all_reduce", "a")]
    assert sent["all_reduce", "a"].bytes == pytest.approx(2 * (p - 1) / p * y.numel() * 8)
    with counter.counting() as sent:
        y.sum().backward()
    assert not sent
    assert w.grad.layout == Layout(partial="a"), "blocks among zeros, until the gradient synchronisation"


@pytest.mark.ranks(min=2)
def test_a_partial_operand_is_resolved_before_a_product_by_reduce_scatter_where_it_can() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = operand(np.ones((6, 4)), mesh, Layout(partial="a"))
    w = operand(np.ones((4, 8)), mesh, Layout("a"))
    with counter.counting() as sent:
        y = hp.einsum("mk,kn->mn", x, w)
    assert [k for k, _ in sent] == ["reduce_scatter"] and y.layout == Layout(partial="a")
    with counter.counting() as sent:
        hp.einsum("mk,kn->mn", x, operand(np.ones((4, 8)), mesh, Layout(None, "a")))
    assert [k for k, _ in sent] == ["all_reduce"], "n is no label of x"


def test_equations_that_make_no_sense_are_named() -> None:
    x, w = hp.tensor(np.ones((3, 4))), hp.tensor(np.ones((5, 6)))
    for equation, operands in (
        ("mk,kn->mn", (x, w)),
        ("mk->mz", (x,)),
        ("mm->m", (x,)),
        ("mk,kn", (x, w)),
        ("mk->m", (x, w)),
        ("mkj->m", (x,)),
        ("...k->k", (x,)),
        ("ab,bc,cd->ad", (x, x, x)),
    ):
        with pytest.raises(ValueError, match="einsum"):
            hp.einsum(equation, *operands)
    with pytest.raises(ValueError, match="linear"):
        F.linear(x, w)
    with pytest.raises(ValueError, match="0-dim"):
        F.matmul(hp.tensor(np.array(1.0)), x)


def test_out_is_kept_for_products_with_vectors() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x, v = operand(np.ones((6, 4)), mesh), operand(np.ones(4), mesh)
    assert F.matmul(x, v, out=Layout("a")).sig.layout == Layout("a").on((6,), mesh.shape)
