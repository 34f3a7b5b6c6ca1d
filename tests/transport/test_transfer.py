"""Messages under way between peers: told apart by tags, counted, and compared in the checked mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.plan import VirtualMesh
from hpcpar.testing import shared_mesh
from hpcpar.transport import counter, transfer
from hpcpar.transport.transfer import In, Out, Transfer


def round_trip(mesh: Any, dtype: Any = np.float64) -> tuple[list[np.ndarray], Transfer]:
    """Two messages of different length to the next rank, the second tag first."""
    comm = mesh.world
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    make = hp.kernels.outline.zeros if mesh.virtual else np.zeros
    short, long = make(2, dtype), make(5, dtype)
    if not mesh.virtual:
        short += comm.rank
        long += 10 + comm.rank
    sends = [Out(after, 62, long), Out(after, 61, short), Out(after, 63, make(0, dtype))]
    receives = [In(before, 61, 2), In(before, 62, 5), In(before, 63, 0)]
    under_way = Transfer(comm, sends, receives, short, "visit")
    under_way.test()
    return under_way.wait(), under_way


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64])
@pytest.mark.parametrize("piece", [1 << 30, 16], ids=["whole", "in pieces"])
def test_messages_arrive_by_their_tags_and_empty_ones_are_not_sent(
    dtype: Any, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece)
    mesh = shared_mesh(s=hp.current_mesh().size)
    before = (mesh.rank - 1) % mesh.size
    with counter.counting() as sent:
        (short, long, nothing), under_way = round_trip(mesh, dtype)
    assert (short == before).all() and (long == 10 + before).all() and nothing.size == 0
    assert short.dtype == dtype and under_way.test()
    tally = sent["visit", "s"]
    assert (tally.messages, tally.bytes) == (2, 7 * np.dtype(dtype).itemsize)


@pytest.mark.ranks(min=2)
def test_a_mesh_that_only_plans_counts_the_same() -> None:
    mesh = shared_mesh(s=hp.current_mesh().size)
    with counter.counting() as real:
        arrived, _ = round_trip(mesh)
    with counter.counting() as counted:
        shown, _ = round_trip(VirtualMesh({"s": mesh.size}, mesh.rank))
    assert real == counted and [a.shape for a in arrived] == [a.shape for a in shown]


@pytest.mark.ranks(min=2)
def test_the_checked_mode_compares_what_is_sent_with_what_is_waited_for() -> None:
    comm = shared_mesh(s=hp.current_mesh().size).world
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with hp.checked():
        round_trip(shared_mesh(s=comm.size))
        with pytest.raises(hp.checks.CheckError, match="waits for"):
            Transfer(comm, [Out(after, 61, np.ones(3))], [In(before, 61, 4)], np.ones(3), "visit")
