"""Convolution under splits: arguments, sizes and uses that partitioned convolutions are known to fail on."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.ops.overlap import tiling
from hpcpar.testing import assert_close_everywhere, compare_with_serial, shared_mesh
from hpcpar.testing.cases import Array, Case
from hpcpar.transport.counter import counting

F, L = hp.functional, hp.Layout
RANKS = MPI.COMM_WORLD.Get_size()
MESH = {"depth": RANKS}
DEPTH = L(None, None, "depth")


def check(op, x, w, layout=DEPTH, weights=None, **arguments):
    pytest.importorskip("torch")
    channels = w[1] * arguments.get("groups", 1) if "transpose" in op else w[0]
    arrays = [Array(x, layout), Array(w, weights or L(), parameter=True), Array((channels,), parameter=True)]
    Case(op, arrays, arguments, MESH).check()


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize("padding", [0, 2])
def test_strides_with_padding_and_even_kernels_on_a_split_depth(kernel, stride, padding):
    check("conv3d", (2, 2, 13, 5, 6), (3, 2, kernel, kernel, kernel), stride=stride, padding=padding)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_transposed_convolution_with_odd_and_even_kernels_and_output_padding(kernel, stride):
    check("conv_transpose2d", (2, 3, 7, 5), (3, 2, kernel, kernel), stride=stride, output_padding=stride - 1)


@pytest.mark.parametrize("n", [11, 12, 13, 17, 23, 24])
@pytest.mark.parametrize("kernel", [2, 7, 11])
def test_kernels_longer_than_a_block_reach_over_several_ranks(n, kernel):
    check("conv1d", (1, 2, n), (3, 2, kernel), padding=kernel // 2)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_planes_than_ranks_leave_blocks_empty(n):
    check("conv3d", (2, 3, n, 4, 5), (4, 3, 3, 3, 3), padding=1)
    check("conv_transpose3d", (2, 3, n, 4, 5), (3, 4, 2, 2, 2), stride=2)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_pad_at_the_outer_ends_only(mode):
    check("conv2d", (2, 3, 9, 5), (4, 3, 5, 3), padding=(2, 1), padding_mode=mode, stride=(2, 1))


def test_channels_split_over_outputs_and_over_inputs_add_the_bias_once():
    check("conv2d", (2, 6, 5, 5), (8, 6, 3, 3), L(), padding=1, weights=L("depth"))
    check("conv2d", (2, 12, 5, 5), (8, 12, 3, 3), L(None, "depth"), padding=1, weights=L(None, "depth"))


def test_depthwise_convolution_with_split_channels():
    check("conv2d", (2, 12, 5, 6), (12, 1, 3, 3), L(None, "depth"), padding=1, groups=12)


@pytest.mark.parametrize("layout", [DEPTH, L("depth"), L(None, None, None, "depth"), L()], ids=str)
@pytest.mark.parametrize("weights", [L(), L("depth")], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_a_sequence_stands_for_its_concatenation_along_the_channels(layout, weights, stride):
    torch = pytest.importorskip("torch")
    rng, mesh = np.random.default_rng(0), shared_mesh(**MESH)
    if weights != L() and layout != L():
        weights = L()
    arrays = [rng.standard_normal(s) for s in ((2, 3, 7, 6, 5), (2, 1, 7, 6, 5), (2, 4, 7, 6, 5), (5, 8, 3, 2, 3))]
    compare_with_serial(
        lambda a, b, c, w: F.conv3d((a, b, c), w, stride=stride, padding=1),
        lambda a, b, c, w: torch.nn.functional.conv3d(torch.cat([a, b, c], 1), w, stride=stride, padding=1),
        arrays, mesh, [layout] * 3 + [weights], parameters=[3],
    )  # fmt: skip


def test_parts_are_joined_where_they_lie_unlike_or_a_bias_is_added():
    torch = pytest.importorskip("torch")
    rng, mesh = np.random.default_rng(0), shared_mesh(**MESH)
    arrays = [rng.standard_normal(s) for s in ((2, 3, 7), (2, 4, 7), (5, 7, 3), (5,))]
    compare_with_serial(
        lambda a, b, w, bias: F.conv1d([a, b], w, bias),
        lambda a, b, w, bias: torch.nn.functional.conv1d(torch.cat([a, b], 1), w, bias),
        arrays, mesh, [DEPTH, L(), L(), L()], parameters=[2, 3],
    )  # fmt: skip


def test_the_sum_of_parts_of_one_convolution_is_the_same_in_pieces():
    rng, mesh = np.random.default_rng(0), shared_mesh(**MESH)
    results = []
    for how in ("whole", "split"):
        a, b = (hp.tensor(rng.standard_normal((1, c, 24, 4, 4)), mesh, DEPTH, requires_grad=True) for c in (2, 3))
        w = hp.tensor(rng.standard_normal((4, 5, 3, 3, 3)), mesh, requires_grad=True)
        with tiling(how):
            y = F.conv3d([a, b], w, padding=1)
            (y * y).sum().backward()
        results.append([t.numpy() for t in (y, a.grad, b.grad, w.grad)])
        rng = np.random.default_rng(0)
    for whole, split in zip(*results, strict=True):
        assert_close_everywhere(mesh.world, split, whole, 1e-12)


@pytest.mark.ranks(exactly=3)
def test_a_split_that_cuts_groups_is_refused_before_any_message():
    mesh = shared_mesh(**MESH)
    x, w = hp.tensor(np.zeros((1, 8, 5)), mesh, L(None, "depth")), hp.tensor(np.zeros((8, 2, 3)), mesh)
    with counting() as sent, pytest.raises(hp.LayoutError, match="4 groups over 3 parts"):
        F.conv1d(x, w, groups=4)
    assert not sent


def test_one_layer_twice_has_two_exchanges_of_one_plan_under_way():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in ((2, 3, 9, 4), (3, 3, 3, 3), (3,))]

    def ours(x, w, b):
        return F.conv2d(F.conv2d(x, w, b, padding=1), w, b, padding=1) + F.conv2d(x, w, b, padding=1)

    def twin(x, w, b):
        conv = torch.nn.functional.conv2d
        return conv(conv(x, w, b, padding=1), w, b, padding=1) + conv(x, w, b, padding=1)

    compare_with_serial(ours, twin, arrays, shared_mesh(**MESH), [DEPTH, L(), L()], parameters=(1, 2))


def test_a_skip_connection_into_a_part_that_is_not_spatial():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in ((2, 3, 9, 4), (5, 3, 3, 3), (5, 7))]

    def ours(x, w, v):
        y = F.conv2d(x, w, padding=1)
        pooled = F.flatten(F.adaptive_avg_pool2d(y, 1), 1)
        whole = y.repartition(L("depth"))  # the same activation under another layout
        return F.matmul(pooled, v).sum() + (whole * whole).sum() + F.max_pool2d(y, 3, 2).sum()

    def twin(x, w, v):
        y = torch.nn.functional.conv2d(x, w, padding=1)
        pooled = y.mean((2, 3))
        return (pooled @ v).sum() + (y * y).sum() + torch.nn.functional.max_pool2d(y, 3, 2).sum()

    compare_with_serial(ours, twin, arrays, shared_mesh(**MESH), [DEPTH, L(), L()], parameters=(1, 2))


def test_shards_thinner_than_the_pool_go_on_with_empty_blocks():
    torch = pytest.importorskip("torch")
    arrays = [np.random.default_rng(0).standard_normal((1, 2, 37, 32))]

    def chain(functional, x):
        for _ in range(5):
            x = functional.avg_pool2d(functional.max_pool2d(x, 3, 1, 1), 2, 2, ceil_mode=True)
        return x

    y = compare_with_serial(
        lambda x: chain(F, x), lambda x: chain(torch.nn.functional, x), arrays, shared_mesh(**MESH), [DEPTH]
    )
    assert y.shape == (1, 2, 2, 1) and y.layout == DEPTH.on(y.shape, MESH)


@pytest.mark.parametrize("batch", [4, 3, 1])
def test_an_input_without_gradient_and_a_smaller_last_batch(batch):
    rng = np.random.default_rng(0)
    mesh = shared_mesh(**MESH)
    x = hp.tensor(rng.standard_normal((batch, 2, 8, 4)), mesh, DEPTH)
    w = hp.Parameter(rng.standard_normal((3, 2, 3, 3)), hp.tensor(np.zeros((3, 2, 3, 3)), mesh).sig)
    y = F.conv2d(x, w, padding=1)
    y.sum().backward()
    assert x.grad is None and w.grad is not None and y.shape == (batch, 3, 8, 4)


@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_the_halo_of_the_last_dim_of_arrays_in_any_memory_order(order):
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 8))
    mesh, layout = shared_mesh(**MESH), L(None, None, None, "depth")
    block = hp.tensor(values, mesh, layout).shard
    if order == "strided":
        wide = np.zeros((*block.shape[:3], 2 * block.shape[3]))
        wide[..., ::2] = block
        block = wide[..., ::2]
    else:
        block = np.array(block, order=order)
    w = hp.tensor(np.random.default_rng(1).standard_normal((2, 3, 3, 3)), mesh)
    y = F.conv2d(hp.from_shard(block, values.shape, mesh, layout), w, padding=1)
    whole = F.conv2d(hp.tensor(values, mesh), w, padding=1)
    assert_close_everywhere(mesh.world, y.numpy(), whole.numpy())


@pytest.mark.ranks(min=2)
def test_bytes_of_forward_and_backward_halos_equal_the_closed_form():
    mesh = shared_mesh(**MESH)
    x = hp.tensor(np.zeros((2, 3, 4 * RANKS, 6)), mesh, DEPTH, requires_grad=True)
    w = hp.tensor(np.zeros((5, 3, 3, 3)), mesh, requires_grad=True)
    neighbours = (mesh.rank > 0) + (mesh.rank < RANKS - 1)
    with counting() as forward:
        y = F.conv2d(x, w, padding=1)
    gradient = hp.tensor(np.zeros(y.shape), mesh, y.layout)
    with counting() as back:
        y.backward(gradient)
    assert sum(t.bytes for (op, _), t in forward.items() if op == "halo") == neighbours * 2 * 3 * 6 * 8
    assert sum(t.bytes for (op, _), t in back.items() if op == "halo") == neighbours * 2 * 5 * 6 * 8


def test_a_single_sample_needs_no_batch_dim():
    mesh = shared_mesh(**MESH)
    x, w = np.random.default_rng(0).standard_normal((2, 9)), np.random.default_rng(1).standard_normal((3, 2, 3))
    y = F.conv1d(hp.tensor(x, mesh, L(None, "depth")), hp.tensor(w, mesh), padding=1)
    z = F.conv1d(hp.tensor(x[None], mesh), hp.tensor(w, mesh), padding=1)
    assert y.shape == (3, 9) and np.allclose(y.numpy(), z.numpy()[0], 1e-12, 1e-12)
