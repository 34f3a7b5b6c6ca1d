"""Layouts and signatures: what equals what, what is refused, and which block a rank owns."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.blocks import owned
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.signature import signature
from hpcpar.testing import draw_layout, shared_mesh


def test_trailing_dims_default_to_not_split() -> None:
    assert Layout("a") == Layout("a", None, ()) == Layout(("a",))
    assert Layout() == Layout(None, None) and Layout("a", "b") != Layout("b", "a")
    assert hash(Layout("a", None)) == hash(Layout("a"))
    assert Layout("a").entry(0) == ("a",) and Layout("a").entry(5) == ()


def test_a_stack_has_an_order_and_partial_axes_have_none() -> None:
    assert Layout(("a", "b")) != Layout(("b", "a"))
    assert Layout(partial=("a", "b")) == Layout(partial=("b", "a"))
    assert hash(Layout(partial=("a", "b"))) == hash(Layout(partial=("b", "a")))
    assert Layout(partial="a") == Layout(partial=("a",)) != Layout("a")
    assert Layout("a") != "a"


@pytest.mark.parametrize(
    "make", [lambda: Layout("a", "a"), lambda: Layout(("a", "a")), lambda: Layout("a", partial="a")]
)
def test_an_axis_appears_once(make) -> None:
    with pytest.raises(LayoutError, match="'a' appears twice"):
        make()


def test_entries_are_axis_names() -> None:
    with pytest.raises(LayoutError, match="a layout entry is"):
        Layout((1, 2))


def test_replace_and_resolve_make_copies() -> None:
    layout = Layout("a", partial="b")
    assert layout.replace(2, "c") == Layout("a", None, "c", partial="b")
    assert layout.replace(0, None) == Layout(partial="b")
    assert layout.resolved() == Layout("a") and layout.partial == ("b",)
    assert layout.axes == ("a", "b")


def test_what_is_printed_can_be_read_back() -> None:
    for layout in (
        Layout(),
        Layout("a", None, ("b", "c")),
        Layout(None, "b", partial="a"),
        Layout(partial=("a", "b")),
    ):
        assert eval(repr(layout)) == layout


def test_a_layout_on_a_mesh_loses_axes_of_length_one_and_takes_mesh_order() -> None:
    lengths = {"a": 2, "b": 1, "c": 3}
    assert Layout(("a", "b"), "c").on((4, 4), lengths) == Layout("a", "c")
    assert Layout(partial=("c", "b", "a")).on((4,), lengths).partial == ("a", "c")
    with pytest.raises(LayoutError, match=r"names the axis 'd'; the mesh has a, b, c"):
        Layout("d").on((4,), lengths)
    with pytest.raises(LayoutError, match="has 2 entries, the array of shape"):
        Layout("a", "c").on((4,), lengths)


def test_signatures_are_interned_whatever_way_a_layout_is_written() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    first = signature(mesh, (4, 3), Layout("a"))
    assert first is signature(mesh, (np.int64(4), 3), Layout(("a",), None))
    assert first is first.resolved is first.with_layout(Layout("a"))
    assert first is signature(mesh, (4, 3), Layout(partial="a")).with_layout(Layout("a"))
    if mesh.size > 1:
        partial = first.with_layout(Layout(partial="a"))
        assert partial is not partial.resolved and partial.resolved is first.with_layout(Layout())
    with pytest.raises(LayoutError, match="a shape is"):
        signature(mesh, (4, -1), Layout())


def test_blocks_partition_the_array_under_every_layout() -> None:
    rng = np.random.default_rng(0)
    ranks = hp.current_mesh().size
    meshes = [shared_mesh(a=ranks), shared_mesh(a=2, b=2)] if ranks == 4 else [shared_mesh(a=ranks)]
    for mesh, shape, _ in product(meshes, [(5, 3), (1, 7), (0, 4)], range(4)):
        sig = signature(mesh, shape, draw_layout(rng, shape, mesh))
        count = np.zeros(shape, int)
        for box in mesh.world.gather_objects(sig.box):
            count[tuple(slice(*interval) for interval in box)] += 1
        replicas = mesh.size // np.prod([mesh.shape[a] for a in sig.split_axes], dtype=int)
        assert (count == replicas).all()
        assert sig.local_shape == tuple(b - a for a, b in sig.box)
        assert sig.box == sig.box_at(mesh.coords)


@pytest.mark.ranks(exactly=4)
def test_several_axes_on_one_dim_are_one_row_major_index() -> None:
    mesh = shared_mesh(a=2, b=2)
    a, b = mesh.index("a"), mesh.index("b")
    for n in range(9):
        assert signature(mesh, (n,), Layout(("a", "b"))).box == (owned(n, 4, 2 * a + b),)
        assert signature(mesh, (n,), Layout(("b", "a"))).box == (owned(n, 4, 2 * b + a),)


def test_the_order_of_axes_does_not_depend_on_the_hashing_of_strings() -> None:
    """Sets of names iterate differently on each rank; what is walked through comes in mesh order."""
    names = ["height", "batch", "width", "model", "depth", "sequence"]
    mesh = shared_mesh(**{name: hp.current_mesh().size if name == "width" else 1 for name in names})
    assert mesh.sort(set(names)) == tuple(names)
    orders = mesh.world.gather_objects(mesh.sort(frozenset(names[::-1])))
    assert set(orders) == {tuple(names)}
