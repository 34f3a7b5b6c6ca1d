"""Sums under way: the same bits whenever one waits, in place, in pieces, several at a time."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.transport import counter, nonblocking
from hpcpar.transport.comm import PIECE_BYTES
from hpcpar.transport.nonblocking import DIRECT_BYTES, DIRECT_PIECE_BYTES, Reduction


@pytest.fixture(params=["on one node", "between nodes"])
def world(comm, request, monkeypatch):
    """All ranks, one piece of a sum under way at a time, or two, as between nodes."""
    if request.param == "between nodes":
        monkeypatch.setattr(nonblocking, "_on_a_node", lambda handle: False)
    mesh = hp.Mesh(comm)
    yield mesh.world
    mesh.free()


def values(world, n, dtype=np.float64):
    return np.random.default_rng(world.rank).standard_normal(n).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("n", [0, 1, 1000, PIECE_BYTES // 8 + 3])
def test_the_sum_arrives_in_the_buffer(world, n, dtype):
    buffer = np.arange(n).astype(dtype) * (world.rank + 1)
    total = Reduction(world, buffer).wait()
    assert total is buffer
    assert np.array_equal(total, np.arange(n).astype(dtype) * sum(range(1, world.size + 1)))


def test_waiting_late_or_at_once_gives_the_same_bits(world):
    n = 3 * PIECE_BYTES // 8 + 17
    at_once = Reduction(world, values(world, n)).wait()
    under_way = [Reduction(world, values(world, n)) for _ in range(3)]
    for reduction in under_way:
        reduction.test()
    for reduction in reversed(under_way):
        assert np.array_equal(reduction.wait(), at_once)
    assert reduction.test()


def test_sums_of_several_sizes_and_dtypes_share_a_communicator(world):
    sizes = [3, DIRECT_BYTES // 8, 2 * DIRECT_PIECE_BYTES // 8 + 1, 40_000, DIRECT_PIECE_BYTES // 8 + world.size - 1]
    dtypes = [np.float64, np.float64, np.float64, np.float32, np.complex128]
    buffers = [np.full(n, world.rank + 1.0, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    under_way = [Reduction(world, buffer) for buffer in buffers]
    while not under_way[2].test():
        under_way[0].test()
    for reduction, buffer in zip(reversed(under_way), reversed(buffers), strict=True):
        assert reduction.wait() is buffer
        assert np.all(buffer == sum(range(1, world.size + 1)))


def test_all_ranks_get_the_same_bits_wherever_a_number_lies(world):
    n = DIRECT_PIECE_BYTES // 8
    mine = values(world, n)
    rolled = np.roll(mine, n // 3)
    total, other = Reduction(world, mine).wait(), Reduction(world, rolled).wait()
    assert np.array_equal(np.roll(other, -(n // 3)), total)
    assert all(np.array_equal(total, array) for array in world.all_gather(total, [(n,)] * world.size))


def test_messages_may_be_sent_while_a_sum_is_under_way(world):
    reduction = Reduction(world, values(world, 50_000))
    ranks = world.all_reduce(np.array([world.rank]))
    gathered = world.all_gather(np.array([world.rank]), [(1,)] * world.size)
    expected = sum(np.random.default_rng(r).standard_normal(50_000) for r in range(world.size))
    assert np.allclose(reduction.wait(), expected, rtol=0, atol=1e-13)
    assert ranks == sum(range(world.size))
    assert np.concatenate(gathered).tolist() == list(range(world.size))


def test_bytes_are_counted_once_for_all_pieces(world):
    n = 2 * PIECE_BYTES // 8
    with counter.counting() as sent:
        Reduction(world, values(world, n)).wait()
    if world.size == 1:
        assert not sent
    else:
        tally = sent["all_reduce", world.name]
        assert tally.messages == 1
        assert tally.bytes == pytest.approx(2 * (world.size - 1) / world.size * n * 8, rel=1e-14)


def test_a_buffer_with_gaps_is_refused(world):
    with pytest.raises(AssertionError, match="packed"):
        Reduction(world, np.zeros((4, 4))[:, 0])
