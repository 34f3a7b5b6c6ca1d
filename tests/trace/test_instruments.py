"""What the instruments enter for one small step: kernels, operations and messages, under their modules, with bytes."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import autograd, kernels, nn
from hpcpar.parallel import GradientSync
from hpcpar.primitives.channel import Channel, Pending
from hpcpar.trace import Recorder
from hpcpar.trace.instruments import GRADIENTS, instruments
from hpcpar.transport import Comm, counter
from hpcpar.transport.clock import measure_offset
from hpcpar.transport.nonblocking import Reduction


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm3d(3)
        self.last = nn.Conv3d(3, 2, 3, padding=1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.fixture
def step(comm):
    """A step of a net on a volume split in depth; returns the loss."""
    mesh = hp.Mesh(comm=comm, depth=-1)
    with mesh:
        hp.manual_seed(0)
        net = Net()
        sync = GradientSync(net)
        volume = np.random.default_rng(0).random((1, 2, 8, 4, 4), dtype=np.float32)
        x = hp.tensor(volume, mesh=mesh, layout=hp.Layout(None, None, "depth"))

        def run():
            loss = (net(x) * 2).sum()
            sync.backward(loss)
            for parameter in net.parameters():
                parameter.grad = None
            return loss.resolve().item()

        yield run
    mesh.free()


def traced(step):
    recorder = Recorder()
    with counter.counting() as counts, instruments(recorder):
        step()
    return list(recorder.events), counts


def test_operations_stand_under_their_modules_forward_and_backward(step):
    events, _ = traced(step)
    convs = [(e.name, e.module) for e in events if e.category == "operation" and e.name.startswith("conv")]
    assert convs == [
        ("conv", "first"), ("conv", "last"), ("conv backward", "last"), ("conv backward", "first")
    ]  # fmt: skip
    work = 2 * 27 * 2 * 3 * 8 * 4 * 4  # multiply and add, 27 taps, channels in and out, voxels
    assert [e.facts[0] for e in events if e.name.startswith("conv") and e.category == "operation"] == [
        work, work, 2 * work, work  # the volume needs no gradient
    ]  # fmt: skip


def test_kernels_lie_inside_their_operation(step):
    events, _ = traced(step)
    forward = next(e for e in events if e.name == "conv" and e.module == "last" and e.category == "operation")
    inside = [e for e in events if e.category == "compute" and forward.begin <= e.begin and e.end <= forward.end]
    assert inside and all(e.module == "last" for e in inside)


def test_spans_of_one_thread_are_nested_or_apart(step):
    events, _ = traced(step)
    open_until = []
    for e in sorted((e for e in events if e.category != "flight"), key=lambda e: (e.begin, -e.end)):
        while open_until and open_until[-1] <= e.begin:
            open_until.pop()
        assert not open_until or e.end <= open_until[-1]
        open_until.append(e.end)


def test_the_bytes_of_all_spans_are_those_of_the_counter(step, comm):
    events, counts = traced(step)
    sent = sum(e.facts[1] for e in events if e.category in ("halo", "reduction", "message", "wait"))
    assert sent == pytest.approx(sum(tally.bytes for tally in counts.values()))
    assert (sent > 0) == (comm.size > 1)


@pytest.mark.ranks(min=2)
def test_messages_along_an_axis(step, comm):
    events, _ = traced(step)
    halos = [e for e in events if e.category == "halo" and e.name == "halo start"]
    assert [e.module for e in halos][:2] == ["first", "last"] and {e.facts[0] for e in halos} == {"depth"}
    assert any(e.category == "reduction" and e.module == "norm" for e in events)
    assert [e.module for e in events if e.name == "gradient sum" and e.category == "reduction"] == [GRADIENTS]
    flights = [e for e in events if e.category == "flight"]
    assert len(flights) == len(halos) + 1
    numbers = [e.facts[2] for e in events if e.category in ("reduction", "message", "wait") and e.facts[2] >= 0]
    assert numbers == list(range(len(numbers))) and comm.allgather(len(numbers)) == [len(numbers)] * comm.size


def test_afterwards_everything_is_as_it_was(step):
    def now():
        return (
            [kind.__dict__[name] for kind, name in (
                (Comm, "all_reduce"), (Channel, "start"), (Pending, "__init__"), (Pending, "wait"), (Reduction, "wait")
            )], autograd._visit, counter.record, kernels.registry._State.wrap
        )  # fmt: skip

    before, expected = now(), step()
    with pytest.raises(KeyError), instruments(Recorder()):
        assert step() == expected
        raise KeyError
    assert now() == before


def test_clocks_of_one_machine_are_one_clock(comm):
    mesh = hp.Mesh(comm=comm, batch=-1)
    offset = measure_offset(mesh.world)
    # all ranks of a node read the same clock here: what is measured is the error
    if mesh.node.count == 1:
        assert abs(offset.nanoseconds) <= offset.error
    assert (offset == (0, 0)) == (comm.rank == 0)
    mesh.free()
