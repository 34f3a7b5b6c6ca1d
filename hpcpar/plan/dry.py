"""A dry run: one training step on a virtual mesh, written down operation by operation.

The program that runs is the real one: model, loss, backward, gradient synchronisation, clipping, optimizer. Only arrays
have no storage and messages are counted and not sent. So the bill holds for any mesh, and takes well under a second.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from hpcpar import autograd, nn, random, scope
from hpcpar.kernels import outline
from hpcpar.kernels.outline import Ledger
from hpcpar.layout.layout import Layout
from hpcpar.models.placement import Spread, place
from hpcpar.ops import core
from hpcpar.optim import Optimizer, clip_grad_norm_
from hpcpar.parallel import GradientSync
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Parameter, Tensor
from hpcpar.transport import counter
from hpcpar.transport.counter import Tally

Messages = dict[tuple[str, str], Tally]


@dataclass(frozen=True)
class Task:
    """What is to be run.

    Attributes
    ----------
    model : callable
        Makes the network, on the current mesh. One with a plan of its own (`placements`) is placed by it; any other
        stays as it was made, laid out by `parallelize` or whole on each rank.
    loss : callable
        From output and target to a scalar.
    input, target : tuple of int
        Global shapes, samples first; the target of a segmentation has the input's shape without channels.
    spread : Spread
        Which axes split samples, channels and the extent of a sample.
    forward : callable
        From the model and its inputs to its output.
    further : sequence of callable
        From a spread to the layout of each input of the same shape and dtype that the model takes besides the first.
    place_data : callable, optional
        From a spread to the layouts of input and target; by default those of volumes.
    split : (str, int)
        The axis, by its usual name, and the dim of the input, that one sample is split along first.
    optimizer : callable, optional
        Makes the optimizer of a model; without it no step is taken.
    clip : float
        Largest norm of the gradient; 0 for no clipping.
    dtype, input_dtype, target_dtype : dtype
        Of the network; of input and target, the network's by default (and int64 for labels).
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    input: tuple[int, ...]
    target: tuple[int, ...]
    spread: Spread = field(default_factory=Spread)
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    clip: float = 0.0
    dtype: Any = np.float32
    input_dtype: Any = None
    target_dtype: Any = None
    forward: Callable[[nn.Module, Sequence[Tensor]], Tensor] = lambda model, inputs: model(*inputs)
    further: Sequence[Callable[[Spread], Layout]] = ()
    place_data: Callable[[Spread], tuple[Layout, Layout]] | None = None
    split: tuple[str, int] = ("depth", 2)

    @property
    def labels(self) -> bool:
        """Whether the target is split in space like the input."""
        return len(self.target) == len(self.input) - 1

    @property
    def dtypes(self) -> tuple[Any, Any]:
        """The dtypes of input and target."""
        labels = np.int64 if self.labels else self.dtype
        return self.input_dtype or self.dtype, self.target_dtype or labels

    def layouts(self, mesh: VirtualMesh) -> tuple[Layout, Layout]:
        """Return the layouts of input and target."""
        spread = self.spread.on(mesh)
        if self.place_data:
            return self.place_data(spread)
        return spread.volume, spread.labels if self.labels else spread.samples


@dataclass
class Line:
    """One operation: where it stands, what it makes, what it costs this rank.

    Attributes
    ----------
    module, op : str
        Full name of the module whose forward ran, "" outside of any; name of the operation.
    operand, out : Signature
        Of the first operand, as it is used, and of the result.
    extra : object
        The operation's argument that takes no part in layouts (a slope, a probability).
    flops : int
        Of the forward pass, products only, of all ranks together.
    kept : int
        Bytes that this rank holds more when the next operation starts, for it and for backward; an operation that takes
        the place of its operand keeps nothing more. Together they are the activations at the end of forward.
    forward, backward : Messages
        Messages of this rank, moves of operands and settling of gradients included; those of a second run, for
        backward, belong to backward.
    repeated : int
        Work of second runs, as `flops`.
    """

    module: str
    op: str
    operand: Signature
    out: Signature
    extra: Any
    flops: int
    kept: int
    forward: Messages
    backward: Messages = field(default_factory=dict)
    repeated: int = 0


@dataclass
class Bill:
    """Everything that a step costs one rank.

    Attributes
    ----------
    mesh : VirtualMesh
    lines : list of Line
    decisions, relayouts : list of str
        What the model's plan decided, and the changes of layout at the borders of modules.
    parameters : dict of str to Signature
    messages : Messages
        Of the whole step.
    gradients, rest : Messages
        The share of the gradient synchronisation, and of what is outside operations (clipping).
    memory : dict of str to int
        Bytes of this rank: ``parameters``, ``gradients``, ``optimizer``, ``input``; ``activations`` held when forward
        ends; ``peak``, the most at any time during the step, all the others included.
    """

    mesh: VirtualMesh
    lines: list[Line] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    relayouts: list[str] = field(default_factory=list)
    parameters: dict[str, Signature] = field(default_factory=dict)
    messages: Messages = field(default_factory=dict)
    gradients: Messages = field(default_factory=dict)
    rest: Messages = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)


