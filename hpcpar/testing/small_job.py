"""A training that takes a second: a few random volumes, a tiny U-Net, and everything that makes resuming hard.

Dropout, batch norm statistics, gradient accumulation over the end of an epoch, a remainder batch, augmentation, a
schedule, and records that lie between checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

JOB = """
[run]
dir = "{folder}/run"
steps = 7
seed = 3
log_every = 3
validate_every = 4
dtype = "float64"
[model]
name = "unet3d"
base = 2
levels = 1
dropout = 0.2
[data]
train = "{folder}/train"
validation = "{folder}/validation"
batch = 2
[data.augment]
flip = [0, 2]
noise = 0.1
[optim]
name = "adamw"
lr = 1e-2
accumulate = 2
clip = 1.0
[schedule]
name = "cosine"
warmup = 2
[loss]
name = "cross_entropy"
[checkpoint]
every = 2
"""

SAMPLES, EXTENT = 5, (8, 8, 8)
CLOCK = ("seconds", "samples_per_s", "tokens_per_s")


def write_small_job(folder: Path) -> Path:
    """Write data and configuration into a folder, and return the path of the latter. One rank alone calls it."""
    import h5py

    for part, count, seed in (("train", SAMPLES, 0), ("validation", 3, 100)):
        (folder / part).mkdir()
        for i in range(count):
            rng = np.random.default_rng(seed + i)
            with h5py.File(folder / part / f"{i}.h5", "w") as file:
                file["volume"] = rng.random((1, *EXTENT), dtype=np.float32)
                file["segmentation"] = rng.integers(0, 2, EXTENT).astype(np.uint8)
    job = folder / "job.toml"
    job.write_text(JOB.format(folder=folder))
    return job


def train_words(job: Path, *settings: str) -> list[str]:
    """Return the words of the command that trains a job with settings, after ``hpcpar``."""
    return ["train", str(job), *(word for setting in settings for word in ("--set", setting))]


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def read_weights(run: Path) -> dict[str, np.ndarray]:
    """Return the weights that a run has left at its end."""
    import h5py

    with h5py.File(run / "weights.h5") as file:
        return {name: dataset[()] for name, dataset in file.items()}


def assert_same_run(run: Path, expected: Path, tolerance: float = 0.0) -> None:
    """Assert that two runs have the same weights and records: bit by bit, or within a relative tolerance."""
    weights, wanted = read_weights(run), read_weights(expected)
    assert list(weights) == list(wanted)
    for name, value in weights.items():
        np.testing.assert_allclose(value, wanted[name], rtol=tolerance, atol=tolerance, err_msg=name)
    records, wanted = read_records(run), read_records(expected)
    assert [r["step"] for r in records] == [r["step"] for r in wanted]
    for record, expectation in zip(records, wanted, strict=True):
        assert list(record) == list(expectation)
        for key, value in record.items():
            np.testing.assert_allclose(value, expectation[key], rtol=tolerance, atol=tolerance, err_msg=key)
