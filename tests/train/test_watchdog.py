"""What the watchdog says about stacks and reports; how it ends a job is in test_failures.py."""

import sys
import threading
import time

import pytest

from hpcpar.mesh import Mesh
from hpcpar.train.watchdog import Watchdog, describe, explain


def report(operation, place="step (train/trainer.py:1)", module="", idle=12.0, stack="the stack"):
    return {"operation": operation, "place": place, "module": module, "idle": idle, "stack": stack}


@pytest.mark.serial
def test_who_waits_who_did_not_arrive_and_who_is_silent():
    reports = {rank: report("comm.all_reduce along batch", module="norm1") for rank in (0, 2, 3)}
    reports[1] = report(None, "read (data/hdf5.py:142)", stack="where rank 1 is")
    text = explain(reports, 5)
    assert "no progress for 12 s" in text
    assert "ranks 0, 2, 3 wait in comm.all_reduce along batch, module norm1: step" in text
    assert "rank 1 did not arrive: read (data/hdf5.py:142)" in text
    assert "rank 4 did not arrive and left no report" in text
    assert "stack of rank 1:\nwhere rank 1 is" in text and "the stack" not in text


@pytest.mark.serial
def test_ranks_in_different_operations_are_told_apart():
    text = explain({0: report("comm.all_reduce along batch"), 1: report("comm.barrier along world")}, 2)
    assert "rank 0 waits in comm.all_reduce" in text and "rank 1 waits in comm.barrier" in text
    assert "did not arrive" not in text


@pytest.mark.ranks(min=2)
def test_a_stack_inside_of_the_transport_names_operation_and_axes(shared_path, comm):
    mesh = Mesh(batch=-1)
    main, release, seen = threading.get_ident(), threading.Event(), {}

    def look():
        """Ranks but 0 look until they wait in the barrier, and say so; rank 0 enters it when all have."""
        while mesh.rank and not seen.get("operation"):
            seen.update(describe(sys._current_frames()[main]))
        if mesh.rank:
            (shared_path / f"seen-{mesh.rank}").touch()
        while mesh.rank == 0 and len(list(shared_path.glob("seen-*"))) < mesh.size - 1:
            time.sleep(0.01)
        if mesh.rank == 0:
            seen.update(describe(sys._current_frames()[main]))
        release.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    if mesh.rank == 0:
        release.wait()
    mesh.world.barrier()
    watcher.join()
    assert seen["operation"] == (None if mesh.rank == 0 else "comm.barrier along batch")
    assert "test_watchdog.py" in seen["stack"]
    mesh.free()


@pytest.mark.serial
def test_the_thread_ends_with_the_block(tmp_path):
    with Watchdog(tmp_path / "w", 0, 1, seconds=60) as watchdog:
        watchdog.beat()
        (thread,) = [t for t in threading.enumerate() if t.name == "hpcpar-watchdog"]
        assert thread.daemon
    thread.join(timeout=30)
    assert not thread.is_alive() and not (tmp_path / "w").exists()


@pytest.mark.serial
def test_none_of_it_without_seconds(tmp_path):
    with Watchdog(tmp_path / "w", 0, 1, seconds=0):
        assert "hpcpar-watchdog" not in {thread.name for thread in threading.enumerate()}
