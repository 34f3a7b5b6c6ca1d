"""A run that is stopped and goes on is the run that was never stopped: in bits on the same mesh, else to rounding."""

import h5py
import numpy as np
import pytest

from hpcpar.checkpoint import Checkpoint, CheckpointError
from hpcpar.data import Position
from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import SAMPLES, assert_same_run, read_records, train_words
from hpcpar.train.config import dump_job, load_job
from hpcpar.train.resume import differences, equivalent_step
from hpcpar.train.trainer import Trainer


def train(job_file, run, *overrides, resume=None, observe=lambda trainer: None):
    """Train in this process; returns the trainer."""
    job = load_job(job_file, [f"run.dir={job_file.parent / run}", *overrides])
    trainer = Trainer(job)
    observe(trainer)
    try:
        trainer.fit(None if resume is None else resume if resume == "auto" else str(job_file.parent / resume))
    finally:
        trainer.close()
    return trainer


def runs_of(job_file, *names):
    return [job_file.parent / name for name in names]


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "async"])
def test_resumed_at_any_step_the_bits_are_the_same(job_file, background):
    keep = ("checkpoint.every=1", "checkpoint.keep=9", f"checkpoint.async={str(background).lower()}")
    train(job_file, "whole", *keep)
    for step in (1, 4):
        trainer = train(job_file, f"from{step}", *keep, resume=f"whole/checkpoints/step-{step:08d}")
        assert trainer.history[-1]["step"] == 7
        whole, resumed = runs_of(job_file, "whole", f"from{step}")
        late = [r for r in read_records(whole) if r["step"] > step]
        assert read_records(resumed) == late
    assert_same_run(*runs_of(job_file, "from1", "whole"))


def test_another_optimizer_resumes_too_in_float32(job_file):
    words = ("optim.name=sgd", "optim.momentum=0.9", "run.dtype=float32", "checkpoint.every=3", "run.steps=5")
    train(job_file, "whole", *words)
    train(job_file, "part", *words, resume="whole/checkpoints/step-00000003")
    late = [r for r in read_records(job_file.parent / "whole") if r["step"] > 3]
    assert late and read_records(job_file.parent / "part") == late


@pytest.mark.ranks(min=2)
def test_another_mesh_goes_on_to_rounding(job_file):
    train(job_file, "whole", "mesh.batch=1", "mesh.depth=-1", "checkpoint.every=3")
    train(job_file, "batch", "mesh.batch=-1", resume="whole/checkpoints/step-00000003")
    train(job_file, "height", "mesh.batch=1", "mesh.height=-1", resume="whole/checkpoints/step-00000003")
    whole = [r for r in read_records(job_file.parent / "whole") if r["step"] > 3]
    for run in ("batch", "height"):
        for record, expected in zip(read_records(job_file.parent / run), whole, strict=True):
            for key, value in record.items():
                np.testing.assert_allclose(value, expected[key], rtol=1e-10, err_msg=key)


@pytest.mark.spawns_mpi
def test_another_number_of_ranks_goes_on_to_rounding(job_file):
    def words(run, *more):
        return ["-m", "hpcpar", *train_words(job_file, f"run.dir={job_file.parent / run}", *more)]

    mpi_run(2, words("two", "checkpoint.every=3", "mesh.batch=1", "mesh.depth=2")).check()
    start = ["--resume", job_file.parent / "two" / "checkpoints" / "step-00000003"]
    mpi_run(3, [*words("three", "mesh.batch=1", "mesh.width=-1"), *start]).check()
    train(job_file, "one", resume="two/checkpoints/step-00000003")
    two = [r for r in read_records(job_file.parent / "two") if r["step"] > 3]
    for run in ("one", "three"):
        for record, expected in zip(read_records(job_file.parent / run), two, strict=True):
            for key, value in record.items():
                np.testing.assert_allclose(value, expected[key], rtol=1e-10, err_msg=f"{run} {key}")


@pytest.mark.parametrize("batch", [2, 3])
def test_no_sample_is_lost_or_seen_twice(job_file, batch):
    used = []

    def observe(trainer):
        loader = trainer.train_batches.loader
        original = loader.batch

        def reading(position, indices=None):
            made = original(position, indices)
            used.append((position.epoch, made.indices.tolist()))
            return made

        loader.batch = reading

    words = ("data.prefetch=0", "optim.accumulate=1", "checkpoint.every=1", "checkpoint.keep=9")
    train(job_file, "first", *words, "run.steps=4", observe=observe)  # 2 + 2 + 1 samples, and 2 of the next epoch
    train(job_file, "second", *words, f"data.batch={batch}", resume="first/checkpoints/step-00000004", observe=observe)
    for epoch in range(2):
        seen = [i for e, indices in used if e == epoch for i in indices]
        assert sorted(seen) == list(range(SAMPLES)), f"epoch {epoch}: {seen}"


