"""The summary of a configuration: layers, layouts, parameters, work, memory of a rank, messages of a step.

Everything comes from dry runs of the real program (`hpcpar.plan.dry`). Two figures are those of the literature, so that
they can be compared: the work of a step is three times the forward products of the convolutions, and the memory of one
sample follows the rule of Oyama et al. 2020 (arXiv 2007.12856).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcpar.models.placement import Spread
from hpcpar.plan.dry import Bill, Line, Messages, Task, add, dry_run, total_bytes
from hpcpar.plan.jobs import mesh_shape, sample_shape, task_of
from hpcpar.plan.memory import prefetched
from hpcpar.plan.virtual import VirtualMesh
from hpcpar.signature import Signature
from hpcpar.train.config import Job

PARTS = (1, 2, 4, 8, 16)

CONVOLUTIONS = ("conv", "conv_transpose")


def summarize(job: Job, ranks: int | None = None, shape: Sequence[int] | None = None) -> dict[str, Any]:
    """Return everything as one tree of plain values, which `hpcpar.plan.table.as_text` prints.

    Parameters
    ----------
    ranks : int, optional
        Where the mesh has a -1.
    shape : sequence of int, optional
        (D, H, W) of a volume, where it is not to be found in the data.
    """
    sample = sample_shape(job, shape)
    task = task_of(job, sample)
    bill = dearest(task, mesh_shape(job, ranks))
    facts = summarize_bill(task, bill)
    facts["memory"]["prefetched"] = prefetched(task, bill.mesh, job.data.prefetch)
    name, dim = task.split
    facts["split"] = {"dim": name, "rows": [split_row(task, parts) for parts in PARTS if parts <= task.input[dim]]}
    return facts


def dearest(task: Task, shape: dict[str, int]) -> Bill:
    """Return the bill of the rank that sends most (of equals, of the one that holds most).

    Only a rank at the start, one in the middle and one at the end of every axis are looked at: no other pays more than
    these where blocks are even.
    """
    mesh = VirtualMesh(shape)
    places = {tuple(at(n) for n in shape.values()) for at in (lambda n: 0, lambda n: n // 2, lambda n: n - 1)}
    ranks = sorted(int(np.ravel_multi_index(place, tuple(shape.values()))) for place in places) if shape else [0]
    bills = [dry_run(task, mesh.shape, rank) for rank in ranks]
    return max(bills, key=lambda bill: (total_bytes(bill.messages), bill.memory["peak"], -bill.mesh.rank))


def summarize_bill(task: Task, bill: Bill) -> dict[str, Any]:
    """Return layers, totals, memory and messages of one bill."""
    return {
        "mesh": dict(bill.mesh.shape),
        "ranks": bill.mesh.size,
        "rank": bill.mesh.rank,
        "dtype": str(np.dtype(task.dtype)),
        "input": list(task.input),
        "target": list(task.target),
        "parameters": sum(sig.size for sig in bill.parameters.values()),
        "decisions": bill.decisions,
        "layers": list(layers(bill)),
        "relayouts": bill.relayouts,
        "per_sample": per_sample(task, bill),
        "memory": dict(bill.memory),
        "messages": messages_by_purpose(bill),
    }


def per_sample(task: Task, bill: Bill) -> dict[str, float]:
    """Return the products of one sample, all of them and three times; for volumes those of convolutions, and memory.

    Those of recomputation are told where there are any, and are in no other figure.
    """
    samples = task.input[0]
    every = sum(line.flops for line in bill.lines) / samples
    found = {"gflop_forward": every / 1e9, "gflop": 3 * every / 1e9}
    again = sum(line.repeated for line in bill.lines)
    if again:
        found["gflop_run_again"] = again / samples / 1e9
    if is_volume(task):
        forward = sum(line.flops for line in bill.lines if line.op in CONVOLUTIONS) / samples
        found["convolution_gflop_forward"] = forward / 1e9
        found["convolution_gflop"] = 3 * forward / 1e9
        found["memory_gib_stated_rule"] = stated_memory(task, bill.lines) / 2**30
    return found


def is_volume(task: Task) -> bool:
    """Whether samples are volumes, (N, C, D, H, W)."""
    return len(task.input) == 5


def layers(bill: Bill) -> Iterable[dict[str, Any]]:
    """Yield one row for each operation; the parameters of a module stand in its first row."""
    named: set[str] = set()
    for line in bill.lines:
        own = 0
        if line.module not in named:
            named.add(line.module)
            own = sum(s.size for name, s in bill.parameters.items() if name.rpartition(".")[0] == line.module)
        yield {
            "module": line.module,
            "operation": line.op,
            "shape": list(line.out.shape),
            "layout": shown_layout(line.out),
            "shard": list(line.out.local_shape),
            "parameters": own,
            "gflop_forward": line.flops / 1e9,
            "kept_bytes": line.kept,
            "forward_bytes": total_bytes(line.forward),
            "backward_bytes": total_bytes(line.backward),
        }


def shown_layout(sig: Signature) -> str:
    """Return a layout on one line: ``batch . depth . .``, with what is partial behind a +."""
    text = " ".join("*".join(stack) or "." for stack in sig.dims)
    return text + (f" +{'*'.join(sig.partial)}" if sig.partial else "")


def stated_memory(task: Task, lines: Iterable[Line]) -> int:
    """Return the bytes of one sample by the rule of Oyama et al.: arrays and error signals of equal size, in float32.

    Counted are the input and its copy, and the result of each convolution, activation and pooling; for a U-Net also of
    each normalisation, transposed convolution and concatenation, and of the softmax over classes, be it a part of the
    loss. What comes behind the last volume is not counted.
    """
    lines = [line for line in lines if len(line.operand.shape) == len(task.input)]
    elements = 2 * np.prod(task.input[1:], dtype=int)
    classes = [line.operand for line in lines if line.op in ("softmax", "log_softmax", "cross_entropy")]
    if classes:
        elements += classes[0].size // classes[0].shape[0]
    for line in lines:
        if line.op in _COUNTED:
            elements += line.out.size // line.out.shape[0]
            if fused_activation(line):
                elements += (line.operand if "pool" in line.op else line.out).size // line.out.shape[0]
    return int(elements) * 2 * 4


_COUNTED = (*CONVOLUTIONS, "leaky_relu", "avg_pool", "max_pool", "batch_norm", "group_norm", "cat")


def fused_activation(line: Line) -> bool:
    """Whether an operation also applies a leaky ReLU, in the same pass (a pooling before it, the others behind it)."""
    if line.op == "batch_norm":
        return line.extra[2] is not None
    if line.op == "group_norm":
        return line.extra[1] is not None
    return line.op in (*CONVOLUTIONS, "avg_pool") and isinstance(line.extra, float)


def messages_by_purpose(bill: Bill) -> list[dict[str, Any]]:
    """Return the messages of a step by purpose, operation and axes; together they are all messages of the step."""
    purposes: dict[str, Messages] = {"halo": {}, "statistics": {}, "attention": {}, "layout": {}, "loss": {}}
    for line in bill.lines:
        for messages in (line.forward, line.backward):
            for key, tally in messages.items():
                add(purposes[_purpose(line, key[0])], {key: tally})
    purposes["gradients"], purposes["clipping"] = bill.gradients, bill.rest
    return [
        {"purpose": purpose, "operation": key[0], "axes": key[1], "messages": tally.messages, "bytes": tally.bytes}
        for purpose, messages in purposes.items()
        for key, tally in sorted(messages.items())
    ]


def _purpose(line: Line, operation: str) -> str:
    if operation == "halo":
        return "halo"
    if line.op.endswith("_norm"):
        return "statistics"
    if line.op.endswith("attention"):
        return "attention"
    return "layout" if line.module else "loss"


def split_row(task: Task, parts: int) -> dict[str, Any]:
    """Return what a rank pays for one sample that is split into `parts` along one dim, that of ``task.split``."""
    single = replace(task, spread=Spread(), input=(1, *task.input[1:]), target=(1, *task.target[1:]))
    bill = dearest(single, {task.split[0]: parts})
    gradients = total_bytes(bill.gradients)
    halos = sum(total_bytes(m, "halo") for line in bill.lines for m in (line.forward, line.backward))
    row = {
        "parts": parts,
        "peak_bytes": bill.memory["peak"],
        "activation_bytes": bill.memory["activations"],
        "halo_bytes": halos,
        "gradient_bytes": gradients,
        "other_bytes": total_bytes(bill.messages) - halos - gradients,
    }
    if is_volume(task):
        row["stated_rule_gib"] = stated_memory(single, bill.lines) / parts / 2**30
    return row
