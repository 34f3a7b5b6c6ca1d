"""The report as text, at most 120 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcpar.plan.table import amount, columns
from hpcpar.report.facts import axis_bytes

SHOWN = {
    "compute": "kernels",
    "operation": "rest of operations (NumPy, Python)",
    "halo": "halos: packing and sending",
    "reduction": "sums over ranks",
    "message": "gathers, layouts, agreement",
    "wait": "waiting for halos and gradients",
    "io": "reading batches",
    "rest": "all else",
}
"""What the kinds of time are called."""


def as_text(facts: dict[str, Any]) -> str:
    """Return what `hpcpar.report.gather` found as tables, and what it did not find."""
    parts = [_head(facts)]
    if facts["times"]:
        parts += [_kinds(facts["times"]), _layers(facts["times"]), _axes(facts["times"]), _ranks(facts)]
    else:
        parts.append(_places(facts["ranks"]))
    parts += [_sent(facts["ranks"]), "\n".join(f"missing: {line}" for line in facts["missing"])]
    return "\n\n".join(part for part in parts if part)


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with as many digits as say something; nothing for nothing."""
    return f"{seconds * 1e3:.4g}" if seconds >= 1e-6 else ""


def percent(part: float, whole: float) -> str:
    """Return a share of a whole."""
    return f"{100 * part / whole:.1f}%" if whole else ""


def headline(facts: dict[str, Any]) -> list[str]:
    """Return the few sentences that matter most."""
    record = facts["records"][-1]
    figures = ", ".join(f"{k} {v:.5g}" for k, v in record.items() if isinstance(v, float) and "loss" in k)
    mesh = " x ".join(f"{axis}={n}" for axis, n in facts["mesh"].items())
    lines = [f"step {record['step']}: {figures}" + (f"; mesh {mesh}" if mesh else "")]
    times = facts["times"]
    if times:
        whole = sum(times["kinds"].values())
        lines += [
            f"one step {milliseconds(times['step'])} ms (mean of {times['steps']}, {times['first']} to "
            f"{times['last'].split()[-1]}); {times['gflops']:.4g} GFLOP/s of all ranks in convolutions and products",
            f"exposed communication {milliseconds(times['exposed']) or 0} ms, {percent(times['exposed'], whole)} of a "
            f"step; under way behind computing {milliseconds(times['hidden']) or 0} ms",
            f"load: the busiest rank computes {times['imbalance']:.2f} times the mean; waiting in collectives for the "
            f"last rank {milliseconds(times['late']) or 0} ms",
        ]
    peaks = [rank["peak_bytes"] for rank in facts["ranks"] if "peak_bytes" in rank]
    if peaks:
        lines.append(f"peak memory {amount(max(peaks))} on a rank, {amount(sum(peaks))} in all")
    return lines


def _head(facts: dict[str, Any]) -> str:
    lines = [facts["run"], *(f"  {line}" for line in headline(facts))]
    if facts["dropped"]:
        lines.append(f"  {facts['dropped']:,} older spans did not fit (run.trace_events)")
    if facts["times"] and facts["clock_error"]:
        lines.append(f"  clocks of the ranks agree within {facts['clock_error'] * 1e6:.3g} us")
    return "\n".join(lines)


def _kinds(times: dict[str, Any]) -> str:
    whole = sum(times["kinds"].values())
    return columns(
        ("where a step goes", "ms", "share"),
        [(SHOWN[k], milliseconds(v), percent(v, whole)) for k, v in times["kinds"].items() if v >= 1e-6],
    )


def _layers(times: dict[str, Any]) -> str:
    whole = sum(times["kinds"].values())
    head = ("layer (ms of a step)", "forward", "backward", "other", "messages", "share", "kernels", "GFLOP/s", "sent")
    return columns(head, [
        (
            row["module"], *(milliseconds(row[k]) for k in ("forward", "backward", "other", "messages")),
            percent(row["seconds"], whole), milliseconds(row["kernels"]),
            f"{row['gflops']:.4g}" if row["gflop"] else "", amount(row["bytes"]) if row["bytes"] else "",
        )
        for row in times["layers"]
    ])  # fmt: skip


def _axes(times: dict[str, Any]) -> str:
    if not times["axes"]:
        return ""
    head = ("axis", "messages", "calls", "ms", "sent by a rank", "GB/s")
    return columns(head, [
        (row["axes"], row["kind"], f"{row['calls']:.0f}", milliseconds(row["seconds"]), amount(row["bytes"]),
         f"{row['gb_per_s']:.3g}" if row["bytes"] else "")
        for row in times["axes"]
    ], left=2)  # fmt: skip


def _ranks(facts: dict[str, Any]) -> str:
    places = {rank["rank"]: rank for rank in facts["ranks"]}
    head = ("rank", "place", "step ms", "computing", "messages", "late", "reading", "peak memory")
    return columns(head, [
        (
            str(row["rank"]), _place(places.get(row["rank"], {})), milliseconds(row["step"]), milliseconds(row["busy"]),
            milliseconds(row["exposed"]), milliseconds(row["late"]), milliseconds(row["kinds"]["io"]),
            amount(places[row["rank"]]["peak_bytes"]) if row["rank"] in places else "",
        )
        for row in facts["times"]["ranks"]
    ], left=2)  # fmt: skip


def _places(ranks: Sequence[dict[str, Any]]) -> str:
    if not ranks:
        return ""
    rows = [(str(rank["rank"]), _place(rank), amount(rank["peak_bytes"])) for rank in ranks]
    return columns(("rank", "place", "peak memory"), rows, left=2)


def _place(rank: dict[str, Any]) -> str:
    coords = " ".join(f"{axis}={at}" for axis, at in rank.get("coords", {}).items())
    return f"{coords} on {rank['host']}" if "host" in rank else coords


def _sent(ranks: Sequence[dict[str, Any]]) -> str:
    rows = axis_bytes(list(ranks))
    if not rows:
        return ""
    return columns(
        ("axis (whole run)", "operation", "messages", "bytes of all ranks"),
        [(row["axes"], row["operation"], f"{row['messages']:,}", amount(row["bytes"])) for row in rows],
        left=2,
    )
