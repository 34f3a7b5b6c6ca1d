"""Mistakes end in one message on every number of ranks: soon, with an exit status that is not 0, and no traceback."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import write_small_job

pytestmark = pytest.mark.spawns_mpi

SECONDS = 20
"""Within which a job with a mistake must have ended; the launcher's own start counts too."""


def wrong_mesh(folder, words):
    words += ["--set", "mesh.depth=7"]
    return ["depth=7", "ranks"]


def unknown_key(folder, words):
    words += ["--set", "optim.lrr=0.1"]
    return ["optim.lrr", "did you mean optim.lr"]


def missing_file(folder, words):
    words += ["--set", f"data.train={folder / 'nothing'}"]
    return ["nothing", "no such"]


def truncated_file(folder, words):
    target = folder / "train" / "1.h5"
    target.write_bytes(target.read_bytes()[:700])
    return ["1.h5"]


def wrong_channels(folder, words):
    words += ["--set", "model.channels=3"]
    return ["3", "channels"]


def nan_in_the_data(folder, words):
    for i in range(5):
        with h5py.File(folder / "train" / f"{i}.h5", "r+") as file:
            file["volume"][0, 0, 0, 0] = np.nan
    return ["step 1", "the loss is nan", "the input is not finite"]


def overflow_in_a_layer(folder, words):
    for override in ("optim.lr=1e30", 'optim.name="sgd"', "optim.clip=0", "model.batch_norm=false"):
        words += ["--set", override]
    return ["the loss is", "step", "not finite"]


MISTAKES = [wrong_mesh, unknown_key, missing_file, truncated_file, wrong_channels, nan_in_the_data, overflow_in_a_layer]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_ends_in_one_message_on_every_rank_count(mistake, ranks, tmp_path):
    job = write_small_job(tmp_path)
    words = ["train", str(job), "--set", "mesh.batch=1", "--set", "mesh.depth=-1", "--set", "checkpoint.every=0"]
    expected = mistake(tmp_path, words)
    run = mpi_run(ranks, ["-m", "hpcpar", *words], timeout=120)
    text = run.stdout + run.stderr
    assert run.returncode != 0, text
    assert run.seconds < SECONDS * LOAD, f"ended after {run.seconds:.0f} s"
    messages = [line for line in text.splitlines() if line.startswith("hpcpar: error:")]
    assert len(messages) == 1, text
    lowered = text.lower()
    assert all(part.lower() in lowered for part in expected), text
    assert "Traceback" not in text, text


@pytest.mark.skipif(not kernels.available("onednn"), reason="oneDNN is not available")
def test_bfloat16_that_the_processor_does_not_have_is_refused_before_the_first_step(tmp_path):
    words = ["train", str(write_small_job(tmp_path)), "--set", "mesh.batch=2"]
    words += ["--set", "run.dtype=float32", "--set", "run.compute=bfloat16"]
    run = mpi_run(2, ["-m", "hpcpar", *words], timeout=120, env={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    text = run.stdout + run.stderr
    messages = [line for line in text.splitlines() if line.startswith("hpcpar: error:")]
    assert run.returncode != 0 and len(messages) == 1 and "Traceback" not in text, text
    assert "run.compute is 'bfloat16'" in messages[0] and "avx512_bf16" in messages[0]
    assert not list(tmp_path.rglob("metrics.jsonl"))


LOAD = 3.0
"""How much slower than an idle machine the tests may run before the limit in seconds would mean nothing."""
