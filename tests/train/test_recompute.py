"""A run whose activations are computed again is the run that kept them, bit for bit, and needs less memory."""

from __future__ import annotations

import pytest

from hpcpar.plan.jobs import task_of
from hpcpar.plan.memory import estimate
from hpcpar.testing.small_job import assert_same_run
from hpcpar.train.config import ConfigError, Job, load_job
from hpcpar.train.trainer import Trainer

LEVELS = 'run.recompute="[dbm]*"'  # down0, bottom, merge0
RESULTS = 'run.recompute_ops=["batch_norm", "leaky_relu", "dropout"]'


def train(job_file, run: str, *overrides: str) -> None:
    trainer = Trainer(load_job(job_file, [f"run.dir={job_file.parent / run}", *overrides]))
    try:
        trainer.fit(None)
    finally:
        trainer.close()


def test_training_with_batch_norm_dropout_and_accumulation_has_the_same_bits(job_file) -> None:
    train(job_file, "kept")
    for name, override in (("levels", LEVELS), ("results", RESULTS)):
        train(job_file, name, override)
        assert_same_run(job_file.parent / name, job_file.parent / "kept")


@pytest.mark.serial
def test_the_estimate_before_a_run_counts_it(job_file) -> None:
    def activations(*overrides: str) -> int:
        job: Job = load_job(job_file, ["model.base=8", "model.levels=1", *overrides])
        return estimate(task_of(job, (1, 32, 32, 32)), {"batch": 1}, 0, 0).memory["activations"]

    assert activations(LEVELS) < 0.5 * activations()
    assert activations(RESULTS) < activations()


@pytest.mark.serial
def test_a_pattern_or_an_operation_that_is_not_there_is_an_error_of_the_configuration(job_file) -> None:
    for override, text in (
        ('run.recompute="blocks.*"', r"run\.recompute: the pattern 'blocks\.\*' matches no module"),
        ('run.recompute_ops=["conv"]', r"run\.recompute: operations are names among"),
    ):
        with pytest.raises(ConfigError, match=text):
            Trainer(load_job(job_file, [override]))
