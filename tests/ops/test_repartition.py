"""Repartition under every pair of layouts: the identity, forward and backward, in the fewest words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import prod

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh
from hpcpar.ops.repartition import explain
from hpcpar.primitives.repartition import plan, total_words
from hpcpar.signature import Signature, signature
from hpcpar.testing import collective_assert, mpi_run, operand, shared_mesh
from hpcpar.transport import counter

SHAPES = [(5, 3), (1, 7), (0, 4)]
MESHES = {1: [{"a": 1}], 2: [{"a": 2}], 3: [{"a": 3}], 4: [{"a": 2, "b": 2}, {"a": 4}]}


def every_layout(axes: Sequence[str], ndim: int) -> Iterator[Layout]:
    """All layouts: each axis on a dim, partial or left out, and the axes of a dim in every order."""
    seen = set()
    for order in permutations(axes):
        for places in product(range(ndim + 2), repeat=len(axes)):
            dims = [tuple(a for a, d in zip(order, places, strict=True) if d == dim) for dim in range(ndim)]
            partial = tuple(a for a, d in zip(order, places, strict=True) if d == ndim)
            layout = Layout(*dims, partial=partial)
            if layout not in seen:
                seen.add(layout)
                yield layout


def value_of(shard: np.ndarray, sig: Signature) -> np.ndarray:
    """The logical array, put together without the package's own moves."""
    axes = sig.mesh.axes
    total = np.zeros(sig.shape, shard.dtype)
    for coords, piece in sig.mesh.world.gather_objects((sig.mesh.coords, shard)):
        # a replica counts once; what is partial counts on every rank
        if all(coords[a] == 0 for a in axes if a not in sig.split_axes and a not in sig.partial):
            total[tuple(slice(x, y) for x, y in sig.box_at(coords))] += piece
    return total


def words_missing(source: Signature, target: Signature) -> int:
    """How many elements this rank needs under `target` and does not hold under `source`."""
    need = {index for index in np.ndindex(*source.shape) if inside(index, target)}
    return sum(not inside(index, source) for index in need)


def inside(index: tuple[int, ...], sig: Signature) -> bool:
    return all(a <= i < b for i, (a, b) in zip(index, sig.box, strict=True))


def check_pair(mesh: Mesh, shape: tuple[int, ...], first: Layout, second: Layout) -> str:
    """Move an array and a gradient; return what is wrong on this rank."""
    whole = np.arange(prod(shape), dtype=np.float64).reshape(shape) + 1
    x = operand(whole, mesh, first, requires_grad=True)
    with counter.counting() as sent:
        y = hp.functional.repartition(x, second)
    target = signature(mesh, shape, second)
    wrong = []
    if y.sig is not target or y.shard.shape != target.local_shape:
        wrong.append(f"lies as {y.sig!r}, shard {y.shard.shape}")
    if not np.array_equal(value_of(y.shard, y.sig), whole):
        wrong.append("has another value")
    if not x.sig.partial and not target.partial:
        words = words_missing(x.sig, target)
        received = plan(x.sig, target).words
        counts = mesh.world.gather_objects((sum(t.bytes for t in sent.values()) / 8, words))
        sent_by_all, needed_by_all = (sum(column) for column in zip(*counts, strict=True))
        if words != received or sent_by_all != needed_by_all:
            wrong.append(f"needs {words} words, plans {received}; all sent {sent_by_all} and needed {needed_by_all}")
        if sent_by_all != total_words(x.sig, target):
            wrong.append(f"{sent_by_all} words sent, {total_words(x.sig, target)} foretold")
    gradient = whole[::-1].copy() * 3
    y.backward(operand(gradient, mesh, y.layout.resolved()))
    if x.grad.sig is not x.sig.resolved or not np.array_equal(value_of(x.grad.shard, x.grad.sig), gradient):
        wrong.append(f"gradient {x.grad!r} is not the identity's")
    return f"{shape} {first!r} -> {second!r}: {'; '.join(wrong)}" if wrong else ""


