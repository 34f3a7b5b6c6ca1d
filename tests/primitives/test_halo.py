"""The halo exchange and its adjoint against their definition, on 1 to 3 split dims of any number of ranks."""

import numpy as np
import pytest

from hpcpar.kernels import is_channels_last, to_channels_last
from hpcpar.layout.blocks import owned
from hpcpar.layout.maps import window_map
from hpcpar.layout.plan import block_plan
from hpcpar.primitives import halo as halo_module
from hpcpar.primitives.halo import HaloExchange, cached_halo, clear_cache
from hpcpar.testing import dot_test
from hpcpar.testing.halo_cases import Case, drawn_cases
from hpcpar.transport import Comm, counter


@pytest.fixture
def ranks(comm):
    return Comm(comm, "ranks")


@pytest.fixture(params=["packed", "in place", "mixed"])
def way(request, monkeypatch, ranks):
    """Force messages to be packed, to go in place, or to differ in that between the two sides."""
    least = {"packed": 1 << 40, "in place": 0, "mixed": 0 if ranks.rank % 2 else 1 << 40}[request.param]
    monkeypatch.setattr(halo_module, "IN_PLACE_BYTES", least)


def whole_of(case, seed):
    return np.random.default_rng(seed).integers(-99, 100, (*case.lead, *case.lengths)).astype(float)


def local(array, case_number):
    """A rank's array in one of three memory orders."""
    if case_number % 3 == 0:
        return to_channels_last(array)
    return np.ascontiguousarray(array) if case_number % 3 == 1 else array


def test_buffers_equal_the_indexed_global_array(ranks, way):
    for number, case in enumerate(drawn_cases(ranks.size, 1, 400)):
        whole = whole_of(case, number)
        halo = case.halo(ranks)
        x = local(whole[case.block(ranks.rank)], number)
        buffer = halo(x, fill=-7.5)
        np.testing.assert_array_equal(buffer, case.buffer(ranks.rank, whole, -7.5), err_msg=f"case {number}\n{halo}")
        assert buffer is x or is_channels_last(buffer)
        halo.free()


@pytest.mark.parametrize("give", [False, True], ids=["kept", "given"])
def test_adjoint_adds_every_copy_to_its_element(ranks, way, give):
    in_place = 0
    for number, case in enumerate(drawn_cases(ranks.size, 2, 400)):
        gradients = [case.gradient(r, number) for r in range(ranks.size)]
        halo = case.halo(ranks)
        g = local(gradients[ranks.rank].copy(), number)
        dx = halo.adjoint(g, give)
        # small integers: the sum is exact in any order
        wanted = case.adjoint(gradients)[case.block(ranks.rank)]
        np.testing.assert_array_equal(dx, wanted, err_msg=f"case {number}\n{halo}")
        if not give:
            np.testing.assert_array_equal(g, gradients[ranks.rank], err_msg="a gradient that is kept was changed")
        in_place += dx is not g and np.shares_memory(dx, g)
        halo.free()
    assert in_place == 0 or give
    assert in_place > 0 or not give or ranks.size == 1


def test_dot_test_of_exchange_and_adjoint(ranks):
    for number, case in enumerate(drawn_cases(ranks.size, 3, 60)):
        halo = case.halo(ranks)
        rng = np.random.default_rng([number, ranks.rank])
        x, y = rng.standard_normal(halo.block_shape), rng.standard_normal(halo.shape)
        if case.shows_something:
            assert dot_test(halo, halo.adjoint, x, y, ranks) <= 1e-14
        halo.free()


def test_bytes_equal_the_closed_form_and_the_counter(ranks, way):
    for number, case in enumerate(drawn_cases(ranks.size, 4, 150)):
        halo = case.halo(ranks, "float32")
        wanted = case.bytes_sent(ranks.rank, 4)
        assert halo.bytes_sent == wanted
        total = ranks.all_reduce(np.array([halo.bytes_sent - halo.bytes_received]))
        assert total[0] == 0
        x = np.ones(halo.block_shape, np.float32)
        with counter.counting() as forward:
            buffer = halo(x)
        with counter.counting() as back:
            halo.adjoint(buffer.astype(np.float32))
        for counted, expected in ((forward, halo.bytes_sent), (back, halo.bytes_received)):
            assert sum(tally.bytes for tally in counted.values()) == expected, number
            assert all(key == ("halo", "ranks") for key in counted)
        halo.free()


