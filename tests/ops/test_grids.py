"""The parallel matrix products of the literature as layouts of X, W and Y, with exactly the words of their papers.

1.5D: Gholami et al. 2018; SUMMA and Tesseract: Xu et al. 2021, Wang et al. 2021; the cube: Bian et al. 2021; 4D: Singh
and Bhatele (AxoNN); sharded state: Rajbhandari et al. 2020; sequence parallel: Korthikanti et al. 2022. Words are
elements that a rank sends in an optimal algorithm, for m=16, k=24, n=48.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.testing import collective_assert, mpi_run, operand
from hpcpar.transport import counter

M, K, N = 16, 24, 48
Words = dict[tuple[str, str], float]


@dataclass
class Grid:
    """One grid: axes, layouts of X (m, k), W (k, n) and of the result, and the words of each phase."""

    axes: dict[str, int]
    x: Layout
    w: Layout
    out: Layout | None
    forward: Words
    backward: Words
    sync: Words = field(default_factory=dict)


GRIDS = {
    "1.5D": Grid(
        {"Pr": 2, "Pc": 2},
        Layout("Pc"),
        Layout(None, "Pr"),
        Layout("Pc"),
        {("all_gather", "Pr"): 192},
        {("all_reduce", "Pr"): 192},
        {("all_reduce", "Pc"): 576},
    ),
    "SUMMA": Grid(
        {"row": 2, "col": 2},
        Layout("row", "col"),
        Layout("row", "col"),
        Layout("row", "col"),
        {("all_gather", "col"): 96, ("all_gather", "row"): 288},
        {("reduce_scatter", "col"): 96, ("reduce_scatter", "row"): 288},
    ),
    "FSDP": Grid(
        {"batch": 4},
        Layout("batch"),
        Layout("batch"),
        None,
        {("all_gather", "batch"): 864},
        {("reduce_scatter", "batch"): 864},
    ),
    "sequence parallel, column": Grid(
        {"model": 4},
        Layout("model"),
        Layout(None, "model"),
        Layout(None, "model"),
        {("all_gather", "model"): 288},
        {("reduce_scatter", "model"): 288},
    ),
    "sequence parallel, row": Grid(
        {"model": 4},
        Layout(None, "model"),
        Layout("model"),
        Layout("model"),
        {("reduce_scatter", "model"): 576},
        {("all_gather", "model"): 576},
    ),
    "Tesseract": Grid(
        {"depth": 2, "row": 2, "col": 2},
        Layout(("depth", "row"), "col"),
        Layout("row", "col"),
        Layout(("depth", "row"), "col"),
        {("all_gather", "col"): 48, ("all_gather", "row"): 288},
        {("reduce_scatter", "col"): 48, ("reduce_scatter", "row"): 288},
        {("all_reduce", "depth"): 288},
    ),
    "cube": Grid(
        {"i": 2, "j": 2, "l": 2},
        Layout(("i", "j"), "l"),
        Layout("l", ("j", "i")),
        Layout(("i", "l"), "j"),
        {("all_gather", "j"): 48, ("all_gather", "i"): 144, ("reduce_scatter", "l"): 96},
        {("all_gather", "l"): 96, ("reduce_scatter", "j"): 48, ("reduce_scatter", "i"): 144},
    ),
    "4D without data": Grid(
        {"data": 1, "x": 2, "y": 2, "z": 2},
        Layout(("data", "z"), "x"),
        Layout(("x", "z"), "y"),
        None,
        {("all_gather", "z"): 144, ("all_reduce", "x"): 192},
        {("all_reduce", "y"): 96, ("reduce_scatter", "z"): 144},
    ),
    "4D with data": Grid(
        {"data": 2, "x": 2, "y": 2, "z": 1},
        Layout(("data", "z"), "x"),
        Layout(("x", "z"), "y"),
        None,
        {("all_reduce", "x"): 192},
        {("all_reduce", "y"): 96},
        {("all_reduce", "data"): 288},
    ),
}


def words(sent: dict[tuple[str, str], counter.Tally]) -> Words:
    return {key: round(tally.bytes / 8, 6) for key, tally in sent.items()}


def check_grid(name: str) -> str:
    """Forward, backward and gradient synchronisation of one product; values and words. Returns how Y lies."""
    grid = GRIDS[name]
    mesh = Mesh(**grid.axes)
    rng = np.random.default_rng(1)
    x_whole, w_whole, g_whole = (rng.standard_normal(s) for s in ((M, K), (K, N), (M, N)))
    x = operand(x_whole, mesh, grid.x, requires_grad=True)
    w = operand(w_whole, mesh, grid.w, requires_grad=True, parameter=True)
    with counter.counting() as sent:
        y = hp.einsum("mk,kn->mn", x, w, out=grid.out).resolve()
    expect(mesh, name, "forward", words(sent), grid.forward)
    g = operand(g_whole, mesh, y.layout)
    with counter.counting() as sent:
        y.backward(g)
    expect(mesh, name, "backward", words(sent), grid.backward)
    with counter.counting() as sent:
        dw = w.grad.resolve()
    expect(mesh, name, "gradient sync", words(sent), grid.sync)
    exact_values = (x_whole @ w_whole, g_whole @ w_whole.T, x_whole.T @ g_whole)
    for what, got, exact in zip(("Y", "dX", "dW"), (y, x.grad, dw), exact_values, strict=True):
        close = np.allclose(got.numpy(), exact, rtol=1e-12, atol=1e-12)
        collective_assert(mesh.world, close, f"{name}: {what} is wrong")
    collective_assert(mesh.world, dw.layout == w.layout and x.grad.layout == x.layout, f"{name}: gradient layouts")
    lies = repr(y.layout)
    mesh.free()
    return lies


def expect(mesh: Mesh, name: str, phase: str, got: Words, wanted: Words) -> None:
    collective_assert(mesh.world, got == wanted, f"{name}, {phase}: {got} words, not {wanted}")


@pytest.mark.ranks(exactly=4)
@pytest.mark.parametrize("name", [name for name, grid in GRIDS.items() if prod(grid.axes.values()) == 4])
def test_grids_of_four_ranks_move_the_words_of_their_papers(name: str) -> None:
    assert check_grid(name).startswith("Layout")


@pytest.mark.spawns_mpi
@pytest.mark.parametrize("name", [name for name, grid in GRIDS.items() if prod(grid.axes.values()) == 8])
def test_grids_of_eight_ranks_move_the_words_of_their_papers(name: str) -> None:
    run = mpi_run(8, check_grid, name, timeout=90).check()
    assert len(run.results) == 8 and len(set(run.results.values())) == 1


@pytest.mark.ranks(exactly=4)
def test_the_next_layer_of_the_1_5d_grid_gathers_its_input_and_halves_the_backward_words() -> None:
    """Y stays split before the nonlinearity: a reduce-scatter of dX where the paper has an all-reduce."""
    mesh = Mesh(Pr=2, Pc=2)
    rng = np.random.default_rng(2)
    y = operand(rng.standard_normal((M, K)), mesh, Layout("Pc", "Pr"), requires_grad=True)
    w = operand(rng.standard_normal((K, N)), mesh, Layout(None, "Pr"), requires_grad=True, parameter=True)
    with counter.counting() as sent:
        z = hp.einsum("mk,kn->mn", y, w, out=Layout("Pc", "Pr"))
    assert words(sent) == {("all_gather", "Pr"): M / 2 * K / 2}
    with counter.counting() as sent:
        z.backward(operand(np.ones((M, N)), mesh, z.layout))
    assert words(sent) == {("reduce_scatter", "Pr"): M / 2 * K / 2}
    mesh.free()


@pytest.mark.ranks(exactly=4)
@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("FSDP", {("all_gather", "batch"): 864, ("reduce_scatter", "batch"): 864}),
        (
            "SUMMA",
            {
                ("all_gather", "col"): 96,
                ("all_gather", "row"): 288,
                ("reduce_scatter", "col"): 96,
                ("reduce_scatter", "row"): 288,
            },
        ),
    ],
)
def test_operands_kept_by_their_source_are_gathered_again_and_held_by_nobody(name: str, backward: Words) -> None:
    """Three times the words of the forward pass in all, instead of twice, for the memory of one operation."""
    grid = GRIDS[name]
    mesh = Mesh(**grid.axes)
    rng = np.random.default_rng(3)
    results = []
    for keep in ("moved", "source"):
        x = operand(rng.standard_normal((M, K)) if not results else results[0][0].numpy(), mesh, grid.x, True)
        w = operand(rng.standard_normal((K, N)) if not results else results[0][1].numpy(), mesh, grid.w, True, True)
        x.keep = w.keep = keep
        with counter.counting() as sent:
            y = hp.einsum("mk,kn->mn", x, w, out=grid.out)
        expect(mesh, name, "forward", words(sent), grid.forward)
        held = [entry[1]() is not None for t in (x, w) for entry in t._moved or ()]
        assert held and all(held) == any(held) == (keep == "moved")
        with counter.counting() as sent:
            y.backward(operand(np.ones((M, N)), mesh, y.layout))
        expect(mesh, name, "backward", words(sent), grid.backward if keep == "moved" else backward)
        results.append((x, w))
    (x, w), (again_x, again_w) = results
    assert np.array_equal(x.grad.shard, again_x.grad.shard) and np.array_equal(w.grad.shard, again_w.grad.shard)
    mesh.free()
