"""Persistent and in-place exchanges on a ring: contents, order, bytes, reuse."""

import numpy as np
import pytest

from hpcpar.transport import Comm, counter
from hpcpar.transport.exchange import Exchange, InPlaceExchange, Rows, all_done, wait_all


@pytest.fixture
def ring(comm):
    return Comm(comm, "ring")


def test_persistent_exchange_repeats_with_changing_data(ring):
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    to_right, from_left = np.empty(5), np.empty(5)
    exchange = Exchange(ring, [(right, to_right)], [(left, from_left)], tag=3)
    for turn in range(2000):
        to_right[:] = 10 * turn + ring.rank
        exchange.start()
        if turn % 2:
            while not exchange.test():
                pass
        exchange.wait()
        assert (from_left == 10 * turn + left).all()
    exchange.free()
    exchange.free()


def test_two_messages_between_one_pair_arrive_in_the_order_they_were_named(ring):
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    sent = [np.full(3, 1.0 + ring.rank), np.full(3, 100.0 + ring.rank)]
    got = [np.empty(3), np.empty(3)]
    exchange = Exchange(ring, [(right, b) for b in sent], [(left, b) for b in got])
    exchange.start()
    exchange.wait()
    assert [b[0] for b in got] == [1 + left, 100 + left]
    exchange.free()


def test_messages_and_bytes_are_counted(ring):
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    buffer = np.zeros((4, 3), np.float32)
    exchange = Exchange(ring, [(right, buffer)], [(left, np.empty((4, 3), np.float32))], operation="halo")
    with counter.counting() as counted:
        for _ in range(3):
            exchange.start()
            exchange.wait()
    assert (counted["halo", "ring"].messages, counted["halo", "ring"].bytes) == (3, 3 * 48)
    exchange.free()


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128", "bool", "int8"])
def test_in_place_exchange_moves_rows_of_any_dtype_into_rows_of_another_shape(ring, dtype):
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    item = np.dtype(dtype).itemsize
    source = (np.arange(4 * 6 * 2).reshape(4, 6, 2) % 2 + ring.rank % 2).astype(dtype)
    target = np.zeros((4, 3, 2), dtype)
    # columns 1 and 2 of the source become columns 1 and 2 of the target
    exchange = InPlaceExchange(
        ring,
        [(right, Rows(1 * 2 * item, 4, 2 * 2 * item, 6 * 2 * item))],
        [(left, Rows(1 * 2 * item, 4, 2 * 2 * item, 3 * 2 * item))],
    )
    requests = exchange.receive(target)
    requests += exchange.send(source)
    while not all_done(requests):
        pass
    wait_all(requests)
    theirs = (np.arange(4 * 6 * 2).reshape(4, 6, 2) % 2 + left % 2).astype(dtype)
    np.testing.assert_array_equal(target[:, 1:], theirs[:, 1:3])
    assert not target[:, 0].any()
    assert exchange.bytes_sent == 4 * 4 * item
    exchange.free()


def test_a_persistent_message_fits_an_in_place_one(ring):
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    packed = np.arange(6.0) + ring.rank
    target = np.zeros((3, 4))
    exchange = Exchange(ring, [(right, packed)], tag=5)
    in_place = InPlaceExchange(ring, receives=[(left, Rows(8, 3, 16, 32))], tag=5)
    requests = in_place.receive(target)
    exchange.start()
    exchange.wait()
    wait_all(requests)
    np.testing.assert_array_equal(target[:, 1:3], (np.arange(6.0) + left).reshape(3, 2))
    exchange.free()
    in_place.free()


def test_misuse_is_refused(ring):
    with pytest.raises(AssertionError, match="empty"):
        Exchange(ring, [(0, np.empty(0))])
    with pytest.raises(AssertionError, match="gaps"):
        Exchange(ring, [(0, np.empty((4, 4)).T)])
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    exchange = Exchange(ring, [(right, np.zeros(1))], [(left, np.zeros(1))])
    exchange.start()
    with pytest.raises(AssertionError, match="under way"):
        exchange.start()
    with pytest.raises(AssertionError, match="under way"):
        exchange.free()
    exchange.wait()
    exchange.free()
