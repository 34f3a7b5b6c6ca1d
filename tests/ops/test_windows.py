"""Windows of a grid of tokens that cross the borders of shards, and attention inside them, against torch."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.testing import (
    CaseCount,
    collective_assert,
    compare_with_serial,
    draw_layout,
    draw_mesh,
    run_cases,
    shared_mesh,
)
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
DEPTH = {"depth": RANKS}
LETTERS = "DHW"


def torch_partition(x, window, shift):
    """Fill up, roll, cut: as the Swin transformer is usually written."""
    import torch

    sizes, k = x.shape[1:-1], len(window)
    grid = [-(-n // w) for n, w in zip(sizes, window, strict=True)]
    fill = [m for n, g, w in zip(sizes[::-1], grid[::-1], window[::-1], strict=True) for m in (0, g * w - n)]
    x = torch.nn.functional.pad(x, (0, 0, *fill))
    x = torch.roll(x, [-s for s in shift], list(range(1, k + 1)))
    x = x.reshape(x.shape[0], *[m for g, w in zip(grid, window, strict=True) for m in (g, w)], x.shape[-1])
    x = x.permute(0, *range(1, 2 * k, 2), *range(2, 2 * k + 1, 2), 2 * k + 1)
    return x.reshape(x.shape[0], *grid, int(np.prod(window)), x.shape[-1])


def torch_merge(y, window, size, shift):
    """The transpose of the partition, written out: what fills up is dropped."""
    import torch

    k = len(window)
    y = y.reshape(y.shape[0], *y.shape[1 : k + 1], *window, y.shape[-1])
    y = y.permute(0, *[d for i in range(1, k + 1) for d in (i, i + k)], 2 * k + 1)
    y = y.reshape(y.shape[0], *[y.shape[2 * i + 1] * y.shape[2 * i + 2] for i in range(k)], y.shape[-1])
    y = torch.roll(y, list(shift), list(range(1, k + 1)))
    return y[(slice(None), *[slice(0, n) for n in size])]


def torch_attention(q, k, v, bias, size, window, shift, scale):
    """Scores with -inf between tokens that the roll or the filling brought together."""
    import torch

    full = [-(-n // w) * w for n, w in zip(size, window, strict=True)]
    region = torch.zeros(1, *full, 1)
    for d, (n, m, s) in enumerate(zip(size, full, shift, strict=True)):
        place = torch.arange(m).reshape([m if i == d + 1 else 1 for i in range(len(size) + 2)])
        # the roll moves the start of a dim to its end, behind what fills it up
        region = region * 3 + torch.where(place >= n, 2, place < s)
    region = torch_partition(region, window, shift)[..., 0]
    apart = (region[..., :, None] != region[..., None, :])[..., None, :, :]
    scores = torch.einsum("...te,...se->...ts", q, k) * scale + bias
    return torch.softmax(scores.masked_fill(apart, -torch.inf), -1) @ v


def torch_bias(table, window, largest):
    """The bias of each pair of tokens, by their distances."""
    import torch

    rows = table.reshape(*[2 * w - 1 for w in largest], table.shape[1])
    tokens = list(np.ndindex(*window))
    away = [[tuple(a - b + w - 1 for a, b, w in zip(i, j, largest, strict=True)) for j in tokens] for i in tokens]
    return torch.stack([torch.stack([rows[at] for at in row]) for row in away]).permute(2, 0, 1)


def draw_windows(rng, dims):
    size = tuple(int(n) for n in rng.integers(1, 8, dims))
    window = tuple(int(w) for w in rng.integers(1, 4, dims))
    return size, window, tuple(int(rng.integers(w)) for w in window)


def test_partition_and_merge_equal_torch_for_random_windows_and_layouts():
    pytest.importorskip("torch")

    def case(rng):
        dims = int(rng.integers(1, 4))
        size, window, shift = draw_windows(rng, dims)
        x = rng.standard_normal((int(rng.integers(1, 4)), *size, int(rng.integers(1, 4))))
        mesh = draw_mesh(rng)
        layout = draw_layout(rng, x.shape, mesh, partial=True)
        y = compare_with_serial(
            lambda a: F.window_partition(a, window, shift), lambda a: torch_partition(a, window, shift), [x], mesh,
            [layout],
        )  # fmt: skip
        again = draw_layout(rng, y.shape, mesh, partial=True, forbid=[-2])
        compare_with_serial(
            lambda a: F.window_merge(a, window, size, shift), lambda a: torch_merge(a, window, size, shift),
            [rng.standard_normal(y.shape)], mesh, [again],
        )  # fmt: skip

    assert run_cases(case, 40, seed=1) == CaseCount(accepted=40)


def test_window_attention_equals_torch_for_random_windows_and_layouts():
    torch = pytest.importorskip("torch")

    def case(rng):
        dims = int(rng.integers(1, 4))
        size, window, shift = draw_windows(rng, dims)
        grid = [-(-n // w) for n, w in zip(size, window, strict=True)]
        tokens, heads, width = int(np.prod(window)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
        shape = (int(rng.integers(1, 4)), *grid, heads, tokens, width)
        mesh = draw_mesh(rng)
        layout = draw_layout(rng, shape, mesh, partial=True, forbid=[-1, -2])
        largest = tuple(w + int(rng.integers(3)) for w in window)
        table = rng.standard_normal((int(np.prod([2 * w - 1 for w in largest])), heads))
        arrays = [*(rng.standard_normal(shape) for _ in range(3)), table]
        kept = L(*[layout.entry(d) for d in range(len(shape))])
        compare_with_serial(
            lambda q, k, v, b: F.window_attention(
                q, k, v, b, size=size, window_size=window, shift_size=shift, table_window=largest, scale=0.7
            ),
            lambda q, k, v, b: torch_attention(q, k, v, torch_bias(b, window, largest), size, window, shift, 0.7),
            arrays, mesh, [layout, kept, kept, draw_layout(rng, arrays[3].shape, mesh)], parameters=[3], out=kept,
        )  # fmt: skip

    assert torch and run_cases(case, 25, seed=2) == CaseCount(accepted=25)


def test_merge_undoes_partition_where_windows_hang_over_and_ranks_have_none():
    mesh = shared_mesh(**DEPTH)
    x = hp.tensor(np.arange(2 * 5 * 3 * 2.0).reshape(2, 5, 3, 2), mesh, L(None, "depth"))
    windows = F.window_partition(x, (4, 2), (2, 1))
    assert windows.shape == (2, 2, 2, 8, 2) and windows.layout == x.layout
    back = F.window_merge(windows, (4, 2), (5, 3), (2, 1))
    assert back.layout == x.layout and np.array_equal(back.numpy(), x.numpy())


@pytest.mark.ranks(min=2)
def test_nothing_moves_where_windows_and_blocks_have_the_same_borders():
    x = hp.tensor(np.ones((1, 6 * RANKS, 4, 2)), shared_mesh(**DEPTH), L(None, "depth")).requires_grad_()
    with counting() as sent:
        y = F.window_partition(x, (3, 4))
        F.window_merge(y, (3, 4), x.shape[1:-1]).sum().resolve()
    assert not any(tally.bytes for (name, _), tally in sent.items() if name == "halo")


@pytest.mark.ranks(min=2)
def test_a_shift_moves_its_planes_over_every_border_and_as_many_back():
    x = hp.tensor(np.ones((1, 6 * RANKS, 4, 5)), shared_mesh(**DEPTH), L(None, "depth")).requires_grad_()
    plane = 4 * 5 * x.dtype.itemsize
    with counting() as sent:
        y = F.window_partition(x, (3, 2), (1, 1))
    assert sum(tally.bytes for tally in sent.values()) == plane
    with counting() as sent:
        y.backward(y.detach())
    assert sum(tally.bytes for tally in sent.values()) == plane


@pytest.mark.ranks(min=2)
def test_uneven_blocks_move_what_lies_in_the_windows_of_others():
    mesh = shared_mesh(**DEPTH)
    n, w = 11, 2
    x = hp.tensor(np.ones((1, n, 3)), mesh, L(None, "depth"))
    with counting() as sent:
        F.window_partition(x, w)
    grid, (own,) = -(-n // w), [x.sig.box[1]]
    r = mesh.index("depth")
    wanted = range(r * grid // RANKS * w, min((r + 1) * grid // RANKS * w, n))
    missing = sum(not own[0] <= i < own[1] for i in wanted)
    received = mesh.world.gather_objects(missing)
    here = sum(tally.bytes for tally in sent.values())
    collective_assert(mesh.world, sum(mesh.world.gather_objects(here)) == sum(received) * 3 * 8, f"{here} bytes sent")
    assert sum(received) > 0


@pytest.mark.ranks(min=2)
def test_attention_inside_windows_sends_nothing():
    mesh = shared_mesh(**DEPTH)
    q = hp.tensor(np.ones((1, 2 * RANKS, 2, 4, 3)), mesh, L(None, "depth")).requires_grad_()
    with counting() as sent:
        y = F.window_attention(q, q, q, size=[8 * RANKS], window_size=4, shift_size=1)
        y.backward(y.detach())
    assert not sum(tally.bytes for tally in sent.values())


def test_what_cannot_be_served_is_named():
    mesh = shared_mesh(**DEPTH)
    x = hp.tensor(np.ones((2, 4, 6, 5)), mesh, L(None, "depth"))
    with pytest.raises(ValueError, match="less than the window"):
        F.window_partition(x, 2, 2)
    with pytest.raises(ValueError, match="1 to 3 dims"):
        F.window_partition(hp.tensor(np.ones((2, 4)), mesh), 2)
    y = F.window_partition(x, 2)
    q = hp.tensor(np.ones((2, 2, 3, 1, 4, 5)), mesh, L(None, "depth"))
    with pytest.raises(ValueError, match="not the windows"):
        F.window_merge(y, 2, (4, 7))
    with pytest.raises(ValueError, match="a table of shape"):
        F.window_attention(q, q, q, hp.tensor(np.ones((1, 2, 2)), mesh), size=[4, 6], window_size=2)
    if RANKS > 1:
        with pytest.raises(hp.LayoutError, match="tokens of a window"):
            F.window_merge(y.repartition(L(None, None, None, "depth")), 2, (4, 6))
        q = hp.tensor(np.ones((2, 2, 3, 2, 5)), mesh, L(None, None, None, "depth"))
        with pytest.raises(hp.LayoutError, match="may not be split"):
            F.window_attention(q, q, q, size=[4], window_size=2)
        p = q.repartition(L())
        q = q.repartition(L(None, "depth"))
        assert F.window_attention(q, p, p, size=[4], window_size=2).layout == q.layout
        with pytest.raises(hp.LayoutError, match="operands lie differently"):
            F.window_attention(q, p.repartition(L(None, None, "depth")), p, size=[4], window_size=2)
