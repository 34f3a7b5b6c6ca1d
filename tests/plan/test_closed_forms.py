"""The messages of a step in closed form: halos of one plane, statistics of 2 C values, gradients of 2 (p - 1) / p."""

from __future__ import annotations

from math import prod

import pytest

from hpcpar.plan.dry import Bill, Line, Messages, dry_run, total_bytes

pytestmark = pytest.mark.serial


def line_of(bill: Bill, module: str, op: str) -> Line:
    return next(line for line in bill.lines if line.module == module and line.op == op)


def halo(messages: Messages) -> float:
    return total_bytes(messages, "halo")


@pytest.mark.parametrize("rank", range(4))
def test_halos_of_a_depth_split_are_planes(tasks, rank: int) -> None:
    """A 3^3 convolution gets one plane from each side, forward of x and backward of dY; 3/2/1 pools one from above.

    The first one, whose input needs no gradient, gets x backward too: it has fewer channels.
    """
    width, batch, parts, word = 128, 2, 4, 4
    bill = dry_run(tasks.cosmoflow(width, batch), {"depth": parts}, rank)
    neighbours = (rank > 0) + (rank < parts - 1)
    below = rank < parts - 1
    channels, n = 4, width
    for i, filters in enumerate((16, 32, 64), 1):
        conv, pool = line_of(bill, f"conv{i}", "conv"), line_of(bill, f"pool{i}", "avg_pool")
        assert halo(conv.forward) == neighbours * batch * channels * n**2 * word
        assert halo(conv.backward) == neighbours * batch * (channels if i == 1 else filters) * n**2 * word
        assert halo(pool.forward) == below * batch * filters * n**2 * word
        assert halo(pool.backward) == (rank > 0) * batch * filters * n**2 * word
        channels, n = filters, n // 2
    strided = line_of(bill, "conv4", "conv")
    assert halo(strided.forward) == below * batch * 64 * n**2 * word
    assert halo(strided.backward) == (rank > 0) * batch * 128 * (n // 2) ** 2 * word


def test_halos_of_a_split_in_two_dims_have_corners(tasks) -> None:
    width, word = 16, 4
    bill = dry_run(tasks.unet(width, 1, batch_norm=False), {"height": 2, "width": 2})
    first, second = line_of(bill, "down0.conv1", "conv"), line_of(bill, "down0.conv2", "conv")
    half = width // 2
    rim = width * half * 2 + width  # two faces and the edge between them, of all planes
    assert halo(first.forward) == halo(first.backward) == 1 * rim * word  # the input needs no gradient
    assert halo(second.forward) == 4 * rim * word
    assert halo(second.backward) == 8 * rim * word
    assert halo(line_of(bill, "head", "conv").forward) == 0, "a kernel of 1 needs nobody"
    assert halo(line_of(bill, "pool", "max_pool").forward) == 0, "nor do windows that are not cut"


@pytest.mark.parametrize("shape", [{"depth": 2}, {"batch": 3}, {"batch": 2, "depth": 4}])
def test_statistics_are_two_doubles_a_channel(tasks, shape: dict[str, int]) -> None:
    """Forward all ranks gather (mean, M2), backward they sum (sum g, sum g xhat)."""
    p, axes = prod(shape.values()), "+".join(shape)
    bill = dry_run(tasks.unet(16, 6), shape)
    norms = [line for line in bill.lines if line.op == "batch_norm"]
    assert len(norms) == 10
    for line in norms:
        c = line.out.shape[1]
        assert line.forward["all_gather", axes].bytes == (p - 1) * 2 * c * 8
        assert line.backward["all_reduce", axes].bytes == pytest.approx(2 * (p - 1) / p * 2 * c * 8)


@pytest.mark.parametrize("shape", [{"batch": 4}, {"batch": 2, "depth": 2}, {"depth": 3}])
def test_gradients_cost_a_ring_all_reduce_of_every_parameter(tasks, shape: dict[str, int]) -> None:
    p = prod(shape.values())
    bill = dry_run(tasks.unet(16, 4), shape)
    size = sum(sig.size for sig in bill.parameters.values()) * 4
    assert total_bytes(bill.gradients) == pytest.approx(2 * (p - 1) / p * size)
    assert {operation for operation, _ in bill.gradients} == {"all_reduce"}


def test_ranks_of_space_share_the_filters_behind_it(tasks) -> None:
    """CosmoFlow at 32^3: from conv3 on, layers have more weights than numbers in and out, and are split like those."""
    bill = dry_run(tasks.cosmoflow(32, 4), {"batch": 2, "depth": 2})
    whole = ("conv1", "conv2", "fc1.bias", "fc3.bias")  # the bias of a layer split by its inputs is whole
    sizes = {True: 0, False: 0}
    for name, sig in bill.parameters.items():
        assert sig.local_size == (sig.size if name.startswith(whole) else sig.size // 2), name
        sizes[name.startswith("conv") and name.startswith(whole)] += sig.local_size * 4
    assert bill.gradients["all_reduce", "batch+depth"].bytes == pytest.approx(2 * 3 / 4 * sizes[True])
    assert bill.gradients["all_reduce", "batch"].bytes == pytest.approx(2 * 1 / 2 * sizes[False])
    moved = line_of(bill, "conv3", "repartition")
    assert moved.forward["all_gather", "depth"].bytes == moved.out.local_size // 2 * 4


def test_a_step_with_activations_of_terabytes_is_planned_at_once(tasks) -> None:
    bill = dry_run(tasks.cosmoflow(512, 256), {"batch": 64, "depth": 16, "height": 2}, 1031)
    assert bill.mesh.size == 2048 and bill.mesh.rank == 1031
    assert bill.lines[0].out.shape == (256, 16, 512, 512, 512)
    assert bill.lines[0].out.local_shape == (4, 16, 32, 256, 512)
    assert bill.lines[0].out.size * 4 == 2**41
