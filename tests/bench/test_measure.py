"""Medians, spreads and ratios of samples; who takes part in a turn; what is judged."""

import pytest

from hpcpar.bench import report
from hpcpar.bench.measure import Measure, in_turns, missing, rate, ratio, spread, stopwatch
from hpcpar.bench.options import Options
from hpcpar.bench.targets import TARGETS, verdicts


def test_contestants_run_in_turns_and_the_warm_up_does_not_count():
    order = []

    def contestant(name, seconds):
        def run():
            order.append(name)
            return seconds if len(order) > 2 else 100.0

        return run

    seconds = in_turns({"a": contestant("a", 1.0), "b": contestant("b", 2.0)}, rounds=3, warm_up=1)
    assert order == ["a", "b"] * 4
    assert seconds == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_a_ratio_is_that_of_the_medians_with_quartiles_of_the_rounds():
    found = ratio("g", "n", [1.0, 2.0, 9.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0, 2.0])
    assert found.value == 0.5
    assert (found.low, found.high) == (0.5, 1.0)  # the rounds: 0.25, 0.5, 0.5, 1, 2.25


def test_a_rate_is_work_by_time():
    found = rate("g", "n", [0.5, 1.0, 0.25], 2.0, "GB/s")
    assert (found.value, found.low, found.high) == (4.0, 2.0, 8.0)
    assert spread("g", "n", [0.5, 1.0, 0.25], "ms", 1e3).value == 500


def test_a_stopwatch_calls_often_enough_to_fill_its_time():
    calls = []
    seconds = stopwatch(lambda: calls.append(1), least=1e-3)()
    assert 0 < seconds < 1e-3
    assert len(calls) * seconds > 1e-4


def measures_at(factor):
    """A figure for every target, at a multiple of its limit."""
    names = {
        "CosmoFlow step / torch at its best": "CosmoFlow: hpcpar / torch at its best (tuned)",
        "same / torch as users get it, channels_last_3d": "CosmoFlow: hpcpar / torch as users get it, channels_last_3d",
        "same / torch as users get it, NCDHW": "CosmoFlow: hpcpar / torch as users get it, NCDHW",
        "U-Net step / torch at its best": "U-Net: hpcpar / torch at its best (tuned)",
        "both in bfloat16 / torch autocast at its best": "U-Net, bfloat16: hpcpar / torch autocast at its best",
        "CosmoFlow, depth split over the ranks / 1 rank": "CosmoFlow: depth split over 2 ranks / 1 rank",
        "U-Net, depth split over the ranks / 1 rank": "U-Net: depth split over 2 ranks / 1 rank",
        "batch split over the ranks / torch DDP at its best": "U-Net: batch split over 2 ranks / torch DDP at its best",
        "attention, forward and backward / torch": "attention, 512 tokens: forward and backward, hpcpar / torch",
        "gradient all-reduce / best of plain MPI": "gradient all-reduce of 64 MiB, 2 ranks / best of plain MPI",
        "halo exchange / one MPI sendrecv of the same bytes": "halo exchange of 32 channels, 64^3 / MPI sendrecv",
        "one small operation above NumPy, forward (us)": "add: forward, above NumPy",
        "one small operation above NumPy, with backward (us)": "add: forward and backward, above NumPy",
        "time of a CosmoFlow step outside of kernels and messages": "CosmoFlow: time outside of kernels and messages",
        "peak memory of a step / the formula": "U-Net: peak of a step / formula",
        "import hpcpar (s)": "import hpcpar",
    }
    return [Measure(t.group, names[t.what], t.limit * factor, "ratio") for t in TARGETS]


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (1.01, False)])
def test_every_target_is_judged_by_its_own_figure(factor, met):
    rows = verdicts(measures_at(factor))
    assert [row["met"] for row in rows] == [met] * len(TARGETS)
    assert [row["value"] for row in rows] == [t.limit * factor for t in TARGETS]


def test_the_worst_figure_counts_and_a_missing_one_leaves_a_target_open():
    values = {"add": 1, "relu": 7}
    both = [Measure("ops", f"{name}: forward, above NumPy", value, "us") for name, value in values.items()]
    row = next(r for r in verdicts(both) if r["what"].endswith("forward (us)"))
    assert (row["value"], row["met"]) == (7, False)
    half = missing("steps", "U-Net, bfloat16: hpcpar / torch autocast at its best", "ratio", "no such thing")
    row = next(r for r in verdicts([half]) if "bfloat16" in r["what"])
    assert (row["value"], row["met"], row["note"]) == (None, None, "no such thing")


def test_tables_hold_every_figure_and_a_quick_run_is_not_judged():
    measures = [*measures_at(0.5), missing("steps", "something", "ratio", "because")]
    facts = report.collect(measures, Options(quick=True), ["hpcpar", "bench"])
    assert all(row["met"] is None for row in facts["targets"])
    for markdown in (False, True):
        text = report.as_text(facts, markdown)
        assert all(m.name in text for m in measures)
        assert "because" in text
    assert report.as_text(facts, True).count("| --- |") >= 5


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.123"), (12345.6, "12346"), (2e-6, "2.0e-06"), (0.0, "0"), (-1.5, "-1.5")],
)
def test_numbers_are_short(value, text):
    assert report.number(value) == text
