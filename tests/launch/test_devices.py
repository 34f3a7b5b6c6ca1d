"""Which GPU each rank of a node takes, for the ways in which batch systems show GPUs to ranks."""

import pytest

from hpcpar.launch.devices import choose_devices

pytestmark = pytest.mark.serial

FOUR = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("visible", "indices", "sharing"),
    [
        ([FOUR] * 4, [0, 1, 2, 3], [1, 1, 1, 1]),
        ([("a",), ("b",), ("c",), ("d",)], [0, 0, 0, 0], [1, 1, 1, 1]),
        ([FOUR] * 2, [0, 1], [1, 1]),
        ([FOUR] * 6, [0, 1, 2, 3, 0, 1], [2, 2, 1, 1, 2, 2]),
        ([("a",)] * 3, [0, 0, 0], [3, 3, 3]),
        ([("a", "b"), ("a", "b"), ("c", "d"), ("c", "d")], [0, 1, 0, 1], [1, 1, 1, 1]),
        ([("a", "b"), ("c", "d"), ("a", "b"), ("c", "d")], [0, 0, 1, 1], [1, 1, 1, 1]),
        ([("a", "b", "c", "d"), ("d", "c", "b", "a")], [0, 0], [1, 1]),
        ([("a", "b"), ("a",)], [1, 0], [1, 1]),
    ],
    ids=[
        "all-see-all",
        "one-each",
        "fewer-ranks",
        "more-ranks",
        "all-on-one",
        "by-socket",
        "by-socket-dealt-round",
        "other-order",
        "the-narrow-first",
    ],
)
def test_device_of_each_rank(visible, indices, sharing):
    chosen = choose_devices(visible)
    assert [c.index for c in chosen] == indices
    assert [c.ranks for c in chosen] == sharing


def test_a_rank_without_a_gpu_is_named():
    with pytest.raises(ValueError, match="rank 1 of 2 on the node sees no GPU"):
        choose_devices([("a",), ()])
