"""The report as one self-contained HTML page: no file beside it, nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpcpar.data.files import replaced
from hpcpar.plan.table import amount
from hpcpar.report import markup
from hpcpar.report.facts import axis_bytes
from hpcpar.report.markup import Cell, bar, legend, table
from hpcpar.report.pictures import slices
from hpcpar.report.text import SHOWN, milliseconds, percent
from hpcpar.train.plot import figures, series
from hpcpar.version import __version__

PARTS = {"forward": "forward", "backward": "backward", "other": "optimizer and other", "messages": "messages"}


def write_page(facts: dict[str, Any], path: Path) -> Path:
    """Write the page of what `hpcpar.report.gather` found, whole or not at all; returns its path."""
    with replaced(path) as aside:
        aside.write_text(as_page(facts), encoding="utf-8")
    return path


def as_page(facts: dict[str, Any]) -> str:
    """Return the page."""
    here = files("hpcpar.report")
    curves, data = _curves(facts["records"])
    sections = [_head(facts), curves, _slices(Path(facts["run"])), _times(facts), _mesh(facts), _sent(facts["ranks"])]
    lines = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(_name(facts))} - hpcpar</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<style>\n{here.joinpath('page.css').read_text()}</style></head>\n<body>",
        *filter(None, sections),
        f'<script type="application/json" id="curves-data">{_embedded(data)}</script>',
        f"<script>\n{here.joinpath('page.js').read_text()}</script>\n</body></html>\n",
    ]
    return "\n".join(lines)


def _name(facts: dict[str, Any]) -> str:
    return Path(facts["run"]).resolve().name


def _embedded(data: Any) -> str:
    return json.dumps(data).replace("<", "\\u003c")  # a name must not end the script


def _section(name: str, title: str, content: str, note: str = "") -> str:
    shown = f"<p>{escape(note)}</p>" if note else ""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{shown}{content}</section>'


def _head(facts: dict[str, Any]) -> str:
    missing = "".join(f"<div>Missing: {escape(line)}</div>" for line in facts["missing"])
    tiles = "".join(
        f'<div class="tile" id="tile-{name}"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for name, value, what in _tiles(facts)
    )
    mesh = " x ".join(f"{axis}={n}" for axis, n in facts["mesh"].items())
    about = f"{facts['run']}, " + (f"mesh {mesh}, " if mesh else "") + f"hpcpar {__version__}"
    notice = f'<div class="card missing" id="missing">{missing}</div>' if missing else ""
    return (
        f"<header><h1>{escape(_name(facts))}</h1><p>{escape(about)}</p>"
        f'<div class="tiles">{tiles}</div>{notice}</header>'
    )


def _tiles(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    last, times = facts["records"][-1], facts["times"]
    tiles = [("step", f"{last['step']:,}", "optimizer steps")]
    tiles += [(k, f"{last[k]:.4g}", k.replace("_", " ")) for k in ("loss", "val_loss") if k in last]
    if times:
        whole = sum(times["kinds"].values())
        tiles += [
            ("time", f"{milliseconds(times['step'])} ms", f"a step (mean of {times['steps']})"),
            ("rate", f"{times['gflops']:.3g}", "GFLOP/s of all ranks"),
            ("exposed", percent(times["exposed"], whole), "of a step: exposed communication"),
            ("imbalance", f"{times['imbalance']:.2f}", "busiest rank over the mean"),
        ]
    peaks = [rank["peak_bytes"] for rank in facts["ranks"] if "peak_bytes" in rank]
    return [*tiles, ("memory", amount(max(peaks)), "peak memory of a rank")] if peaks else tiles


def _curves(records: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    panels = figures(records)
    panels += [[name] for name in ("lr", "samples_per_s") if any(name in r for r in records)]
    drawn, data = [], []
    for number, names in enumerate(panel for panel in panels if panel):
        lines = {name: [(float(s), float(v)) for s, v in zip(*series(records, name), strict=True)] for name in names}
        drawing, facts = markup.curves(number, lines)
        drawn.append(f'<div class="card"><h3>{escape(names[0])}</h3>{drawing}</div>')
        data.append(facts)
    return _section("curves", "Curves", f'<div class="row">{"".join(drawn)}</div>'), data


def _slices(run: Path) -> str:
    path = run / "prediction.h5"
    if not path.exists():
        return ""
    cells = "<span></span><span>input</span><span>label</span><span>prediction</span>"
    for where, pictures in slices(path):
        shown = (f'<img src="{uri}" alt="{escape(where)}">' for uri in pictures)
        cells += f"<span>{escape(where)}</span>" + "".join(shown)
    note = "Through the middle of what is labelled, in the first sample that was not trained on."
    return _section("slices", "Prediction", f'<div class="card slices">{cells}</div>', note)


def _times(facts: dict[str, Any]) -> str:
    times = facts["times"]
    if not times:
        return ""
    longest = max(sum(row["kinds"].values()) for row in times["ranks"])
    by_rank = table("by-rank", ("rank", "step ms", "computing", "messages", "late", ""), [
        (
            str(row["rank"]), *(milliseconds(row[key]) for key in ("step", "busy", "exposed", "late")),
            Cell(_bar(row["kinds"], longest, SHOWN), row["step"], "wide"),
        )
        for row in times["ranks"]
    ], sortable=True)  # fmt: skip
    kinds = legend({kind: shown for kind, shown in SHOWN.items() if times["kinds"][kind] > 0})
    note = (
        f"Means of {times['steps']} steps, {times['first']} to {times['last'].split()[-1]}. Late: in a collective, "
        f"before the last rank has come. Messages under way behind computing: {milliseconds(times['hidden']) or 0} ms."
    )
    return (
        _section("time-ranks", "Time of a step, by rank", f'<div class="card">{by_rank}{kinds}</div>', note)
        + _section("time-layers", "Time by layer", _layers(times))
        + (_section("time-axes", "Time by mesh axis", _axes(times)) if times["axes"] else "")
    )


def _bar(seconds: dict[str, float], whole: float, names: dict[str, str]) -> str:
    return bar(seconds, whole, {key: f"{names[key]}: {milliseconds(value) or 0} ms" for key, value in seconds.items()})


def _layers(times: dict[str, Any]) -> str:
    whole, longest = sum(times["kinds"].values()), max(row["seconds"] for row in times["layers"])
    head = ("layer", "ms", "share", "forward", "backward", "messages", "GFLOP/s", "sent", "")
    rows = [
        (
            row["module"], milliseconds(row["seconds"]), percent(row["seconds"], whole),
            *(milliseconds(row[key]) for key in ("forward", "backward", "messages")),
            f"{row['gflops']:.3g}" if row["gflop"] else "",
            Cell(amount(row["bytes"]) if row["bytes"] else "", row["bytes"]),
            Cell(_bar({part: row[part] for part in PARTS}, longest, PARTS), row["seconds"], "wide"),
        )
        for row in times["layers"]
    ]  # fmt: skip
    return f'<div class="card">{table("by-layer", head, rows, sortable=True)}{legend(PARTS)}</div>'


def _axes(times: dict[str, Any]) -> str:
    longest = max(row["seconds"] for row in times["axes"])
    rows = [
        (
            row["axes"], row["kind"], f"{row['calls']:.0f}", milliseconds(row["seconds"]),
            Cell(amount(row["bytes"]), row["bytes"]), f"{row['gb_per_s']:.3g}" if row["bytes"] else "",
            Cell(_bar({"messages": row["seconds"]}, longest, {"messages": row["kind"]}), row["seconds"], "wide"),
        )
        for row in times["axes"]
    ]  # fmt: skip
    head = ("axis", "messages", "calls", "ms", "sent by a rank", "GB/s", "")
    return f'<div class="card">{table("by-axis", head, rows, sortable=True)}</div>'


def _mesh(facts: dict[str, Any]) -> str:
    ranks = facts["ranks"]
    if not ranks:
        return ""
    nodes = []
    for host, group in groupby(sorted(ranks, key=itemgetter("host")), key=itemgetter("host")):
        cells = "".join(
            f'<div class="rank" data-rank="{rank["rank"]}"><b>rank {rank["rank"]}</b>'
            + "".join(f"<span>{escape(axis)} {at}</span>" for axis, at in rank["coords"].items())
            + f'<span>{amount(rank["peak_bytes"])}</span></div>'
            for rank in group
        )  # fmt: skip
        nodes.append(f'<div class="node card"><h3>node {escape(host)}</h3><div class="ranks">{cells}</div></div>')
    return _section("mesh", "Mesh: who sits where", "".join(nodes), "With the most memory each rank has held.")


def _sent(ranks: Sequence[dict[str, Any]]) -> str:
    rows = axis_bytes(list(ranks))
    if not rows:
        return ""
    most = max(row["bytes"] for row in rows)
    shown = [
        (
            row["axes"], row["operation"], f"{row['messages']:,}", Cell(amount(row["bytes"]), row["bytes"]),
            Cell(bar({"messages": row["bytes"]}, most, {"messages": amount(row["bytes"])}), row["bytes"], "wide"),
        )
        for row in rows
    ]  # fmt: skip
    head = ("axis", "operation", "messages", "bytes of all ranks", "")
    note = "Of the whole run, validation and checkpoints included."
    content = f'<div class="card">{table("bytes-by-axis", head, shown, sortable=True)}</div>'
    return _section("bytes", "Bytes by mesh axis", content, note)
