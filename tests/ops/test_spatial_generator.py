"""Random operations, arguments, shapes, meshes and layouts against torch on one process.

``HPCPAR_CASES`` sets how many cases there are in all (600 by default), ``HPCPAR_SEED`` where they start.
"""

import os

import pytest
from mpi4py import MPI

from hpcpar.ops.overlap import tiling
from hpcpar.testing.cases import Array, Case, L
from hpcpar.testing.spatial_cases import layout_kind, run_spatial_cases
from hpcpar.testing.spatial_draws import FAMILIES, TRANSFORMERS

CASES = int(os.environ.get("HPCPAR_CASES", "600"))
SEED = int(os.environ.get("HPCPAR_SEED", "0"))
RANKS = MPI.COMM_WORLD.Get_size()
SPATIAL = {name: family for name, family in FAMILIES.items() if name not in TRANSFORMERS}
WEIGHTS = sum(f.weight for f in SPATIAL.values())


def check(family, count, seed, most_refused=0.35):
    pytest.importorskip("torch")
    said = []
    tally = run_spatial_cases(count, seed, [family], report=said.append)
    assert not tally.failures, "\n".join(said) or "see rank 0"
    served = tally.total("pass")
    asked = served + tally.total("refused")
    assert asked >= count / 2, f"the oracle takes only {asked} of {count} cases"
    assert served >= (1 - most_refused) * asked, f"{asked - served} of {asked} refused: {tally.refusals}"


@pytest.mark.watchdog(600)
@pytest.mark.parametrize("family", SPATIAL)
def test_every_case_equals_one_process(family):
    check(family, max(12, round(CASES * FAMILIES[family].weight / WEIGHTS)), SEED)


@pytest.mark.watchdog(600)
@pytest.mark.parametrize("family", ["conv", "conv_transpose"])
def test_convolutions_cut_into_interior_and_rim_equal_one_process(family):
    with tiling("split"):
        check(family, max(12, CASES // 15), SEED + 1)


def test_a_failure_is_shrunk_and_shown_as_a_command(monkeypatch):
    pytest.importorskip("torch")
    import hpcpar.functional as F

    right = F.flip
    monkeypatch.setattr(F, "flip", lambda x, dims: right(x, dims) if x.shape[0] < 3 else x * 1.0)
    case = Case("flip", [Array((6, 5, 4), L("a"))], {"dims": (0, 2)}, {"a": RANKS})
    small = case.shrunk()
    assert small.verdict()[0] == "FAIL"
    assert small.arrays[0].shape[0] == 3 and not small.arrays[0].layout.axes
    assert "Case('flip', [Array((3, " in small.command
    assert eval(repr(small)) == small


def test_layouts_are_named_by_what_they_split():
    mesh = {"a": 2, "b": 2, "c": 1}
    named = [
        (L("a"), "samples"),
        (L(None, "a", None, "c"), "channels"),
        (L(None, None, None, "b"), "positions"),
        (L(None, None, "a", "b"), "2-3 dims"),
        (L("a", None, "b"), "mixed"),
        (L(None, None, ("a", "b")), "stacked"),
        (L("a", partial="b"), "partial"),
        (L(), "replicated"),
    ]
    for layout, name in named:
        assert layout_kind(Case("flip", [Array((2, 2, 2, 2), layout)], {}, mesh)) == name