def check_pairs(mesh: Mesh, shape: tuple[int, ...], sample: int | None = None) -> int:
    """Check all pairs of layouts, or a random sample; fails on all ranks together."""
    pairs = list(product(every_layout(mesh.axes, len(shape)), repeat=2))
    if sample is not None and sample < len(pairs):
        chosen = np.random.default_rng(len(pairs)).choice(len(pairs), sample, replace=False)
        pairs = [pairs[i] for i in chosen]
    wrong = [text for text in (check_pair(mesh, shape, *pair) for pair in pairs) if text]
    collective_assert(mesh.world, not wrong, "\n".join(wrong[:10]))
    return len(pairs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.ranks(max=4)
def test_every_pair_of_layouts_moves_exactly(shape: tuple[int, ...]) -> None:
    ranks = hp.current_mesh().size
    checked = sum(check_pairs(shared_mesh(**axes), shape, 150) for axes in MESHES[ranks])
    assert checked >= {1: 16, 2: 16, 3: 16, 4: 166}[ranks]


@pytest.mark.ranks(max=4)
def test_images_and_volumes_move_in_memory_order() -> None:
    ranks = hp.current_mesh().size
    for axes in MESHES[ranks]:
        mesh = shared_mesh(**axes)
        assert check_pairs(mesh, (2, 3, 5, 2), 25) == 25
        assert check_pairs(mesh, (1, 3, 2, 5, 2), 25) == 25


def pairs_on_many_ranks(axes: dict[str, int], sample: int) -> int:
    mesh = Mesh(**axes)
    # over 3 x 2 the block [1, 2) of a = 1 goes to b = 0; a block rule applied to the block would give it to b = 1
    wrong = check_pair(mesh, (4, 5), Layout("a", partial="b"), Layout(("a", "b")))
    collective_assert(mesh.world, not wrong, wrong)
    return sum(check_pairs(mesh, shape, sample) for shape in [*SHAPES, (4, 5)])


@pytest.mark.spawns_mpi
@pytest.mark.watchdog(200)
@pytest.mark.parametrize("axes", [{"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2}])
def test_sampled_pairs_of_layouts_on_six_and_eight_ranks(axes: dict[str, int]) -> None:
    run = mpi_run(prod(axes.values()), pairs_on_many_ranks, axes, 40, timeout=180).check()
    assert set(run.results.values()) == {160}


@pytest.mark.ranks(min=2)
def test_conversions_take_the_steps_of_the_table() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    p = mesh.size
    whole = Layout()
    split, other, partial = Layout("a"), Layout(None, "a"), Layout(partial="a")
    table = {
        (whole, split): "slice",
        (split, whole): "all_gather(dim 0, a)",
        (partial, whole): "all_reduce(a)",
        (partial, split): "reduce_scatter(dim 0, a)",
        (split, other): "all_to_all(a)",
        (whole, partial): "keep on index 0",
        (split, partial): "embed in zeros",
    }
    for (source, target), steps in table.items():
        found = plan(signature(mesh, (p, p), source), signature(mesh, (p, p), target))
        assert str(found) == steps
    x = hp.tensor(np.ones((p, p)), mesh, split)
    assert "all_gather" in explain(x, whole) and f"{p * (p - 1)} elements" in explain(x, whole)


@pytest.mark.ranks(exactly=4)
def test_partial_over_two_axes_becomes_split_by_both_without_an_all_reduce() -> None:
    mesh = shared_mesh(a=2, b=2)
    source = signature(mesh, (8,), Layout(partial=("a", "b")))
    assert str(plan(source, signature(mesh, (8,), Layout(("a", "b"))))) == (
        "reduce_scatter(dim 0, a) -> reduce_scatter(dim 0, b)"
    )
    source = signature(mesh, (8, 4), Layout(partial="a"))
    narrowed = plan(source, signature(mesh, (8, 4), Layout(None, "b")))
    assert str(narrowed) == "slice -> all_reduce(a)", "slicing first halves the message"


def test_repartition_to_the_same_layout_is_the_tensor_itself() -> None:
    mesh = hp.current_mesh()
    x = hp.tensor(np.ones((4, 3)), mesh, Layout("batch"))
    assert x.repartition(Layout("batch")) is x
    assert x.resolve() is x


def test_unknown_axis_and_too_many_entries_are_layout_errors() -> None:
    x = hp.tensor(np.ones((4, 3)))
    with pytest.raises(LayoutError, match="names the axis 'nowhere'"):
        x.repartition(Layout("nowhere"))
    again = Mesh(**x.mesh.shape)
    with pytest.raises(LayoutError, match=r"keeps the mesh.*two calls of Mesh make two meshes.*make one mesh"):
        plan(x.sig, signature(again, x.shape, Layout()))
    again.free()
    with pytest.raises(ValueError, match=r"keeps the shape: \(.*\) .* to \(1, 1\)"):
        plan(x.sig, signature(x.mesh, (1, 1), Layout()))
    with pytest.raises(LayoutError, match="3 entries"):
        x.repartition(Layout(None, None, "batch"))


@pytest.mark.ranks(min=2)
def test_a_move_is_remembered_whoever_keeps_its_result_and_forgotten_when_the_value_changes() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = hp.tensor(np.arange(12.0).reshape(4, 3), mesh, Layout("a"))
    whole = signature(mesh, x.shape, Layout())
    with counter.counting() as first:
        kept = [x.moved(whole)]
    if mesh.rank == 0:  # as where an operation saves a part of it on one rank, and all of it on others
        kept.clear()
    with counter.counting() as second:
        again = x.moved(whole)
    assert first and not second
    x.set_data(x.shard * 2)
    with counter.counting() as third:
        assert np.array_equal(x.moved(whole), 2 * again)
    assert third
