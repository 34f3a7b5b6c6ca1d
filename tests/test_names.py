"""Which name was meant, and what a pattern matches."""

from __future__ import annotations

import pytest

from hpcpar.names import did_you_mean, matching, nearest

pytestmark = pytest.mark.serial
MODULES = ["", "blocks.0", "blocks.0.up", "blocks.1.up", "head"]


@pytest.mark.parametrize(
    ("name", "likeness", "near"),
    [("deepth", 0.6, "depth"), ("depth", 0.6, "depth"), ("xyz", 0.6, None), ("wd", 0.6, None), ("wd", 0.5, "width")],
)
def test_the_nearest_name_is_the_most_like_one_if_any_is_like_enough(name, likeness, near):
    assert nearest(name, iter(("batch", "depth", "width")), likeness) == near


def test_nothing_is_near_where_there_are_no_names():
    assert nearest("depth", ()) is None


def test_the_hint_ends_an_error_and_is_empty_without_a_near_name():
    assert did_you_mean("depth") == "; did you mean depth?" and did_you_mean(None) == ""


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("blocks.*", ["blocks.0", "blocks.0.up", "blocks.1.up"]),
        ("*.up", ["blocks.0.up", "blocks.1.up"]),
        ("blocks.[!0].*", ["blocks.1.up"]),
        ("*", MODULES),
    ],
)
def test_a_pattern_matches_names_in_their_order_across_dots(pattern, found):
    assert matching("place", pattern, dict.fromkeys(MODULES), "module") == found


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("HEAD", ""), ("block.0", "; near names: blocks.0, blocks.0.up, blocks.1.up"), ("heads", "; near names: head")],
)
def test_a_pattern_that_matches_nothing_is_refused_with_names_near_it(pattern, hint):
    with pytest.raises(ValueError, match="matches no module") as raised:
        matching("place", pattern, iter(MODULES), "module")
    assert str(raised.value) == f"place: the pattern {pattern!r} matches no module{hint}"
