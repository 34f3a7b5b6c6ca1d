"""Which GPU each rank of a node takes, for the ways in which batch systems show GPUs to ranks."""

import pytest

from hpcpar.launch.devices import Choice, choose_device, choose_devices

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


def test_the_place_in_the_node_counts_when_ranks_are_dealt_round_the_nodes():
    hosts, visible = ["n1", "n2"] * 2, [("a", "b"), ("c", "d")] * 2
    assert [choose_device(hosts, visible, rank) for rank in range(4)] == [
        (Choice(0, 1), ""),
        (Choice(0, 1), ""),
        (Choice(1, 1), ""),
        (Choice(1, 1), ""),
    ]


def test_sharing_on_one_node_is_a_warning_on_all_ranks():
    hosts, visible = ["n1", "n2", "n2"], [("a",), ("b",), ("b",)]
    found = [choose_device(hosts, visible, rank) for rank in range(3)]
    assert [choice for choice, _ in found] == [Choice(0, 1), Choice(0, 2), Choice(0, 2)]
    assert {words for _, words in found} == {"n2: 2 ranks share one GPU, as there are more ranks than GPUs to see"}


def test_an_error_names_the_node():
    with pytest.raises(ValueError, match="n2: rank 0 of 1 on the node sees no GPU"):
        choose_device(["n1", "n2"], [("a",), ()], 0)
