"""Random products, attention and what stands beside it, with random meshes and layouts, against torch on one process.

``HPCPAR_CASES`` sets how many cases there are in all (120 by default), ``HPCPAR_SEED`` where they start. Any number
outside of a test run, with a table at the end: ``mpiexec -n 4 hpcpar check --cases 4000 --only attention einsum``.
"""

import os

import numpy as np
import pytest
from mpi4py import MPI

from hpcpar.testing.cases import Array, Case, L, Layout  # noqa: F401 - what is shown of a case names Layout
from hpcpar.testing.spatial_cases import draw_case, run_spatial_cases
from hpcpar.testing.spatial_draws import TRANSFORMERS

CASES = int(os.environ.get("HPCPAR_CASES", "120"))
SEED = int(os.environ.get("HPCPAR_SEED", "0"))
RANKS = MPI.COMM_WORLD.Get_size()
WEIGHTS = sum(f.weight for f in TRANSFORMERS.values())

@pytest.mark.watchdog(600)
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_case_equals_one_process(family):
    pytest.importorskip("torch")
    count = max(10, round(CASES * TRANSFORMERS[family].weight / WEIGHTS))
    said = []
    tally = run_spatial_cases(count, SEED, [family], report=said.append)
    assert not tally.failures, "\n".join(said) or "see rank 0"
    served = tally.total("pass")
    asked = served + tally.total("refused")
    assert asked >= 0.9 * count, f"the oracle takes only {asked} of {count} cases"
    assert served >= 0.85 * asked, f"{asked - served} of {asked} refused: {tally.refusals}"


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_cases_are_shown_as_they_can_be_repeated(family):
    for number in range(20):
        case = draw_case(np.random.default_rng(number), 4, family, {"a": 2, "b": 2, "c": 1})
        assert eval(repr(case)) == case


def test_a_wrong_gradient_of_attention_is_found(monkeypatch):
    pytest.importorskip("torch")
    import hpcpar.functional as F

    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *a, **b: right(q, k.detach(), v, *a, **b))
    arrays = [Array((2, 3, 5, 4), L("a"))] * 3
    outcome, text, _ = Case("attention", arrays, {"is_causal": True}, {"a": RANKS}).verdict()
    assert outcome == "FAIL" and "gradient of operand 1" in text and "gradient of operand 0" not in text
