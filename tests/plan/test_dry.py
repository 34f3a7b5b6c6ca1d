"""Dry runs against real steps: the same messages on every rank, the memory that was measured."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from hpcpar import functional as F
from hpcpar import nn, optim, random
from hpcpar.mesh import Mesh
from hpcpar.parallel import Column, parallelize
from hpcpar.plan.dry import Messages, Task, add, dry_run
from hpcpar.transport import counter

MESHES = (
    {"batch": 1},
    {"batch": 2},
    {"depth": 2},
    {"depth": 3},
    {"height": 2, "width": 2},
    {"batch": 2, "depth": 2},
    {"model": 2},
    {"model": 2, "depth": 2},
)
NAMES = ["x".join(f"{axis}{n}" for axis, n in shape.items()) for shape in MESHES]
ON_MESHES = [
    pytest.param(shape, id=name, marks=pytest.mark.ranks(exactly=prod(shape.values())))
    for shape, name in zip(MESHES, NAMES, strict=True)
]


TASKS = ("CosmoFlow", "CosmoFlow with batch norm", "U-Net", "U-Net with batch norm")


@pytest.fixture(params=TASKS)
def task(request, tasks):
    batch_norm = "batch norm" in request.param
    if "CosmoFlow" in request.param:
        return tasks.cosmoflow(16 if batch_norm else 32, batch_norm=batch_norm)
    return tasks.unet(batch_norm=batch_norm)


@pytest.mark.parametrize("shape", ON_MESHES)
def test_a_dry_run_counts_exactly_the_messages_of_a_real_step_on_every_rank(task, real, shape) -> None:
    mesh = Mesh(**shape)
    sent = real.messages(task, mesh)
    assert dry_run(task, shape, mesh.rank).messages == sent
    assert bool(sent) == (mesh.size > 1)
    mesh.free()


@pytest.mark.parametrize("shape", ON_MESHES)
def test_half_precision_is_counted_as_it_is_sent(tasks, real, shape) -> None:
    task = replace(tasks.unet(8, 3, 2, batch_norm=False, dice=False), dtype=np.float16)
    mesh = Mesh(**shape)
    assert dry_run(task, shape, mesh.rank).messages == real.messages(task, mesh)
    mesh.free()


@pytest.mark.parametrize("shape", ON_MESHES)
def test_a_network_without_a_plan_of_its_own_is_billed_as_it_was_laid_out(real, shape) -> None:
    def network() -> nn.Module:
        model = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1))
        return parallelize(model, {"0": Column("model")}) if "model" in shape else model

    task = Task(network, lambda y, target: F.mse_loss(F.reshape(y, 4, 3), target), (4, 2, 6, 5, 4), (4, 3))
    task = replace(task, optimizer=lambda model: optim.SGD(model, 1e-3))
    mesh = Mesh(**shape)
    bill, sent = dry_run(task, shape, mesh.rank), real.messages(task, mesh)
    assert bill.messages == sent and bool(sent) == (mesh.size > 1)
    assert bill.parameters["0.weight"].split_axes == (("model",) if shape.get("model", 1) > 1 else ())
    mesh.free()


@pytest.mark.serial
@pytest.mark.parametrize("shape", MESHES, ids=NAMES)
def test_the_parts_of_a_bill_add_up_to_it(task, shape) -> None:
    bill = dry_run(task, shape)
    assert sum(line.kept for line in bill.lines) == pytest.approx(bill.memory["activations"], rel=1e-3, abs=1000)
    parts: Messages = {}
    for messages in (bill.gradients, bill.rest, *(m for line in bill.lines for m in (line.forward, line.backward))):
        add(parts, messages)
    assert parts.keys() == bill.messages.keys()
    for key, tally in bill.messages.items():
        assert parts[key].messages == tally.messages
        assert parts[key].bytes == pytest.approx(tally.bytes, rel=1e-12)


@pytest.mark.ranks(exactly=(1, 2))
@pytest.mark.parametrize("name", ["CosmoFlow", "U-Net"])
def test_the_memory_of_a_dry_run_is_what_arrays_take_in_a_real_step(name: str, tasks, real, comm) -> None:
    task = tasks.cosmoflow(48, 1) if name == "CosmoFlow" else tasks.unet(48, 1, 8, dice=False)
    shape = {"depth": comm.size}
    mesh = Mesh(**shape)
    formula = dry_run(task, shape, mesh.rank).memory
    assert 1 / 1.15 < real.peak(task, mesh) / formula["peak"] < 1.15
    assert formula["gradients"] == formula["parameters"]
    assert formula["peak"] > formula["parameters"] + formula["optimizer"] + formula["activations"]
    mesh.free()


@pytest.mark.serial
def test_a_dry_run_leaves_no_trace(tasks) -> None:
    random.manual_seed(5)
    before, counted = random.get_state(), counter.snapshot()
    dry_run(tasks.unet(), {"batch": 1})
    assert random.get_state() == before
    assert counter.snapshot() == counted, "one rank sends nothing"


@pytest.mark.serial
def test_memory_of_a_split_volume_shrinks_with_the_parts(tasks) -> None:
    """Activations of one sample keep two planes of room for halos: of 16 planes in two parts, of 4 in eight."""
    for batch, halves, eighths in ((2, 0.501, 0.126), (1, 0.52, 0.14)):
        task = tasks.unet(32, batch, 8)
        whole, half, eighth = (dry_run(task, {"depth": k}).memory["activations"] for k in (1, 2, 8))
        assert half / whole < halves and eighth / whole < eighths
