"""Operations that rearrange against torch, and the rule of free reshapes against the blocks themselves."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.testing import compare_with_serial, draw_layout, draw_mesh, run_cases, shared_mesh
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional

RESHAPES = [
    ((4, 6), (24,)),
    ((8, 3), (24,)),
    ((24,), (4, 6)),
    ((24,), (2, 3, 4)),
    ((4, 3, 2), (12, 2)),
    ((4, 3, 2), (4, 6)),
    ((1, 4, 3), (4, 1, 3)),
    ((4, 1, 3), (12,)),
    ((5, 3), (15,)),
    ((6,), (3, 2)),
    ((2, 6, 2), (2, 3, 4)),
    ((0, 4), (2, 0, 2)),
    ((1,), ()),
    ((), (1, 1)),
    ((3, 4), (3, 4)),
]


def test_reshapes_equal_torch_or_are_refused_on_all_ranks() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        old, new = RESHAPES[rng.integers(len(RESHAPES))]
        layout = draw_layout(rng, old, mesh, partial=True)
        array = rng.standard_normal(old)
        compare_with_serial(lambda x: x.reshape(new), lambda x: x.reshape(new), [array], mesh, [layout])

    count = run_cases(case, 50, seed=6)
    assert count.accepted > 15


@pytest.mark.parametrize(("old", "new"), RESHAPES)
def test_a_reshape_is_free_exactly_where_every_rank_keeps_its_elements_in_order(
    old: tuple[int, ...], new: tuple[int, ...]
) -> None:
    """For each layout of x: if some layout of the result has the same elements in the same order, it is found."""
    mesh = shared_mesh(a=hp.current_mesh().size)
    numbers = np.arange(prod(old))
    for split in range(len(old)):
        x = hp.tensor(numbers.reshape(old), mesh, Layout(*[None] * split, "a"))
        own = [np.asarray(x.shard).ravel().tolist()]
        fits = []
        for target in range(len(new)):
            whole = hp.tensor(numbers.reshape(new), mesh, Layout(*[None] * target, "a"))
            fits.append(mesh.world.agree(whole.shard.ravel().tolist() == own[0], "all"))
        with counter.counting() as sent:
            try:
                y = x.reshape(new)
            except LayoutError:
                assert not any(fits) or 1 in old or 0 in old, f"{old} -> {new} split {split}: {fits}"
                continue
        assert not sent
        assert y.shard.ravel().tolist() == own[0] and y.shard.shape == y.sig.local_shape
        assert mesh.size == 1 or any(fits) or 0 in old


@pytest.mark.ranks(min=2)
def test_reshapes_of_the_table() -> None:
    p = hp.current_mesh().size
    mesh = shared_mesh(a=p)

    def x(shape: tuple[int, ...], *layout: str | None) -> hp.Tensor:
        return hp.tensor(np.zeros(shape), mesh, Layout(*layout))

    assert x((2 * p, 3, 5), "a").reshape(6 * p, 5).layout == Layout("a"), "(B, S, C) with B a multiple of p"
    assert x((2, 3, 4 * p), None, None, "a").reshape(2, 3, p, 4).layout == Layout(None, None, "a"), "heads"
    with pytest.raises(LayoutError, match="layout="):
        x((2 * p + 1, 3, 5), "a").reshape(6 * p + 3, 5)
    with pytest.raises(LayoutError, match="layout="):
        x((2, 3 * p, 5), None, "a").reshape(6 * p, 5)
    with pytest.raises(LayoutError, match="layout="):
        x((2, 3, 4, 5, 6), None, None, None, "a").flatten(1)
    with pytest.raises(LayoutError, match=r"block|cross"):
        x((p * 3 + 3,), "a").reshape(p + 1, 3)


@pytest.mark.ranks(min=2)
def test_reshape_with_a_layout_is_the_explicit_move() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = np.random.default_rng(1).standard_normal((5, 3, 4))
    compare_with_serial(
        lambda x: x.reshape((15, 4), layout=Layout(None, "a")),
        lambda x: x.reshape(15, 4),
        [x],
        mesh,
        [Layout(None, "a")],
        out=Layout(None, "a"),
    )


SIMPLE = {
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "T of two dims": lambda x: x[0].T,
    "flatten": lambda x: x.flatten(1),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1, -1),
    "number": lambda x: x[:, 1],
    "slices": lambda x: x[1:, ..., ::2],
    "new dims": lambda x: x[:, None, 0:2, :, None],
    "negative number": lambda x: x[-1],
    "nothing": lambda x: x[2:2],
    "everything": lambda x: x[...],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "split": lambda x: x.split(2, 1),
    "chunk": lambda x: x.chunk(2, 2),
    "same part twice": lambda x: x[0:2] * x[1:3],
}


@pytest.mark.parametrize("name", SIMPLE)
def test_views_equal_torch_or_are_refused_on_all_ranks(name: str) -> None:
    function = SIMPLE[name]

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = (4, 3, 5)
        layout = draw_layout(rng, shape, mesh, partial=True)
        compare_with_serial(function, function, [rng.standard_normal(shape)], mesh, [layout])

    assert run_cases(case, 12, seed=7).accepted >= 1


def test_cat_and_stack_equal_torch_or_are_refused_on_all_ranks() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        dim = int(rng.integers(2))
        shapes = [(2, 4, 3), (2, 1, 3)] if dim else [(2, 4, 3), (0, 4, 3), (1, 4, 3)]
        arrays = [rng.standard_normal(s) for s in shapes]
        layouts = [draw_layout(rng, s, mesh, partial=True) for s in shapes]
        compare_with_serial(lambda *x: F.cat(x, dim), lambda *x: torch.cat(x, dim), arrays, mesh, layouts)
        arrays = [rng.standard_normal((2, 3)) for _ in range(3)]
        layouts = [draw_layout(rng, (2, 3), mesh, partial=True) for _ in arrays]
        compare_with_serial(lambda *x: F.stack(x, -1), lambda *x: torch.stack(x, -1), arrays, mesh, layouts)

    assert run_cases(case, 20, seed=8).accepted > 3


def test_cat_of_mixed_dtypes_gives_gradients_in_their_own() -> None:
    x = hp.tensor(np.ones((2, 2), np.float32), requires_grad=True)
    y = hp.tensor(np.ones((2, 2)), requires_grad=True)
    z = hp.cat([x, y])
    assert z.dtype == np.float64
    z.sum().backward()
    assert x.grad.dtype == np.float32 and y.grad.dtype == np.float64


@pytest.mark.ranks(min=2)
def test_permute_keeps_what_is_partial_and_costs_nothing() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)
    x = hp.tensor(np.arange(6.0).reshape(2, 3), mesh, Layout(partial="a"))
    with counter.counting() as sent:
        y = x.T
    assert y.layout == Layout(partial="a") and not sent
    assert np.array_equal(y.numpy(), x.numpy().T)


def test_arguments_that_fit_no_shape_are_named() -> None:
    x = hp.tensor(np.ones((4, 3)))
    for call, error in (
        (lambda: x.reshape(5, -1), ValueError),
        (lambda: x.reshape(-1, -1), ValueError),
        (lambda: x.permute(0, 0), ValueError),
        (lambda: x.expand(4, 6), ValueError),
        (lambda: x[4], IndexError),
        (lambda: x[0, 0, 0], IndexError),
        (lambda: x[True], TypeError),
        (lambda: x[::-1], ValueError),
        (lambda: x.narrow(0, 3, 2), ValueError),
        (lambda: x.split([1, 2]), ValueError),
        (lambda: hp.cat([]), ValueError),
        (lambda: hp.cat([x, hp.tensor(np.ones((4, 4)))]), ValueError),
    ):
        with pytest.raises(error):
            call()


def test_iteration_and_length_follow_the_first_dim() -> None:
    x = hp.tensor(np.arange(6.0).reshape(3, 2))
    assert len(x) == 3
    assert [row.numpy().tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    for shape in product([1, 2], repeat=2):
        assert hp.tensor(np.ones(shape)).squeeze().shape == tuple(n for n in shape if n != 1)
