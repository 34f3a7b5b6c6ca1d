"""Dry runs of the transformers of volumes against real steps: the same messages, the memory that was measured."""

from __future__ import annotations

import pytest

from hpcpar import functional as F
from hpcpar import optim
from hpcpar.mesh import Mesh
from hpcpar.models import Swin3d, ViT3d
from hpcpar.plan.dry import Task, dry_run, total_bytes

MESHES = {
    1: [{"batch": 1}],
    2: [{"depth": 2}, {"model": 2}],
    3: [{"height": 3}],
    4: [{"batch": 2, "depth": 2}, {"model": 2, "width": 2}],
}
NETWORKS = ("ViT", "Swin")


def pytest_generate_tests(metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        from mpi4py import MPI

        shapes = MESHES.get(MPI.COMM_WORLD.Get_size(), [])
        metafunc.parametrize("shape", shapes, ids=["x".join(f"{a}{n}" for a, n in s.items()) for s in shapes])


def task_of(name: str, size: tuple[int, int, int] = (9, 10, 12), batch: int = 2, width: int = 12) -> Task:
    def model() -> ViT3d | Swin3d:
        if name == "ViT":
            return ViT3d(1, 3, width=width, depth=2, heads=2, patch=(2, 4, 4), refine=4, dropout=0.1)
        return Swin3d(1, 3, width=width, depths=(2, 1), heads=(2, 2), window=3, base=4)

    shapes = (batch, 1, *size), (batch, *size)
    return Task(model, F.cross_entropy, *shapes, optimizer=lambda model: optim.AdamW(model, 1e-3), clip=1.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_dry_run_counts_exactly_the_messages_of_a_real_step_on_every_rank(name, real, shape) -> None:
    mesh, task = Mesh(**shape), task_of(name)
    bill, sent = dry_run(task, shape, mesh.rank), real.messages(task, mesh)
    assert bill.messages == sent
    assert bool(sent) == (mesh.size > 1)
    assert any("Column" in decision for decision in bill.decisions) == ("model" in shape)
    mesh.free()


@pytest.mark.serial
@pytest.mark.parametrize("name", NETWORKS)
def test_the_memory_of_a_dry_run_is_what_arrays_take_in_a_real_step(name, real) -> None:
    task, shape = task_of(name, (24, 24, 24), 1, 24), {"depth": 1}
    mesh = Mesh(**shape)
    assert 1 / 1.15 < real.peak(task, mesh) / dry_run(task, shape).memory["peak"] < 1.15
    mesh.free()


@pytest.mark.serial
def test_tokens_of_a_grid_are_exchanged_once_for_each_operand_and_the_result() -> None:
    """All-to-all: 4 (p - 1) / p^2 N S C words a rank forward, as many backward."""
    size, p, width = (16, 16, 16), 2, 12
    bill = dry_run(task_of("ViT", size, 1, width), {"depth": p})
    words = 8 * 4 * 4 * width
    forward = sum(total_bytes(line.forward, "exchange") for line in bill.lines)
    assert forward == 2 * 4 * (p - 1) / p**2 * words * 4, "of two blocks, in float32"
    assert bill.messages["exchange", "depth"].bytes == 2 * forward


@pytest.mark.serial
def test_shifted_windows_send_their_shift_and_no_other_block_sends_anything() -> None:
    bill = dry_run(task_of("Swin", (24, 12, 12), 1), {"depth": 2})
    by_module = {line.module: total_bytes(line.forward) for line in bill.lines if line.op == "window_partition"}
    plane = 6 * 6 * 12 * 4  # of the first stage: 12 x 6 x 6 tokens of 12 channels, windows of 3 shifted by 1
    assert by_module == {"stage0.0.attention": 0, "stage0.1.attention": plane, "merging1": 0, "stage1.0.attention": 0}
