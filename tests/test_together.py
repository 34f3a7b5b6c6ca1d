"""What rank 0 does, all know; what fails on one rank, fails on all."""

from __future__ import annotations

import pytest

from hpcpar.testing import shared_mesh
from hpcpar.together import on_all, on_root


@pytest.fixture
def world():
    return shared_mesh(batch=-1).world


def fail(error):
    raise error


def test_rank_0_alone_calls_and_all_get_what_it_found(world):
    calls = []
    assert on_root(world, lambda: calls.append(world.rank) or ["found", world.rank]) == ["found", 0]
    assert calls == [0] * (world.rank == 0)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no such file", "data.h5"), ValueError("no number")])
def test_an_error_of_rank_0_is_raised_on_all(world, error):
    with pytest.raises(type(error)) as raised:
        on_root(world, lambda: fail(error))
    assert str(raised.value) == str(error)


def test_each_rank_gets_its_own_result(world):
    assert on_all(world, lambda: world.rank) == world.rank


def test_the_error_of_any_rank_is_raised_on_all_and_the_first_one_wins(world):
    last = world.size - 1
    with pytest.raises(OSError, match=f"disk of rank {last} is full"):
        on_all(world, lambda: fail(OSError(f"disk of rank {last} is full")) if world.rank == last else None)
    with pytest.raises(ValueError, match="rank 0 too"):
        on_all(world, lambda: fail(ValueError(f"rank {world.rank} too")))
