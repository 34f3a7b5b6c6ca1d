"""Array collectives: exact values, any dtype and memory order, empty and 0-dim arrays, pieces, and the byte counter."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hpcpar.testing import collective_assert
from hpcpar.transport import Comm, counter
from hpcpar.transport import comm as comm_module
from hpcpar.transport.comm import from_ordered_integers, ordered_integers

DTYPES = [np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8]


@pytest.fixture
def c(comm: MPI.Comm) -> Comm:
    return Comm(comm, "all")


@pytest.fixture(params=[1, 16, 1 << 21])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of one element, of a few, and the usual."""
    monkeypatch.setattr(comm_module, "PIECE_BYTES", request.param)
    return request.param


def mine(c: Comm, shape: tuple[int, ...], dtype: type, rank: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(17 + (c.rank if rank is None else rank))
    return rng.integers(0, 9, shape).astype(dtype)


def of_all(c: Comm, shape: tuple[int, ...], dtype: type) -> list[np.ndarray]:
    return [mine(c, shape, dtype, r) for r in range(c.size)]


def memory_orders(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same values: C order, Fortran order, channels last, every second element of a larger array."""
    spaced = np.zeros(tuple(2 * n for n in array.shape), array.dtype)
    spaced = spaced[(..., *[slice(None, None, 2)] * array.ndim)]
    spaced[...] = array
    orders = {"C": array, "F": np.asarray(array, order="F"), "spaced": spaced}
    if array.ndim > 2:
        orders["last"] = np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    return orders


# ---- reductions


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_exact_in_pieces_of_any_length(c: Comm, dtype: type, piece_bytes: int) -> None:
    for shape in ((), (1,), (3, 4), (0, 4), (2, 3, 2)):
        exact = sum(of_all(c, shape, dtype), np.zeros(shape, dtype)).astype(dtype)
        for name, array in memory_orders(mine(c, shape, dtype)).items():
            before = array.copy()
            got = c.all_reduce(array)
            good = np.array_equal(got, exact) and got.dtype == dtype and got.shape == shape
            collective_assert(c, good and np.array_equal(array, before), f"{name} {shape}: {got} is not {exact}")


def test_sums_of_half_precision_accumulate_in_single(c: Comm) -> None:
    """2048 + 1 is 2048 in float16, and p + 2048 ones would stay 2048 however they are added."""
    value = np.array([2048.0 if c.rank == 0 else 1.0], np.float16)
    exact = np.float16(np.float32(2048 + (c.size - 1)))
    collective_assert(c, c.all_reduce(value)[0] == exact)
    piece = c.reduce_scatter([value] * c.size)
    collective_assert(c, piece.dtype == np.float16 and piece[0] == exact)


@pytest.mark.parametrize("dtype", [*DTYPES, np.bool_])
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_are_exact(c: Comm, dtype: type, op: str, piece_bytes: int) -> None:
    for shape in ((), (3, 4), (0,)):
        signs = -1 if np.dtype(dtype).kind == "f" else 1
        arrays = [(a * signs if signs < 0 else a).astype(dtype) for a in of_all(c, shape, dtype)]
        exact = (np.max if op == "max" else np.min)(arrays, axis=0)
        for array in memory_orders(arrays[c.rank]).values():
            got = c.all_reduce(array, op)
            collective_assert(c, np.array_equal(got, exact) and got.dtype == dtype and got.shape == shape, f"{got}")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_on_every_rank_wherever_it_sits(c: Comm, dtype: type, op: str) -> None:
    """MPI_MAX of [NaN, 1] differs between ranks in one MPI library, and loses the NaN in another."""
    for where in range(c.size):
        value = np.array([np.nan if c.rank == where else c.rank, c.rank], dtype)
        got = c.all_reduce(value, op)
        collective_assert(c, np.isnan(got[0]) and got[1] == (c.size - 1 if op == "max" else 0), f"{where}: {got}")
        bits = c.gather_objects(got.tobytes())
        assert len(set(bits)) == 1


def test_zeros_of_both_signs_and_infinities_have_one_extreme_bit_for_bit(c: Comm) -> None:
    value = np.array([-0.0 if c.rank % 2 else 0.0, -np.inf, np.inf if c.rank == 0 else 1.0, 5e-324])
    for op in ("max", "min"):
        assert len(set(c.gather_objects(c.all_reduce(value, op).tobytes()))) == 1
    if c.size > 1:
        assert np.signbit(c.all_reduce(value, "min")[0]) and not np.signbit(c.all_reduce(value, "max")[0])


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_ordered_integers_sort_as_floats_do_and_come_back(dtype: type) -> None:
    rng = np.random.default_rng(0)
    info = np.finfo(dtype)
    special = [-np.inf, np.inf, info.max, info.min, info.smallest_subnormal, -info.smallest_subnormal]
    values = np.sort(np.concatenate([rng.standard_normal(50), special]).astype(dtype))
    values = np.insert(values, np.searchsorted(values, 0), np.array([-0.0, 0.0], dtype))
    keys = ordered_integers(values)
    assert (np.diff(keys.astype(object)) >= 0).all()
    assert from_ordered_integers(keys, np.dtype(dtype)).tobytes() == values.tobytes()
    for largest in (True, False):
        nan = ordered_integers(np.array([np.nan, 1, -1, np.inf, -np.inf], dtype), largest)
        assert (nan.argmax() if largest else nan.argmin()) == 0
        assert np.isnan(from_ordered_integers(nan, np.dtype(dtype))).tolist() == [True] + [False] * 4
    scalar = from_ordered_integers(ordered_integers(np.array(2.5, dtype)), np.dtype(dtype))
    assert scalar.shape == () and scalar == 2.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_gives_each_rank_its_piece_of_the_sum(c: Comm, dtype: type, piece_bytes: int) -> None:
    lengths = [(3 * r + 1) % 4 for r in range(c.size)]  # uneven; the second rank's is empty
    contributions = [[mine(c, (n, 2), dtype, 10 * r + i) for i, n in enumerate(lengths)] for r in range(c.size)]
    exact = sum((contributions[r][c.rank] for r in range(c.size)), np.zeros((lengths[c.rank], 2), dtype)).astype(dtype)
    for order in ("C", "F"):
        got = c.reduce_scatter([np.asarray(p, order=order) for p in contributions[c.rank]])
        collective_assert(c, np.array_equal(got, exact) and got.shape == exact.shape and got.dtype == dtype, f"{got}")


# ---- gathering and exchanging


@pytest.mark.parametrize("dtype", [*DTYPES, np.bool_])
def test_all_gather_of_uneven_and_empty_arrays_in_any_memory_order(c: Comm, dtype: type) -> None:
    shapes = [((2 * r + 3) % 4, 3, 2) for r in range(c.size)]
    exact = [mine(c, s, dtype, r) for r, s in enumerate(shapes)]
    for array in memory_orders(exact[c.rank]).values():
        got = c.all_gather(array, shapes)
        good = all(np.array_equal(a, b) and a.shape == b.shape for a, b in zip(got, exact, strict=True))
        collective_assert(c, len(got) == c.size and good)
    scalars = c.all_gather(np.array(c.rank, dtype), [()] * c.size)
    assert all(s.shape == () for s in scalars) and [int(s) for s in scalars] == [int(dtype(r)) for r in range(c.size)]


def test_a_fortran_ordered_array_does_not_arrive_transposed(c: Comm) -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3) + c.rank)
    assert not array.flags.c_contiguous
    exact = np.arange(6.0).reshape(2, 3)
    assert all(np.array_equal(a, exact + r) for r, a in enumerate(c.all_gather(array, [(2, 3)] * c.size)))
    assert np.array_equal(c.broadcast(array, 0), exact)
    assert np.array_equal(c.shift(array, 1), exact + (c.rank - 1) % c.size)
    assert np.array_equal(c.all_reduce(np.asfortranarray(exact)), exact * c.size)


def test_exchange_sends_to_some_and_receives_from_others(c: Comm) -> None:
    to_next, size = (c.rank + 1) % c.size, c.size
    if size == 1:
        assert c.exchange({}, {}) == {}
        return
    source = (c.rank - 1) % size
    with counter.counting() as sent:
        got = c.exchange({to_next: mine(c, (2, c.rank + 1), np.float32)}, {source: ((2, source + 1), np.dtype("f4"))})
    assert np.array_equal(got[source], mine(c, (2, source + 1), np.float32, source))
    assert sent["exchange", "all"].bytes == 2 * (c.rank + 1) * 4 and sent["exchange", "all"].messages == 1
    only_first = c.exchange({1: np.array(7.0)} if c.rank == 0 else {}, {0: ((), np.dtype("f8"))} if c.rank == 1 else {})
    assert only_first == ({0: 7.0} if c.rank == 1 else {})


def test_shift_goes_round_and_back_with_shapes_of_their_own(c: Comm) -> None:
    array = mine(c, (c.rank, 2), np.float64)
    for offset in (1, -1, 2, c.size):
        source = (c.rank - offset) % c.size
        got = c.shift(array, offset, (source, 2))
        collective_assert(c, np.array_equal(got, mine(c, (source, 2), np.float64, source)) and got.shape == (source, 2))


def test_broadcast_gives_everyone_the_roots_array(c: Comm) -> None:
    for root in range(c.size):
        got = c.broadcast(mine(c, (3, 2), np.float16), root)
        assert np.array_equal(got, mine(c, (3, 2), np.float16, root))
        assert c.broadcast(np.array(c.rank), root).shape == ()


def test_agreement_and_objects(c: Comm) -> None:
    last = c.rank == c.size - 1
    assert c.agree(last) and not c.agree(False)
    assert c.agree(True, "all") and c.agree(last, "all") == (c.size == 1)
    assert c.gather_objects({"rank": c.rank}) == [{"rank": r} for r in range(c.size)]
    assert c.broadcast_object(c.rank, c.size - 1) == c.size - 1
    c.barrier()


def test_the_counter_holds_the_closed_forms(c: Comm) -> None:
    p, array = c.size, np.ones((4, 3))
    with counter.counting() as sent:
        c.all_reduce(array)
        c.all_gather(array, [(4, 3)] * p)
        c.reduce_scatter([array] * p)
    if p == 1:
        assert not sent
        return
    assert sent["all_reduce", "all"].bytes == pytest.approx(2 * (p - 1) / p * 96)
    assert sent["all_gather", "all"].bytes == sent["reduce_scatter", "all"].bytes == (p - 1) * 96
    assert all(t.messages == 1 for t in sent.values())


@pytest.mark.ranks(min=2)
def test_half_precision_is_counted_as_it_travels(c: Comm) -> None:
    """Sums and extremes take 4 bytes an element, what is only moved takes 2."""
    p, array = c.size, np.ones((4, 3), np.float16)
    with counter.counting() as sums:
        c.all_reduce(array)
        c.reduce_scatter([array] * p)
    with counter.counting() as rest:
        c.all_reduce(array, "max")
        c.all_gather(array, [(4, 3)] * p)
    assert sums["all_reduce", "all"].bytes == rest["all_reduce", "all"].bytes == pytest.approx(2 * (p - 1) / p * 48)
    assert sums["reduce_scatter", "all"].bytes == (p - 1) * 48 and rest["all_gather", "all"].bytes == (p - 1) * 24
