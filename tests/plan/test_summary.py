"""The figures of a summary: those of the literature, and those that a user asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpar.cli.main import main
from hpcpar.mesh import MeshError
from hpcpar.plan.jobs import mesh_shape, sample_shape
from hpcpar.plan.summary import dearest, summarize
from hpcpar.plan.table import amount, as_text
from hpcpar.train.config import ConfigError, Job, load_job, make_job

pytestmark = pytest.mark.serial

JOBS = Path(__file__).parents[2] / "jobs"


def unet(**model) -> Job:
    table = {
        "model": {"name": "unet3d", "classes": 3, "base": 32, "levels": 3, **model},
        "loss": {"name": "cross_entropy"},
    }
    return make_job(table)


@pytest.mark.parametrize(
    ("width", "forward", "gflop", "gib"),
    [(128, 18.516, 55.55, 0.824), (256, 147.93, 443.8, 6.59), (512, 1183.4, 3550, 52.7)],
)
def test_cosmoflow_has_the_figures_of_oyama_and_others(width: int, forward: float, gflop: float, gib: float) -> None:
    facts = summarize(load_job(JOBS / f"cosmoflow-{width}.toml"), ranks=32)
    sample = facts["per_sample"]
    assert facts["parameters"] == 9_437_636
    assert float(f"{sample['convolution_gflop_forward']:.5g}") == forward
    assert float(f"{sample['convolution_gflop']:.4g}") == gflop
    assert float(f"{sample['memory_gib_stated_rule']:.3g}") == gib
    assert sum(row["parameters"] for row in facts["layers"]) == facts["parameters"]


@pytest.mark.parametrize(("width", "tflop", "gib"), [(64, 1.47, 2.10), (128, 11.7, 16.8), (256, 93.8, 134.1)])
def test_the_u_net_has_its_figures_less_the_concatenations_that_it_does_not_make(
    width: int, tflop: float, gib: float
) -> None:
    facts = summarize(unet(), shape=(width,))
    assert facts["parameters"] == 19_070_560
    assert float(f"{facts['per_sample']['convolution_gflop'] / 1e3:.3g}") == tflop
    assert float(f"{facts['per_sample']['memory_gib_stated_rule']:.4g}") == pytest.approx(
        gib, abs=0.005 if gib < 10 else 0.05
    )


def test_figures_of_a_sample_do_not_depend_on_mesh_and_batch() -> None:
    job = unet(base=4)
    one = summarize(job, shape=(16, 24, 32))
    many = summarize(
        make_job({**table_of(job), "mesh": {"batch": 2, "depth": 2, "model": 2}, "data": {"batch": 6}}),
        shape=(16, 24, 32),
    )
    assert many["ranks"] == 8 and many["input"] == [6, 1, 16, 24, 32]
    assert many["per_sample"] == one["per_sample"] and many["parameters"] == one["parameters"]


def table_of(job: Job) -> dict:
    return {"model": {"name": "unet3d", "classes": 3, "base": job.model.base}, "loss": {"name": job.loss.name}}


def test_a_deeper_split_costs_less_memory_and_the_halos_of_one_rank_stay() -> None:
    rows = summarize(load_job(JOBS / "cosmoflow-512.toml", ["mesh.depth=4"]))["split"]["rows"]
    assert [row["parts"] for row in rows] == [1, 2, 4, 8, 16]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[1] < 0.75 * peaks[0]  # not half: only with neighbours are there buffers with halos
    assert all(after < 0.6 * before for before, after in zip(peaks[1:], peaks[2:], strict=False))
    assert rows[0]["halo_bytes"] == rows[0]["gradient_bytes"] == rows[0]["other_bytes"] == 0
    inner = [row["halo_bytes"] for row in rows[2:]]  # from three parts on there is a rank with two neighbours
    assert max(inner) < 1.01 * min(inner) and rows[1]["halo_bytes"] == pytest.approx(inner[0] / 2, rel=0.01)


def test_messages_by_purpose_are_all_messages() -> None:
    job = make_job(
        {**table_of(unet(base=4)), "mesh": {"batch": 2, "depth": 2}, "data": {"batch": 2}, "optim": {"clip": 1.0}}
    )
    facts = summarize(job, shape=(16,))
    purposes = {m["purpose"] for m in facts["messages"]}
    assert purposes == {"halo", "statistics", "loss", "gradients", "clipping"}
    assert all(m["bytes"] > 0 and m["messages"] > 0 for m in facts["messages"])
    assert {m["axes"] for m in facts["messages"] if m["purpose"] == "halo"} == {"depth"}


def test_the_rank_that_sends_most_is_shown(tasks) -> None:
    assert dearest(tasks.cosmoflow(32, 1), {"depth": 4}).mesh.rank == 2, "inner ranks have two neighbours"
    assert dearest(tasks.cosmoflow(32, 1), {"batch": 1}).mesh.rank == 0


def test_the_mesh_takes_what_is_left_of_the_ranks() -> None:
    job = make_job({**table_of(unet()), "mesh": {"batch": -1, "depth": 4}})
    assert mesh_shape(job) == {"batch": 1, "depth": 4}
    assert mesh_shape(job, 12) == {"batch": 3, "depth": 4}
    with pytest.raises(MeshError, match="6 ranks cannot be divided by 4 .*; start a multiple of 4"):
        mesh_shape(job, 6)


def test_the_sample_comes_from_data_or_from_an_option() -> None:
    job = unet(channels=2)
    assert sample_shape(job, (8, 16, 32)) == (2, 8, 16, 32)
    assert sample_shape(job, (8,)) == (2, 8, 8, 8)
    with pytest.raises(ConfigError, match="--shape"):
        sample_shape(job)
    with pytest.raises(ConfigError, match="three lengths"):
        sample_shape(job, (8, 8))


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (2048, "2 KiB"), (3.5 * 2**30, "3.5 GiB")])
def test_amounts_are_short(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


def test_the_command_prints_tables_and_json(capsys) -> None:
    words = ["summary", str(JOBS / "cosmoflow-128.toml"), "--ranks", "8", "--set", "mesh.depth=4"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "9,437,636" in text and "55.547 GFLOP" in text and "0.824 GiB" in text
    assert "batch=2 x depth=4, 8 ranks" in text and "16 parts" in text
    assert max(map(len, text.splitlines())) <= 130
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mesh"] == {"batch": 2, "depth": 4} and facts["parameters"] == 9_437_636
    assert as_text(facts) == text.rstrip("\n")


def test_ranks_that_do_not_fit_the_mesh_are_one_message(capsys) -> None:
    assert main(["summary", str(JOBS / "cosmoflow-128.toml"), "--ranks", "6", "--set", "mesh.depth=4"]) == 2
    assert "6 ranks cannot be divided by 4" in capsys.readouterr().err
    assert main(["summary", str(JOBS / "cosmoflow-128.toml"), "--shape", "8,x"]) == 2
    assert "expected lengths such as 64,64,64" in capsys.readouterr().err