def test_convolution_split_by_depth_sends_the_kernel_minus_one_planes(ranks):
    n, channels, side = 4 * ranks.size, 6, 5
    plans = [block_plan(window_map, n, ranks.size, ranks.rank, n, 3, 1, 1, 1)]
    plans += [block_plan(window_map, side, 1, 0, side, 3, 1, 1, 1)] * 2
    halo = HaloExchange(ranks, plans, (2, channels), "float32")
    neighbours = (ranks.rank > 0) + (ranks.rank < ranks.size - 1)
    assert halo.bytes_sent == halo.bytes_received == neighbours * 2 * channels * side**2 * 4
    assert len(halo.peers) == neighbours
    halo.free()


def test_padding_left_to_the_kernel_is_what_the_buffer_lacks(ranks):
    for number, case in enumerate(drawn_cases(ranks.size, 5, 150)):
        whole = whole_of(case, number)
        x = whole[case.block(ranks.rank)]
        halo = case.halo(ranks, pads="kernel")
        cut = halo(x)
        # a dim of nothing but FILL is all padding
        padded = np.pad(cut, [(0, 0), (0, 0), *halo.padding])
        np.testing.assert_array_equal(padded, case.buffer(ranks.rank, whole, 0.0))
        g = case.gradient(ranks.rank, number)
        inside = tuple(slice(lo, n - hi) for (lo, hi), n in zip(halo.padding, g.shape[2:], strict=True))
        plain = case.halo(ranks)
        np.testing.assert_array_equal(halo.adjoint(g[(slice(None), slice(None), *inside)]), plain.adjoint(g))
        halo.free()
        plain.free()


def test_several_exchanges_of_one_plan_in_flight(ranks, way):
    for number, case in enumerate(drawn_cases(ranks.size, 6, 40)):
        halo = case.halo(ranks)
        wholes = [whole_of(case, 10 * number + turn) for turn in range(3)]
        blocks = [whole[case.block(ranks.rank)] for whole in wholes]
        gradients = [case.gradient(r, number) for r in range(ranks.size)]
        pending = [halo.start(x) for x in blocks]
        back = halo.start_adjoint(gradients[ranks.rank])
        sets = halo.buffer_sets
        for at in (2, 0, 1):
            np.testing.assert_array_equal(pending[at].wait(), case.buffer(ranks.rank, wholes[at], 0.0))
            assert pending[at].wait() is pending[at].buffer
        np.testing.assert_array_equal(back.wait(), case.adjoint(gradients)[case.block(ranks.rank)])
        assert not halo.busy
        for x, whole in zip(blocks, wholes, strict=True):
            np.testing.assert_array_equal(halo(x), case.buffer(ranks.rank, whole, 0.0))
        assert halo.buffer_sets == sets <= 4, "message buffers are used again"
        halo.free()


@pytest.mark.watchdog(240)
def test_five_thousand_exchanges_in_a_row_with_changing_data(ranks):
    n = 2 * ranks.size + 1
    plan = block_plan(window_map, n, ranks.size, ranks.rank, n, 5, 1, 1, 2, "circular")
    halo = HaloExchange(ranks, [plan], (1, 1), "float64")
    a, b = plan.block
    shown = np.arange(a - 2, b + 2) % n
    blocks = [owned(n, ranks.size, r) for r in range(ranks.size)]
    copies = sum(np.bincount(np.arange(lo - 2, hi + 2) % n, minlength=n) for lo, hi in blocks)[a:b]
    for turn in range(5000):
        whole = np.arange(n) * 3.0 + turn
        buffer = halo(whole[None, None, a:b])
        assert (buffer[0, 0] == whole[shown]).all(), turn
        if turn % 10 == 0:
            dx = halo.adjoint(np.full((1, 1, plan.size), 1.0 + turn))
            assert (dx == copies * (1.0 + turn)).all(), turn
    assert halo.buffer_sets == (2 if halo.peers else 0)
    halo.free()


def test_test_makes_progress_until_everything_has_arrived(ranks, way):
    case = Case((8 * ranks.size,), (ranks.size,), [], (2, 3))
    case.maps = [[window_map(*case.lengths, 8 * r, 8 * r + 8, 3, 1, 1, 1) for r in range(ranks.size)]]
    halo = case.halo(ranks)
    whole = whole_of(case, 0)
    pending = halo.start(whole[case.block(ranks.rank)])
    home = slice(*halo.plans[0].at_home)
    wanted = case.buffer(ranks.rank, whole, 0.0)
    np.testing.assert_array_equal(pending.buffer[:, :, home], wanted[:, :, home], err_msg="own part is there at once")
    while not pending.test():
        pass
    np.testing.assert_array_equal(pending.wait(), wanted)
    assert pending.test()
    halo.free()


