"""Embedding under random layouts of indices and table against torch; what it sends, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.kernels import outline
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.plan import VirtualMesh
from hpcpar.signature import signature
from hpcpar.tensors import Tensor
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

SHAPES = [((3, 5), (7, 4)), ((4,), (2, 3)), ((2, 1, 3), (5, 1)), ((), (6, 4)), ((0, 4), (3, 2)), ((2, 2), (9, 0))]


@pytest.mark.parametrize("parameter", [False, True])
def test_embedding_equals_torch_under_every_layout_it_accepts(parameter: bool) -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        places, table = SHAPES[rng.integers(len(SHAPES))]
        arrays = [rng.integers(0, table[0], places), rng.standard_normal(table)]
        layouts = [draw_layout(rng, places, mesh), draw_layout(rng, table, mesh, partial=not parameter)]
        padding = int(rng.integers(-table[0], table[0])) if rng.integers(2) else None
        compare_with_serial(
            lambda i, w: F.embedding(i, w, padding),
            lambda i, w: torch.nn.functional.embedding(i, w, padding),
            arrays,
            mesh,
            layouts,
            parameters=[1] * parameter,
        )

    assert run_cases(case, 40, seed=21).accepted > 15


def test_embedding_with_a_layout_of_the_result_equals_torch_and_lies_so() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        arrays = [rng.integers(0, 7, (3, 5)), rng.standard_normal((7, 4))]
        layouts = [draw_layout(rng, a.shape, mesh) for a in arrays]
        out = draw_layout(rng, (3, 5, 4), mesh, partial=True)
        compare_with_serial(
            lambda i, w: F.embedding(i, w, out=out),
            torch.nn.functional.embedding,
            arrays,
            mesh,
            layouts,
            parameters=[1],
            out=out,
        )

    assert run_cases(case, 40, seed=22).accepted > 15


def words(index: Layout, table: Layout, out: Layout | None, mesh: hp.Mesh | VirtualMesh) -> tuple[dict, Tensor]:
    """What a rank sends forward but for the check of the indices, and the result: 2 samples of 12 tokens, 8 columns."""
    sigs = signature(mesh, (2, 12), index), signature(mesh, (24, 8), table)
    make = outline.empty if mesh.virtual else np.zeros
    i, w = Tensor(make(sigs[0].local_shape, np.int64), sigs[0]), hp.Parameter(make(sigs[1].local_shape, float), sigs[1])
    with counter.counting() as sent:
        y = F.embedding(i, w, out=out)
    return {key[0]: tally.bytes / 8 for key, tally in sent.items()}, y


@pytest.mark.ranks(min=2)
def test_split_rows_cost_one_reduce_scatter_for_sequence_parallelism_and_split_columns_nothing() -> None:
    p = hp.current_mesh().size
    mesh = shared_mesh(model=p)
    stream = Layout(None, "model")
    sent, y = words(Layout(), Layout("model"), stream, mesh)
    elements = 2 * 12 * 8
    collective_assert(mesh.world, y.layout == stream, f"lies as {y.layout}")
    collective_assert(mesh.world, sent == {"reduce_scatter": pytest.approx(elements * (p - 1) / p)}, f"sent {sent}")
    sent, y = words(Layout(), Layout(None, "model"), None, mesh)
    collective_assert(mesh.world, y.layout == Layout(None, None, "model") and not sent, f"{y.layout}, sent {sent}")
    sent, y = words(Layout(), Layout("model"), None, mesh)
    collective_assert(mesh.world, y.layout == Layout(partial="model") and not sent, f"{y.layout}, sent {sent}")


@pytest.mark.ranks(min=2)
def test_a_table_split_as_the_samples_are_is_gathered_where_it_is_used() -> None:
    p = hp.current_mesh().size
    mesh = shared_mesh(batch=p)
    sent, y = words(Layout(None, "batch"), Layout("batch"), None, mesh)
    collective_assert(mesh.world, y.layout == Layout(None, "batch"), f"lies as {y.layout}")
    assert sent["all_gather"] == pytest.approx(24 * 8 / p * (p - 1))
    assert sent["all_reduce"] == pytest.approx(2 * (p - 1) / p), "the check of the indices"
    index = operand(np.zeros((2, 12), np.int64), mesh, Layout(None, "batch"))
    with pytest.raises(LayoutError, match="axis 'batch' splits b and y"):
        F.embedding(index, operand(np.ones((24, 8)), mesh, Layout("batch")))


@pytest.mark.ranks(min=2)
def test_a_virtual_mesh_counts_the_same_messages() -> None:
    p = hp.current_mesh().size
    mesh, stream = shared_mesh(model=p), Layout(None, "model")
    assert (
        words(Layout(), Layout("model"), stream, VirtualMesh({"model": p}, mesh.rank))[0]
        == (words(Layout(), Layout("model"), stream, mesh)[0])
    )


@pytest.mark.parametrize("wrong", [7, -1])
def test_an_index_outside_ends_in_one_error_on_all_ranks(wrong: int) -> None:
    mesh = shared_mesh(batch=hp.current_mesh().size)
    array = np.zeros((5, 3), np.int64)
    array[4, 1] = wrong
    for rows in (Layout(), Layout("batch")):
        index = operand(array, mesh, Layout("batch"))
        table = operand(np.ones((7, 2)), mesh, rows, parameter=True)
        with pytest.raises(IndexError, match=f"an index is {wrong}, the table has the rows 0 to 6"):
            F.embedding(index, table)


def test_wrong_operands_are_named() -> None:
    mesh = shared_mesh(batch=hp.current_mesh().size)
    table = operand(np.ones((7, 2)), mesh)
    with pytest.raises(ValueError, match=r"takes integers and a table"):
        F.embedding(operand(np.ones(3), mesh), table)
    with pytest.raises(ValueError, match="padding_idx is -8, the table has 7 rows"):
        F.embedding(operand(np.ones(3, np.int64), mesh), table, padding_idx=-8)


def test_the_checked_mode_finds_the_gradient_adjoint() -> None:
    mesh = shared_mesh(batch=hp.current_mesh().size)
    rng = np.random.default_rng(1)
    index = operand(rng.integers(0, 5, (4, 6)), mesh, Layout("batch"))
    table = operand(rng.standard_normal((5, 3)), mesh, Layout(), requires_grad=True, parameter=True)
    with hp.checked() as checker:
        (F.embedding(index, table) * F.embedding(index, table, padding_idx=2)).sum().backward()
    assert [r.what for r in checker.log.records if "embedding" in r.what][:2] == ["embedding", "embedding"]
