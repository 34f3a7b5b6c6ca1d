"""Figures of a trace that is made by hand, so that every one of them is known."""

import json

import pytest

from hpcpar.report import gather
from hpcpar.report.text import as_text
from hpcpar.trace import Event, Recorder, timeline

pytestmark = pytest.mark.serial

MS = 1_000_000


def rank_events(rank, main):
    """Two steps of 100 ms; in each of them rank 0 computes 40 ms, rank 1 60 ms, and both meet in one all-reduce."""
    compute = (40, 60)[rank]
    for number in (1, 2, 3):
        at = number * 1000

        def event(begin, end, category, name, module="", phase="", facts=(), at=at):
            return Event((at + begin) * MS, (at + end) * MS, category, name, module, phase, main, facts)

        yield event(5, 5 + compute, "compute", "conv_forward", "enc", "forward")
        yield event(2, 8 + compute, "operation", "conv", "enc", "forward", (3_000_000_000,))
        yield event(70, 71, "halo", "halo start", "enc", "backward", ("depth", 5e5, -1))
        yield event(71, 79, "compute", "conv_backward", "enc", "backward")
        yield event(79, 83, "wait", "halo wait", "enc", "backward", ("depth", 0.0, -1))
        yield event(70, 83, "flight", "halo", "enc", "backward", ("depth", 0, -1))
        yield event(70, 84, "operation", "conv backward", "enc", "backward", (6_000_000_000,))
        yield event(85 + 5 * rank, 95, "reduction", "all_reduce", "", "optimizer", ("depth", 1e6, number))
        yield event(0, 100, "step", f"step {number}")


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.5}) + "\n")
    for rank in (0, 1):
        recorder = Recorder()
        recorder.events.extend(rank_events(rank, recorder.main))
        recorder.added = len(recorder.events)
        facts = {"rank": rank, "coords": {"depth": rank}, "mesh": {"depth": 2}, "host": "n"}
        facts["peak_bytes"] = 2**30 * (1 + rank)
        # the clock of rank 1 is a second ahead
        later = [e._replace(begin=e.begin + rank * 1000 * MS, end=e.end + rank * 1000 * MS) for e in recorder.events]
        recorder.events.clear()
        recorder.events.extend(later)
        timeline.write_part(timeline.part_path(tmp_path, rank), recorder, facts, -rank * 1000 * MS)
    return tmp_path


def test_where_a_step_goes(run_dir):
    times = gather(run_dir)["times"]
    assert (times["steps"], times["first"], times["last"]) == (2, "step 2", "step 3")  # the first is left out
    assert times["step"] == pytest.approx(0.1)
    first, second = (row["kinds"] for row in times["ranks"])
    expected = {"compute": 48, "operation": 7, "halo": 1, "reduction": 10, "message": 0, "wait": 4, "io": 0, "rest": 30}
    assert first == pytest.approx({k: v / 1e3 for k, v in expected.items()}, abs=1e-9)
    expected.update(compute=68, reduction=5, rest=15)
    assert second == pytest.approx({k: v / 1e3 for k, v in expected.items()}, abs=1e-9)
    assert sum(times["kinds"].values()) == pytest.approx(0.1)


def test_communication_exposed_hidden_and_late(run_dir):
    times = gather(run_dir)["times"]
    assert [row["exposed"] for row in times["ranks"]] == pytest.approx([0.015, 0.010])
    assert [row["hidden"] for row in times["ranks"]] == pytest.approx([0.008, 0.008])  # 13 under way, 5 in messages
    assert [row["late"] for row in times["ranks"]] == pytest.approx([0.005, 0.0])  # rank 1 comes 5 ms later


def test_imbalance_and_work(run_dir):
    times = gather(run_dir)["times"]
    busy = [0.085, 0.090]
    assert [row["busy"] for row in times["ranks"]] == pytest.approx(busy)
    assert times["imbalance"] == pytest.approx(max(busy) / (sum(busy) / 2))
    assert times["gflop"] == pytest.approx(9.0)  # of all ranks, though each enters it
    assert times["gflops"] == pytest.approx(90.0)


def test_layers_and_axes(run_dir):
    times = gather(run_dir)["times"]
    layer = times["layers"][0]
    assert layer["module"] == "enc"
    assert (layer["forward"], layer["backward"], layer["messages"]) == pytest.approx((0.056, 0.009, 0.005))
    assert layer["gflops"] == pytest.approx(9 / 0.065)
    axes = {row["kind"]: row for row in times["axes"]}
    assert axes["halo"] == pytest.approx(
        {"axes": "depth", "kind": "halo", "calls": 1, "seconds": 0.005, "bytes": 5e5, "gb_per_s": 0.1}
    )
    assert axes["all_reduce"]["gb_per_s"] == pytest.approx(1e6 / 0.0075 / 1e9)


def test_parts_that_nobody_joined_are_joined(run_dir):
    assert not (run_dir / "trace.json").exists()
    first = gather(run_dir)
    assert (run_dir / "trace.json").exists() and not (run_dir / timeline.PARTS).exists()
    assert gather(run_dir) == first


def test_the_oldest_step_is_left_out_where_spans_were_dropped(tmp_path, run_dir):
    recorder = Recorder(capacity=18)  # of 27: the third of a step is gone with all before it
    for event in rank_events(1, recorder.main):
        recorder.events.append(event)
        recorder.added += 1
    facts = {"rank": 1, "coords": {"depth": 1}, "mesh": {"depth": 2}, "host": "n", "peak_bytes": 1}
    timeline.write_part(timeline.part_path(run_dir, 1), recorder, facts, 0)
    found = gather(run_dir)
    assert found["dropped"] == 9 and found["times"]["last"] == "step 3"


def test_the_text_has_the_figures(run_dir):
    text = as_text(gather(run_dir))
    assert "one step 100 ms (mean of 2, step 2 to 3); 90 GFLOP/s of all ranks" in text
    assert "exposed communication 12.5 ms, 12.5% of a step; under way behind computing 8 ms" in text
    assert "the busiest rank computes 1.03 times the mean" in text
    assert "peak memory 2 GiB on a rank, 3 GiB in all" in text
    assert max(map(len, text.splitlines())) <= 120


def test_without_a_trace_the_report_says_what_is_missing(run_dir):
    timeline.clear(run_dir)
    text = as_text(gather(run_dir))
    assert "missing: times by layer and axis" in text and "--trace" in text
    assert "missing: peak memory and places of ranks" in text
    assert "step 3: loss 0.5" in text


def test_a_file_that_is_no_trace_is_named(run_dir):
    (run_dir / "trace.json").write_text("[1, 2")
    with pytest.raises(ValueError, match=r"trace\.json is not a trace"):
        gather(run_dir)
