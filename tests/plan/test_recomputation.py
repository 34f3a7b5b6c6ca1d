"""The formula of a step's memory counts recomputation: what is measured of a transformer, with and without it."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpar import functional as F
from hpcpar import nn, optim
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models.decoder import Decoder, llama
from hpcpar.plan.dry import Bill, Task, dry_run
from hpcpar.plan.summary import summarize_bill
from hpcpar.tensors import Tensor

BATCH, TOKENS, LAYERS = 2, 192, 4
RESULTS = ("swiglu", "rms_norm")


def decoder(how: str) -> Decoder:
    """A narrow decoder of the Llama family."""
    model = llama(64, 64, LAYERS, 4, 2, hidden=256)
    if how == "blocks":
        nn.recompute(model, "blocks.*")
    if how == "results":
        nn.recompute(model, "blocks.*", ops=RESULTS)
    return model


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target)


def task_of(how: str) -> Task:
    return Task(
        lambda: decoder(how),
        loss_of,
        (BATCH, TOKENS),
        (BATCH, TOKENS),
        optimizer=lambda model: optim.SGD(model, 1e-3, momentum=0.9),
        input_dtype=np.int64,
        target_dtype=np.int64,
        place_data=lambda spread: (Layout("batch"), Layout("batch")),
    )


def bill_of(how: str, shape: dict[str, int], rank: int = 0) -> Bill:
    return dry_run(task_of(how), shape, rank)


@pytest.mark.ranks(exactly=(1, 2))
def test_the_formula_is_what_a_step_takes_and_recomputation_lowers_it(real, comm) -> None:
    shape = {"batch": 1, "model": comm.size}
    mesh = Mesh(**shape)
    peaks = {}
    for how in ("nothing", "results", "blocks"):
        formula = bill_of(how, shape, mesh.rank).memory
        peaks[how] = formula["peak"]
        assert 1 / 1.15 < real.peak(task_of(how), mesh) / formula["peak"] < 1.15, how
    assert peaks["blocks"] < 0.6 * peaks["nothing"] and peaks["results"] < 0.9 * peaks["nothing"]
    mesh.free()


@pytest.mark.serial
def test_blocks_keep_their_inputs_alone_and_results_what_they_were() -> None:
    kept = {how: bill_of(how, {"batch": 1}).memory["activations"] for how in ("nothing", "results", "blocks")}
    stream, hidden = BATCH * TOKENS * 64 * 4, BATCH * TOKENS * 256 * 4
    # in each block both normalised rows and the product of gates
    assert kept["nothing"] - kept["results"] == pytest.approx(LAYERS * (2 * stream + hidden), rel=0.02)
    outside = bill_of("nothing", {"batch": 1})
    inside = sum(line.kept for line in outside.lines if line.module.startswith("blocks."))
    assert kept["blocks"] == pytest.approx(kept["nothing"] - inside + LAYERS * stream, rel=0.05)


@pytest.mark.serial
def test_work_and_messages_of_second_runs_are_on_the_bill() -> None:
    plain, again = (bill_of(how, {"batch": 1, "model": 2}) for how in ("nothing", "blocks"))
    assert len(plain.lines) == len(again.lines)
    blocks = [line for line in again.lines if line.module.startswith("blocks.")]
    assert all(line.repeated == line.flops for line in blocks) and sum(line.repeated for line in blocks) > 0
    assert not any(line.repeated for line in again.lines if not line.module.startswith("blocks."))
    for before, after in zip(plain.lines, again.lines, strict=True):
        assert (before.module, before.op, before.forward) == (after.module, after.op, after.forward)
    forward = sum(t.bytes for line in blocks for t in line.forward.values())
    sent = [sum(tally.bytes for tally in bill.messages.values()) for bill in (plain, again)]
    assert sent[1] - sent[0] == pytest.approx(forward) and forward > 0


@pytest.mark.serial
def test_the_summary_tells_the_work_of_second_runs() -> None:
    facts = {how: summarize_bill(task_of(how), bill_of(how, {"batch": 1})) for how in ("nothing", "blocks")}
    sample = facts["blocks"]["per_sample"]
    assert sample["gflop_forward"] == facts["nothing"]["per_sample"]["gflop_forward"]
    assert "gflop_run_again" not in facts["nothing"]["per_sample"]
    assert 0.8 * sample["gflop_forward"] < sample["gflop_run_again"] < sample["gflop_forward"], "all but the head"


@pytest.mark.ranks(min=2)
def test_a_dry_run_counts_the_messages_of_second_runs_exactly(real, comm) -> None:
    shape = {"batch": 1, "model": comm.size} if comm.size < 4 else {"batch": 2, "model": 2}
    mesh = Mesh(**shape)
    assert bill_of("blocks", shape, mesh.rank).messages == real.messages(task_of("blocks"), mesh)
    mesh.free()