class _Recorder:
    """Writes a bill: what the byte counter gained since the last look belongs to what has just ended."""

    def __init__(self, bill: Bill, ledger: Ledger) -> None:
        self.bill, self.ledger = bill, ledger
        self.nodes: dict[autograd.Node, Line] = {}
        self.alike: dict[tuple, deque[Line]] = defaultdict(deque)  # in the order in which they are run again
        self.seen = counter.snapshot()
        self.before_op = 0

    def gained(self) -> Messages:
        """Messages since the last call."""
        now = counter.snapshot()
        changes = {key: tally - self.seen.get(key, Tally()) for key, tally in now.items()}
        self.seen = now
        return {key: change for key, change in changes.items() if change.messages or change.bytes}

    def before(self, op: core.Op, rule: core.Rule, tensors: tuple[Tensor, ...]) -> None:
        add(self.bill.rest, self.gained())
        if not autograd.recomputing():
            self.settle()

    def after(
        self, op: core.Op, rule: core.Rule, tensors: tuple[Tensor, ...], arrays: list[Any], out: Tensor, extra: Any
    ) -> None:
        operand = rule.grads[0].resolved
        alike = self.alike[scope.current(), op.name, operand, rule.out]
        if autograd.recomputing():
            line = alike[0]
            alike.rotate(-1)
            line.repeated += line.flops
            add(line.backward, self.gained())
        else:
            line = Line(scope.current(), op.name, operand, rule.out, extra, op.flops(rule), 0, self.gained())
            self.bill.lines.append(line)
            alike.append(line)
        if out.node is not None:
            self.nodes[out.node] = line

    def settle(self) -> None:
        """Say what the last operation keeps, now that its operands are gone if nobody else holds them."""
        if self.bill.lines:
            self.bill.lines[-1].kept = self.ledger.live - self.before_op
        self.before_op = self.ledger.live

    def backward(self, node: autograd.Node, gradient: Any, gradients: Any) -> None:
        add(self.nodes[node].backward, self.gained())

    def leaf(self, parameter: Tensor) -> None:
        """Before the synchronisation sees a gradient: moves of the gradient itself."""
        add(self.bill.rest, self.gained())

    def synchronised(self, parameter: Tensor) -> None:
        """After it has seen it: the bucket that was sent, if any."""
        add(self.bill.gradients, self.gained())


def add(total: Messages, more: Messages) -> None:
    """Add messages to a total, in place."""
    for key, tally in more.items():
        held = total.setdefault(key, Tally())
        held.messages += tally.messages
        held.bytes += tally.bytes


def total_bytes(messages: Messages, operation: str | None = None) -> float:
    """Return the bytes of all messages, or of one operation."""
    return sum(tally.bytes for (name, _), tally in messages.items() if operation in (None, name))


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    held = core.observers[:], autograd.observers[:]
    core.observers[:], autograd.observers[:] = [recorder], [recorder.backward]
    try:
        yield
    finally:
        core.observers[:], autograd.observers[:] = held


def dry_run(task: Task, shape: dict[str, int], rank: int = 0) -> Bill:
    """Run one step without storage and without other ranks, and return the bill of one rank.

    Parameters
    ----------
    shape : dict of str to int
        Axes of the mesh and their lengths.
    rank : int
        Whose bill: ranks at the ends of a split exchange fewer halos.

    Notes
    -----
    The random state is left as it was. The messages are exactly those of a real step; memory is that of arrays, without
    what libraries take inside their kernels.
    """
    state = random.get_state()
    try:
        with VirtualMesh(shape, rank) as mesh, outline.keeping() as ledger:
            bill = Bill(mesh)
            _step(task, mesh, ledger, bill)
            mesh.free()
            return bill
    finally:
        random.set_state(state)


def _step(task: Task, mesh: VirtualMesh, ledger: Ledger, bill: Bill) -> None:
    memory, recorder = bill.memory, _Recorder(bill, ledger)
    with nn.default_dtype(task.dtype):
        model = task.model()
    if hasattr(model, "placements"):
        bill.decisions = place(model, mesh, task.spread)
    bill.parameters = {name: p.sig for name, p in model.named_parameters()}
    memory["parameters"] = ledger.live
    optimizer = task.optimizer(model) if task.optimizer else None
    _hook(model, recorder.leaf)
    sync = GradientSync(model)
    _hook(model, recorder.synchronised)
    layouts, dtypes = task.layouts(mesh), task.dtypes
    first = [layouts[0], *(lay(task.spread.on(mesh)) for lay in task.further)]
    inputs = [_drawn(mesh, task.input, layout, dtypes[0]) for layout in first]
    y = _drawn(mesh, task.target, layouts[1], dtypes[1])
    memory["input"] = ledger.live - memory["parameters"]
    with autograd.no_grad():  # from the second step on there are message buffers, and room for halos around blocks
        task.forward(model, inputs)
    held = ledger.live
    recorder.gained()
    ledger.peak = ledger.live
    with counter.counting() as counts, _recording(recorder):
        loss = task.loss(task.forward(model, inputs), y)
        recorder.settle()
        memory["activations"] = ledger.live - held
        add(bill.rest, recorder.gained())
        loss.backward()
        recorder.synchronised(loss)
        sync.finish()
        recorder.synchronised(loss)
        memory["gradients"] = sum(p.grad.shard.nbytes for p in model.parameters() if p.grad is not None)
        if task.clip:
            clip_grad_norm_(model, task.clip)
        before, memory["optimizer"] = ledger.peak, -ledger.live
        if optimizer is not None:
            optimizer.step()
        memory["optimizer"] += ledger.live
        add(bill.rest, recorder.gained())
    memory["peak"] = max(ledger.peak, before + memory["optimizer"])  # in every step but the first the state is there
    bill.messages = counts
    bill.relayouts = nn.relayouts(model)


def _hook(model: nn.Module, hook: Callable[[Parameter], None]) -> None:
    for parameter in model.parameters():
        parameter.on_gradient(hook)


def _drawn(mesh: VirtualMesh, shape: tuple[int, ...], layout: Layout, dtype: Any) -> Tensor:
    sig = signature(mesh, shape, layout)
    make = outline.rules.channels_last if len(shape) > 3 and prod(shape) else outline.empty
    return Tensor(make(sig.local_shape, dtype), sig)
