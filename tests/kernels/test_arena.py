"""Memory of large results: used again, never twice at once, and not cut up by small arrays."""

import gc
import os
import threading

import numpy as np
import pytest

from hpcpar.kernels import arena
from hpcpar.kernels.arrays import empty_channels_last, zeros_channels_last

pytestmark = pytest.mark.serial
PAGE = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """An arena of its own, for arrays from one page on."""
    gc.collect()
    monkeypatch.setattr(arena, "LEAST", PAGE)
    monkeypatch.setattr(arena, "_blocks", [])
    arena._returned.clear()


def pages(count, dtype=np.uint8):
    return arena.empty((count, PAGE // np.dtype(dtype).itemsize), dtype)


def place(a):
    return a.__array_interface__["data"][0]


def test_arrays_are_those_of_numpy_and_lie_on_pages():
    for shape, dtype in (((3, 5, 1001), np.float32), ((7, 4096), np.int8), ((2, 600), np.complex128)):
        a = arena.empty(shape, dtype)
        assert a.shape == shape and a.dtype == dtype and a.flags.c_contiguous and a.flags.writeable
        assert place(a) % PAGE == 0
    assert arena.empty((10,), np.float32).base is None, "a small one is NumPy's"


def test_memory_is_used_again_once_the_last_view_is_gone():
    a = pages(8)
    first, view = place(a), a[2:4]
    del a
    other = pages(8)
    assert place(other) != first
    del view
    assert place(pages(8)) == first
    assert arena.held() == 16 * PAGE


def test_ranges_that_come_back_are_joined():
    whole = pages(12)
    first = place(whole)
    del whole
    parts = [pages(4) for _ in range(3)]
    assert sorted(place(p) - first for p in parts) == [0, 4 * PAGE, 8 * PAGE]
    del parts[1], parts[0]
    parts.clear()
    assert place(pages(12)) == first and arena.held() == 12 * PAGE


def test_what_stays_does_not_cut_up_the_memory_of_something_much_larger():
    """A large result is dropped in forward; what is kept after it must leave its place to the gradient."""
    large = pages(64)
    first = place(large)
    del large
    between = pages(16)
    kept = [pages(4), pages(2)]
    del between
    assert place(pages(64)) == first
    assert all(not first <= place(a) < first + 64 * PAGE for a in kept)


def test_blocks_that_are_too_small_are_given_up_before_a_larger_one_is_made():
    del_me = pages(8)
    stays = pages(6)
    del del_me
    large = pages(100)
    assert arena.held() == 106 * PAGE
    del large, stays
    assert place(pages(30)) and arena.held() == 106 * PAGE


def test_trimming_gives_up_what_nobody_uses():
    a, b = pages(8), pages(9)
    b[...] = 5
    del a
    arena.trim()
    assert arena.held() == 9 * PAGE and np.all(b == 5)
    del b
    arena.trim()
    assert arena.held() == 0


def test_a_child_that_is_forked_while_another_thread_works_here_goes_on():
    with arena._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if pages(8).size == 8 * PAGE else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_arrays_in_use_never_share_memory_also_from_several_threads():
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        mine = []
        for step in range(300):
            if mine and rng.random() < 0.5:
                a, value = mine.pop(rng.integers(len(mine)))
                if not np.all(a == value):
                    wrong.append(seed)
            a, value = pages(int(rng.integers(1, 9)), np.int64), seed * 1000 + step
            a[...] = value
            mine.append((a, value))
            if len(mine) > 6:
                mine.pop(0)
        wrong.extend(seed for a, value in mine if not np.all(a == value))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert arena.held() < 4 * 7 * 9 * PAGE * 2


def test_channels_last_arrays_come_from_here_and_zeros_are_zero():
    a = empty_channels_last((1, 16, 8, 8, 8), np.float64)
    a[...] = 7
    first = place(a)
    del a
    z = zeros_channels_last((1, 16, 8, 8, 8), np.float64)
    assert place(z) == first and z.shape == (1, 16, 8, 8, 8) and not z.any()


def test_the_switch_that_leaves_malloc_alone_leaves_this_out_too(monkeypatch):
    monkeypatch.setattr(arena, "_enabled", False)
    assert pages(8).base is None and arena.held() == 0
