"""The background thread delivers all items in order, hands on errors with their traceback, and always ends."""

import gc
import threading
import traceback

import pytest

from hpcpar.data.prefetch import Prefetch

pytestmark = pytest.mark.serial


def threads():
    return [t for t in threading.enumerate() if t.name == "hpcpar-prefetch"]


def counted(n, made):
    for i in range(n):
        made.append(i)
        yield i


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_and_the_thread_ends(depth):
    assert list(Prefetch(range(20), depth)) == list(range(20))
    assert not threads()


def test_no_more_items_wait_than_asked_for():
    made = []
    with Prefetch(counted(100, made), depth=2) as items:
        for i in items:
            assert len(made) <= i + 4  # one in hand, two in the queue, one waiting to be put there
            if i == 10:
                break
    assert len(made) <= 15 and not threads()


def broken():
    yield 1
    yield 2
    raise ZeroDivisionError("sample 3 is bad")


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it_with_its_traceback(depth):
    items = Prefetch(broken(), depth)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="sample 3 is bad") as caught:
        next(items)
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)


def test_an_error_in_the_consumer_ends_the_thread():
    with pytest.raises(KeyError), Prefetch(iter(int, 1), depth=2) as items:
        next(items)
        raise KeyError
    assert not threads()


def test_losing_the_last_reference_ends_the_thread():
    items = Prefetch(iter(int, 1), depth=2)
    next(items)
    (thread,) = threads()
    del items
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_a_closed_prefetch_is_exhausted_and_closing_twice_is_harmless():
    items = Prefetch(range(5), depth=1)
    items.close()
    items.close()
    assert list(items) == []


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="prefetch depth is -1"):
        Prefetch([], -1)