def test_with_other_batches_the_schedule_goes_on_by_samples_seen(job_file, capsys):
    words = ("optim.accumulate=1", "run.steps=16", "checkpoint.every=4", "checkpoint.keep=9")
    train(job_file, "small", *words)
    trainer = train(job_file, "large", *words, "data.batch=4", "run.steps=11", resume="small/checkpoints/step-00000008")
    # 2 epochs of 3 batches and 2 batches of the third are 14 of 15 samples: 2 epochs of 2 batches and one batch
    resumed = read_records(job_file.parent / "large")
    assert resumed[0]["step"] == 6 and trainer.step == 11
    if trainer.mesh.rank == 0:
        assert "a step was 1 x 2 samples and is 1 x 4: 14 samples seen are 5 steps (were 8)" in capsys.readouterr().out


def test_steps_that_lead_to_a_position():
    assert equivalent_step(Position(0, 0), 5, 2, 1) == 0
    assert equivalent_step(Position(2, 4), 5, 2, 1) == 8
    assert equivalent_step(Position(2, 4), 5, 2, 2) == 4
    assert equivalent_step(Position(2, 4), 5, 4, 1) == 5
    assert equivalent_step(Position(10, 0), 16, 4, 1) == 40


def test_auto_begins_when_there_is_nothing_and_says_so(job_file, capsys):
    trainer = train(job_file, "run", "run.steps=2", resume="auto")
    if trainer.mesh.rank == 0:
        assert "WARNING: no checkpoint in" in capsys.readouterr().out
    again = train(job_file, "run", "run.steps=2", resume="auto")
    assert again.step == 2 and again.history[-1]["step"] == 2
    if trainer.mesh.rank == 0:
        assert "resuming from" in capsys.readouterr().out


def test_a_named_place_without_checkpoints_is_an_error(job_file):
    with pytest.raises(CheckpointError, match="--resume .*validation: there is no checkpoint in it"):
        train(job_file, "run", resume="validation")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(job_file, comm, capsys):
    train(job_file, "whole", "checkpoint.every=2", "checkpoint.keep=9")
    train(job_file, "run", "checkpoint.every=2", "checkpoint.keep=9")
    folder = job_file.parent / "run" / "checkpoints"
    if comm.rank == 0:
        (folder / "step-00000007" / "shard-00000.h5").write_bytes(b"")
        shard, piece, _ = Checkpoint(folder / "step-00000006").arrays["model/head.weight"].pieces[0]
        with h5py.File(shard) as file:
            place = file[piece.path].id.get_offset()
        with open(shard, "r+b") as file:
            file.seek(place)
            file.write(b"?")
    comm.barrier()
    capsys.readouterr()
    train(job_file, "run", "checkpoint.every=2", "checkpoint.keep=9", resume="auto")
    assert_same_run(*runs_of(job_file, "run", "whole"))
    comm.barrier()
    if comm.rank == 0:
        said = capsys.readouterr().out
        assert "step-00000007 cannot be used" in said and "step-00000006 cannot be used" in said
        assert "resuming from" in said and "step 4" in said
        assert {p.name for p in folder.iterdir() if p.name.endswith("damaged")} == {
            "step-00000006.damaged", "step-00000007.damaged"
        }  # fmt: skip


def test_a_new_run_does_not_mix_with_an_old_one(job_file, comm):
    train(job_file, "run", "run.steps=4")
    train(job_file, "run", "run.steps=2")
    comm.barrier()
    assert (job_file.parent / "run" / "checkpoints.1" / "step-00000004").is_dir()
    assert [p.name for p in (job_file.parent / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_going_back_sets_later_checkpoints_aside(job_file, comm):
    train(job_file, "run", "checkpoint.keep=9")
    train(job_file, "run", "checkpoint.keep=9", "run.steps=3", resume="run/checkpoints/step-00000002")
    comm.barrier()
    names = sorted(p.name for p in (job_file.parent / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000003", *(f"step-0000000{i}.abandoned" for i in (4, 6, 7))]


def test_what_does_not_fit_is_an_error_that_names_it(job_file):
    train(job_file, "run", "run.steps=2")
    with pytest.raises(CheckpointError, match="step-00000002 does not fit the model: .*has shape"):
        train(job_file, "other", "model.base=3", resume="run")
    with pytest.raises(CheckpointError, match="holds the state of AdamW, the optimizer is SGD"):
        train(job_file, "other", "optim.name=sgd", resume="run")


def test_differences_of_configurations_are_named(job_file):
    before = dump_job(load_job(job_file))
    now = dump_job(load_job(job_file, ["optim.lr=0.5", "run.dir=elsewhere", "mesh.depth=2", "checkpoint.keep=1"]))
    assert differences(before, now) == ["optim.lr: 0.01 in the checkpoint, 0.5 now"]
    assert differences(before, before) == []
