"""The byte counter: nested blocks each count what they see, exactly."""

from __future__ import annotations

import pytest

from hpcpar.transport.counter import Counter, Tally

pytestmark = pytest.mark.serial


def test_each_block_counts_what_happens_inside_it() -> None:
    counter = Counter()
    counter.record("halo", "depth", 1, 10)
    with counter.counting() as outer:
        counter.record("halo", "depth", 2, 100)
        with counter.counting() as inner:
            counter.record("all_reduce", "batch", 1, 4)
        counter.record("halo", "depth", 1, 1000)
    counter.record("halo", "depth", 1, 1)
    assert inner == {("all_reduce", "batch"): Tally(1, 4)}
    assert outer == {("halo", "depth"): Tally(3, 1100), ("all_reduce", "batch"): Tally(1, 4)}
    assert counter.snapshot()["halo", "depth"] == Tally(5, 1111)


def test_a_block_is_not_rounded_by_what_was_counted_before() -> None:
    counter = Counter()
    counter.record("all_reduce", "depth", 1, 1e15 / 3)
    with counter.counting() as block:
        for _ in range(3):
            counter.record("all_reduce", "depth", 1, 4 / 3 * 7)
    assert block["all_reduce", "depth"].bytes == 4 / 3 * 7 + 4 / 3 * 7 + 4 / 3 * 7


def test_nothing_is_counted_for_empty_messages_and_after_an_error() -> None:
    counter = Counter()
    with counter.counting() as block:
        counter.record("exchange", "depth", 0, 0)
    assert block == {}
    with pytest.raises(ZeroDivisionError), counter.counting() as broken:
        raise ZeroDivisionError
    counter.record("exchange", "depth", 1, 8)
    assert broken == {}