def test_own_block_written_into_the_buffer_is_not_copied(ranks, way):
    n = 3 * ranks.size
    plans = [block_plan(window_map, n, ranks.size, ranks.rank, n, 3, 1, 1, 1)]
    plans += [block_plan(window_map, 4, 1, 0, 4, 3, 1, 1, 1)]
    halo = HaloExchange(ranks, plans, (2, 3), "float64")
    whole = np.random.default_rng(1).random((2, 3, n, 4))
    buffer = to_channels_last(np.full(halo.shape, np.nan))
    core = halo.core(buffer)
    core[...] = whole[:, :, 3 * ranks.rank : 3 * ranks.rank + 3]
    assert np.shares_memory(core, buffer)
    result = halo.start(core, out=buffer).wait()
    assert result is buffer
    padded = np.pad(whole, [(0, 0), (0, 0), (1, 1), (1, 1)])
    np.testing.assert_array_equal(buffer, padded[:, :, 3 * ranks.rank : 3 * ranks.rank + 5])
    with pytest.raises(ValueError, match="channels last"):
        halo.start(core.copy(), out=np.zeros(halo.shape))
    halo.free()


def test_nothing_to_do_returns_the_array_itself(ranks):
    n = 2 * ranks.size
    halo = HaloExchange(ranks, [block_plan(window_map, n, ranks.size, ranks.rank, n, 1, 1, 1, 0)], (1, 2), "float32")
    x = np.ones(halo.block_shape, np.float32)
    assert halo(x) is x
    assert halo.adjoint(x) is x
    assert (halo.peers, halo.bytes_sent, halo.buffer_sets) == ((), 0, 0)
    halo.free()


def test_ranks_in_any_order_over_the_dims(ranks):
    """Coordinates need not be row-major in the communicator: here they run backwards."""
    n, p = 3 * ranks.size, ranks.size
    coord = p - 1 - ranks.rank
    plan = block_plan(window_map, n, p, coord, n, 3, 1, 1, 1)
    halo = HaloExchange(ranks, [plan], (1, 1), "float64", ranks=np.arange(p)[::-1])
    whole = np.arange(1.0, n + 1)
    buffer = halo(whole[None, None, slice(*plan.block)])
    np.testing.assert_array_equal(buffer[0, 0], np.pad(whole, 1)[plan.block[0] : plan.block[1] + 2])
    halo.free()


def test_wrong_arrays_are_refused_with_both_shapes(ranks):
    n = 8 * ranks.size
    halo = HaloExchange(ranks, [block_plan(window_map, n, ranks.size, ranks.rank, n, 3, 1, 1, 1)], (1, 1), "float64")
    with pytest.raises(ValueError, match=r"\(1, 1, 8\).*\(1, 1, 9\)"):
        halo(np.zeros((1, 1, 9)))
    with pytest.raises(ValueError, match="float64.*float32"):
        halo(np.zeros((1, 1, 8), np.float32))
    with pytest.raises(ValueError, match="kernel"):
        HaloExchange(ranks, [], (1, 1), "float64", pads="both")


def test_an_empty_batch_sends_nothing(ranks):
    n = 2 * ranks.size
    halo = HaloExchange(ranks, [block_plan(window_map, n, ranks.size, ranks.rank, n, 3, 1, 1, 1)], (0, 4), "float32")
    assert halo.peers == ()
    assert halo(np.zeros(halo.block_shape, np.float32)).shape == (0, 4, 4)
    halo.free()


def test_cached_exchanges_are_shared_and_bounded(ranks, monkeypatch):
    monkeypatch.setattr(halo_module, "CACHED", 3)
    clear_cache()
    plan = block_plan(window_map, 4 * ranks.size, ranks.size, ranks.rank, 4 * ranks.size, 3, 1, 1, 1)
    first = cached_halo(ranks, [plan], (1, 1), "float32")
    assert cached_halo(ranks, [plan], (1, 1), np.float32) is first
    under_way = first.start(np.zeros((1, 1, 4), np.float32))
    for channels in range(2, 8):
        other = cached_halo(ranks, [plan], (1, channels), "float32")
        other(np.zeros(other.block_shape, np.float32))
    assert len(halo_module._cache) <= 4
    under_way.wait()
    if first.peers:
        assert cached_halo(ranks, [plan], (1, 1), "float32") is first, "what is under way is not evicted"
    clear_cache(ranks)
    assert not halo_module._cache


def test_the_plan_can_be_read(ranks):
    plan = block_plan(window_map, 8 * ranks.size, ranks.size, ranks.rank, 8 * ranks.size, 3, 1, 1, 1)
    halo = HaloExchange(ranks, [plan], (1, 4), "float32")
    text = str(halo)
    assert f"{halo.bytes_sent} bytes sent" in text
    assert f"{ranks.rank} of {ranks.size} owns [{8 * ranks.rank}, {8 * ranks.rank + 8})" in text
    halo.free()
