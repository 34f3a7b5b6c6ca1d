"""Order of samples: a function of (seed, epoch), every sample once, resumable at any batch and with any batch size."""

import numpy as np
import pytest

from hpcpar.data import Position, Sampler
from hpcpar.data.streams import permutation, stream, uniform
from hpcpar.layout.blocks import owned

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("samples,batch", [(10, 4), (8, 4), (1, 1), (3, 8), (17, 5)])
def test_every_epoch_uses_every_sample_once(samples, batch):
    sampler = Sampler(samples, batch, seed=3)
    for epoch in range(3):
        batches = [indices for _, indices in sampler.epoch(Position(epoch))]
        assert len(batches) == len(sampler)
        assert all(len(indices) == batch for indices in batches[:-1]) and 1 <= len(batches[-1]) <= batch
        assert sorted(np.concatenate(batches)) == list(range(samples))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    orders = [Sampler(50, 4, seed).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert Sampler(50, 7, 1).order(2).tolist() == orders[5]
    again = Sampler(50, 4, 0)
    assert [again.order(epoch).tolist() for epoch in (2, 1, 0)] == [orders[2], orders[1], orders[0]]


def test_the_order_is_the_same_on_every_machine():
    assert Sampler(8, 4, seed=7).order(1).tolist() == [2, 0, 5, 3, 6, 7, 1, 4]


def test_without_shuffling_the_order_is_that_of_the_files():
    batches = [indices.tolist() for _, indices in Sampler(5, 2, shuffle=False).epoch(Position(9))]
    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_share_each_batch_with_nothing_lost_or_repeated(ranks):
    sampler = Sampler(10, 4, seed=1)
    taken = [[] for _ in range(ranks)]
    for _, indices in sampler.epoch(Position(0)):
        for rank in range(ranks):
            start, stop = owned(len(indices), ranks, rank)
            taken[rank] += indices[start:stop].tolist()
    assert sorted(sum(taken, [])) == list(range(10))


def test_positions_count_samples_and_resume_with_another_batch_size():
    first = Sampler(10, 4, seed=2)
    position, used = Position(), []
    for _ in range(4):
        used += first.indices(position).tolist()
        position = first.after(position)
    assert position == Position(1, 4) and first.seen(position) == len(used) == 14

    second = Sampler(10, 3, seed=2)
    position = Position(**position.state_dict())
    rest = [indices.tolist() for _, indices in second.epoch(position)]
    assert [len(batch) for batch in rest] == [3, 3]
    assert sorted(used[10:] + sum(rest, [])) == list(range(10))


def test_senseless_sizes_are_refused():
    with pytest.raises(ValueError, match="nothing to make batches of"):
        Sampler(0, 4)
    with pytest.raises(ValueError, match="batch size 0"):
        Sampler(4, 0)
    with pytest.raises(ValueError, match="outside of an epoch of 4 samples"):
        Sampler(4, 2).indices(Position(0, 4))


def test_the_shared_order_cannot_be_changed_by_a_consumer():
    with pytest.raises(ValueError, match="read-only"):
        Sampler(4, 2).order(0)[0] = 3


def test_permutations_are_even():
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        counts[permutation(0, stream("t", epoch), 5), np.arange(5)] += 1
    np.testing.assert_allclose(counts / 2000, 0.2, atol=0.04)  # 4.5 standard deviations


def test_streams_differ_by_purpose_and_numbers():
    numbers = [stream("flip", 1, 2), stream("flip", 2, 1), stream("flip", 12), stream("noise", 1, 2)]
    assert len(set(numbers)) == 4
    draws = uniform(5, stream("flip", 1, 2), 1000)
    assert draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.04
    assert not np.array_equal(draws, uniform(6, stream("flip", 1, 2), 1000))
