"""A real run with --trace on two ranks: the timeline, the steps asked for, resuming, failing."""

import json
from collections import defaultdict

import pytest

from hpcpar.cli.main import main
from hpcpar.report import gather
from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import read_records, write_small_job
from hpcpar.trace.spans import read_trace
from hpcpar.train.config import ConfigError, load_job
from hpcpar.train.tensorboard import read_scalars


def train(job, *words, ranks=2):
    split = ["--set", "mesh.batch=1", "--set", "mesh.depth=-1"]
    return mpi_run(ranks, ["-m", "hpcpar", "train", str(job), *split, *words], timeout=150)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    job = write_small_job(folder)
    train(job, "--trace", "--set", "run.trace_steps=[3, 5]", "--set", "run.tensorboard=true").check()
    return folder / "run"


@pytest.mark.spawns_mpi
def test_the_timeline_has_the_steps_asked_for_of_all_ranks(traced):
    events = json.loads((traced / "trace.json").read_text())["traceEvents"]
    steps = defaultdict(list)
    for event in events:
        if event.get("cat") == "step":
            steps[event["pid"]].append(event["name"])
    assert dict(steps) == {0: ["step 3", "step 4", "step 5"], 1: ["step 3", "step 4", "step 5"]}
    categories = {e["cat"] for e in events if "cat" in e}
    assert categories >= {"compute", "operation", "halo", "reduction", "wait", "io", "flight"}
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert any(n.startswith("rank 0: batch=0 depth=0") for n in names) and len(names) == 2
    assert any(e.get("name") == "write checkpoint" and e["tid"] != 0 for e in events)


@pytest.mark.spawns_mpi
def test_ranks_of_a_step_overlap_on_the_common_clock(traced):
    events = json.loads((traced / "trace.json").read_text())["traceEvents"]
    for number in (3, 4, 5):
        a, b = ((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == f"step {number}")
        assert max(a[0], b[0]) < min(a[1], b[1])


@pytest.mark.spawns_mpi
def test_the_report_of_a_real_run(traced):
    facts = gather(traced)
    assert facts["missing"] == [] and facts["mesh"] == {"batch": 1, "depth": 2}
    times = facts["times"]
    # all of a step is accounted for, on each rank
    for row in times["ranks"]:
        assert sum(row["kinds"].values()) == pytest.approx(row["step"], rel=1e-6)
    layers = {row["module"] for row in times["layers"]}
    assert {"down0.conv1", "bottom.conv2", "head", "(gradients)"} <= layers
    assert all(rank["peak_bytes"] > 1e7 and rank["messages"] for rank in facts["ranks"])


@pytest.mark.spawns_mpi
def test_the_work_is_that_of_the_plan(traced):
    from hpcpar.plan.summary import summarize

    job = load_job(traced.parent / "job.toml", ["mesh.batch=1", "mesh.depth=2"])
    planned = {(r["module"]): r["gflop_forward"] for r in summarize(job)["layers"] if r["operation"] == "conv"}
    seen = {row["module"]: row["gflop"] for row in gather(traced)["times"]["layers"]}
    inner = [name for name in planned if name != "down0.conv1"]  # its input needs no gradient
    ratios = {seen[name] / planned[name] for name in inner}
    # forward and two products backward, for each of the batches of a step; the same samples in each layer
    assert max(ratios) == pytest.approx(min(ratios)) and min(ratios) >= 3


@pytest.mark.spawns_mpi
def test_event_files_hold_the_records(traced):
    (path,) = (traced / "tensorboard").iterdir()
    seen = {(s.step, s.tag): s.value for s in read_scalars(path)}
    for record in read_records(traced):
        assert seen[record["step"], "loss"] == pytest.approx(record["loss"], rel=1e-6)
        assert (record["step"], "step") not in seen


@pytest.mark.spawns_mpi
def test_a_rank_that_fails_leaves_what_there_is(tmp_path):
    job = write_small_job(tmp_path)
    run = train(job, "--trace", "--set", "optim.lr=1e300")
    assert run.returncode and ("not finite" in run.stderr or "nan" in run.stderr)
    assert not (tmp_path / "run" / "trace.json").exists()  # nobody was waited for
    traces = read_trace(tmp_path / "run")
    assert [trace.facts["rank"] for trace in traces] == [0, 1]
    assert all(trace.steps for trace in traces)


@pytest.mark.serial
def test_a_window_that_is_none_is_refused(tmp_path):
    job = write_small_job(tmp_path)
    with pytest.raises(ConfigError, match=r"trace_steps is \[first, last\], got \[5, 3\]"):
        load_job(job, ["run.trace_steps=[5, 3]"])


@pytest.mark.serial
def test_a_new_run_keeps_the_trace_of_the_one_before_apart(tmp_path):
    job = write_small_job(tmp_path)
    run = tmp_path / "run"
    for words in (["--trace", "--set", "run.steps=2"], ["--set", "run.steps=1"]):
        assert main(["train", str(job), *words]) == 0
    assert (run / "trace.1.json").exists() and (run / "ranks.1.json").exists() and (run / "metrics.1.jsonl").exists()
    facts = gather(run)
    assert facts["times"] is None and facts["steps"] == 1 and "--trace" in facts["missing"][0]
