"""The summary of a configuration as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SMALL = 1024
"""Operations of the loss that keep fewer bytes and send nothing are not shown."""


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts of `hpcpar.plan.summary.summarize` as tables of at most 120 columns."""
    parts = [_head(facts), _layers(facts["layers"]), _moves(facts), _totals(facts), _memory(facts), _messages(facts)]
    return "\n\n".join([part for part in (*parts, _splits(facts.get("split"))) if part])


def amount(nbytes: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError("the last unit takes everything")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table; the first `left` columns are aligned to the left, the others to the right."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = []
    for row in table:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _head(facts: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis}={n}" for axis, n in facts["mesh"].items())
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] != 1)}"
    return f"input {tuple(facts['input'])} {facts['dtype']} on mesh {mesh}, {ranks}; shown is rank {facts['rank']}"


def _layers(rows: Sequence[dict[str, Any]]) -> str:
    shown = [r for r in rows if r["module"] or r["kept_bytes"] >= SMALL or r["forward_bytes"] or r["backward_bytes"]]
    head = ("layer", "operation", "output", "layout", "parameters", "GFLOP", "kept", "sent fwd", "sent bwd")
    return columns(head, [
        (
            row["module"] or "loss", row["operation"], "x".join(map(str, row["shape"])) or "1", row["layout"],
            f"{row['parameters']:,}" if row["parameters"] else "",
            _number(row["gflop_forward"]), amount(row["kept_bytes"]),
            amount(row["forward_bytes"]) if row["forward_bytes"] else "",
            amount(row["backward_bytes"]) if row["backward_bytes"] else "",
        )
        for row in shown
    ], left=4)  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.4g}" if value >= 1e-3 else ""


def _moves(facts: dict[str, Any]) -> str:
    lines = [f"layout {line}" for line in facts["decisions"]] + [f"moved {line}" for line in facts["relayouts"]]
    return "\n".join(lines)


def _totals(facts: dict[str, Any]) -> str:
    sample = facts["per_sample"]
    lines = [f"parameters                          {facts['parameters']:,}"]
    if "gflop_run_again" in sample:
        lines.append(f"products, run again, a sample       {sample['gflop_run_again']:.5g} GFLOP")
    if "convolution_gflop" not in sample:
        return "\n".join([
            *lines,
            f"products, forward, a sample         {sample['gflop_forward']:.5g} GFLOP",
            f"products, 3 x forward, a sample     {sample['gflop']:.5g} GFLOP",
        ])  # fmt: skip
    return "\n".join([
        *lines,
        f"convolutions, forward, a sample     {sample['convolution_gflop_forward']:.5g} GFLOP",
        f"convolutions, 3 x forward, a sample {sample['convolution_gflop']:.5g} GFLOP",
        f"memory of a sample, stated rule     {sample['memory_gib_stated_rule']:.3g} GiB",
    ])  # fmt: skip


_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "input": "input and target",
    "activations": "activations at the end of forward",
    "peak": "most at any time, all of these included",
    "prefetched": "batches read ahead, besides",
}


def _memory(facts: dict[str, Any]) -> str:
    rows = [(_WORDS[name], amount(nbytes)) for name, nbytes in facts["memory"].items()]
    return columns(("memory of the rank", "arrays"), rows)


def _messages(facts: dict[str, Any]) -> str:
    if not facts["messages"]:
        return "no messages"
    rows = [
        (m["purpose"], m["operation"], m["axes"].replace("+", " x "), str(m["messages"]), amount(m["bytes"]))
        for m in facts["messages"]
    ]
    total = sum(m["bytes"] for m in facts["messages"])
    rows.append(("all", "", "", str(sum(m["messages"] for m in facts["messages"])), amount(total)))
    return columns(("messages of a step", "operation", "axes", "number", "sent"), rows, left=3)


_SHOWN = {
    "peak_bytes": "arrays of a rank",
    "activation_bytes": "activations",
    "stated_rule_gib": "stated rule",
    "halo_bytes": "halos",
    "gradient_bytes": "gradients",
    "other_bytes": "other",
}


def _splits(split: dict[str, Any] | None) -> str:
    if not split or not split["rows"]:
        return ""
    shown = [key for key in _SHOWN if any(row.get(key) for row in split["rows"])]
    head = (f"one sample, {split['dim']} in", *(_SHOWN[key] for key in shown))
    rows = [
        (f"{row['parts']} parts", *(f"{row[k]:.3g} GiB" if k == "stated_rule_gib" else amount(row[k]) for k in shown))
        for row in split["rows"]
    ]
    return columns(head, rows)
