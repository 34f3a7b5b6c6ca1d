"""The page: what stands in it, that it needs nothing beside it, and that a browser shows it without an error."""

import html
import json
import re
import shutil
import subprocess
import zlib

import h5py
import numpy as np
import pytest

from hpcpar.cli.main import main
from hpcpar.report import gather, markup
from hpcpar.report.page import as_page
from hpcpar.report.pictures import gray, png, slices
from hpcpar.trace import Recorder, timeline
from hpcpar.trace.recorder import Event

pytestmark = pytest.mark.serial

MS = 1_000_000
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def spans(rank, main_thread):
    for step in (1, 2):
        at = step * 200 * MS
        for begin, end, category, name, module, facts in (
            (0, 80, "compute", "conv_forward", "enc<1>.conv", ()),
            (0, 80, "operation", "conv", "enc<1>.conv", (10**9,)),
            (80 + 10 * rank, 100, "reduction", "all_reduce", "", ("depth", 4096.0, step)),
            (0, 100, "step", f"step {step}", "", ()),
        ):
            yield Event(at + begin * MS, at + end * MS, category, name, module, "forward", main_thread, facts)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a run & more"
    folder.mkdir()
    records = [{"step": s, "loss": 1.5 / s, "lr": 0.01, "samples_per_s": 4.0} for s in range(1, 11)]
    records[4]["val_loss"], records[9]["val_loss"] = 0.75, float("nan")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    label = np.zeros((6, 5, 7), np.uint8)
    label[1:4, 2:4, 4:6] = 1
    with h5py.File(folder / "prediction.h5", "w") as file:
        file["input"] = np.random.default_rng(0).random((1, 6, 5, 7))
        file["label"] = file["prediction"] = label
    ranks = []
    for rank in (0, 1):
        recorder = Recorder()
        recorder.events.extend(spans(rank, recorder.main))
        recorder.added = len(recorder.events)
        facts = {"rank": rank, "coords": {"depth": rank}, "host": f"node{rank}", "peak_bytes": 2**28}
        timeline.write_part(timeline.part_path(folder, rank), recorder, {**facts, "mesh": {"depth": 2}}, 0)
        sent = {"operation": "all_reduce", "axes": "depth", "messages": 3, "bytes": 2048.0}
        ranks.append({**facts, "messages": [sent]})
    (folder / "ranks.json").write_text(json.dumps({"mesh": {"depth": 2}, "steps": 2, "seconds": 1.0, "ranks": ranks}))
    return folder


def shown(page, start, end="</section>"):
    """The text between two marks, without markup."""
    part = page[page.index(start) :]
    return html.unescape(re.sub(r"<[^>]*>", " ", part[: part.index(end)]))


def test_sections_and_figures(run_dir):
    page = as_page(gather(run_dir))
    assert re.findall(r'<section id="([\w-]+)"', page) == [
        "curves", "slices", "time-ranks", "time-layers", "time-axes", "mesh", "bytes"
    ]  # fmt: skip
    assert "15.0%" in shown(page, 'id="tile-exposed"', "</div>")
    assert re.search(r"256 MiB\s+peak memory of a rank", shown(page, 'id="tile-memory"', "</div>"))
    assert re.search(r"enc<1>\.conv\s+80\s+80\.0%", shown(page, 'id="by-layer"'))
    assert re.search(r"depth\s+all_reduce\s+6\s+4 KiB", shown(page, 'id="bytes-by-axis"'))
    assert page.count('class="rank"') == 2 and "node node1" in shown(page, 'id="mesh"')
    assert page.count("data:image/png;base64,") == 9


def test_it_asks_for_nothing_from_elsewhere_and_escapes_what_it_shows(run_dir):
    page = as_page(gather(run_dir))
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import|https?://', page)
    assert "enc<1>" not in page and "enc&lt;1&gt;.conv" in page and "a run &amp; more" in page


def test_a_run_without_trace_and_prediction_says_what_is_missing(run_dir):
    (run_dir / "prediction.h5").unlink()
    (run_dir / "ranks.json").unlink()
    timeline.clear(run_dir)
    page = as_page(gather(run_dir))
    assert re.findall(r'<section id="([\w-]+)"', page) == ["curves"]
    assert "--trace" in shown(page, 'id="missing"', "</header>")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.41, [0.2, 0.3, 0.4]),
        (-3e-4, 1e-4, [-3e-4, -2e-4, -1e-4, 0, 1e-4]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert markup.ticks(low, high) == pytest.approx(expected)


def test_a_gap_parts_a_curve_and_a_single_point_is_a_dot():
    drawing, facts = markup.curves(0, {"loss": [(1, 3.0), (2, 2.0), (3, float("nan")), (4, 1.0)]})
    assert drawing.count("<polyline") == 1 and drawing.count("<circle") == 1
    assert facts["steps"] == [1, 2, 4] and facts["series"] == {"loss": [[1, 3.0], [2, 2.0], [4, 1.0]]}


def test_a_png_holds_its_pixels():
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    data = png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[16:24] == bytes([0, 0, 0, 3, 0, 0, 0, 2])
    start = data.index(b"IDAT") + 4
    size = int.from_bytes(data[start - 8 : start - 4], "big")
    rows = np.frombuffer(zlib.decompress(data[start : start + size]), np.uint8).reshape(2, 10)
    assert (rows[:, 0] == 0).all() and (rows[:, 1:].reshape(2, 3, 3) == pixels).all()
    assert int.from_bytes(data[start + size : start + size + 4], "big") == zlib.crc32(data[start - 4 : start + size])


def test_slices_go_through_the_label(run_dir):
    assert [where for where, _ in slices(run_dir / "prediction.h5")] == [
        "depth 2 of 6", "height 2 of 5", "width 4 of 7"
    ]  # fmt: skip
    assert gray(np.array([[0.0, 0.5], [1.0, np.nan]]), (0.0, 1.0))[..., 0].tolist() == [[0, 127], [255, 0]]


def browse(path, profile, *words):
    """Let Chromium load a page; returns what it wrote."""
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", f"--user-data-dir={profile}"]
    command += [f"--disable-{word}" for word in quiet] + ["--virtual-time-budget=5000", *words, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.watchdog(300)
def test_a_browser_shows_it_without_an_error(run_dir, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(run_dir), "--html", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    # act as a reader: point at the first curve, sort the ranks, the latest last, and write down what is to be seen
    acts = """<script>
      const svg = document.querySelector("svg[data-panel]"), box = svg.getBoundingClientRect();
      svg.dispatchEvent(new MouseEvent("mousemove", { clientX: box.right - 2, clientY: box.top + 20 }));
      for (const click of [1, 2]) document.querySelector("#by-rank th:nth-child(5)").click();
      const bars = [...document.querySelectorAll("#by-layer .bar i")].map((i) => i.getBoundingClientRect().width);
      const pictures = [...document.images].filter((i) => i.complete && i.naturalWidth > 0).length;
      document.body.dataset.seen = JSON.stringify({
        tip: document.querySelector(".tip").textContent, bar: Math.max(...bars), pictures,
        first: document.querySelector("#by-rank tbody td").textContent, wide: document.documentElement.scrollWidth,
      });
    </script>"""
    page.write_text(page.read_text().replace("</body>", acts + "</body>"))
    shows = browse(page, tmp_path / "profile", "--window-size=1200,900", "--dump-dom")
    assert 'data-ready="true"' in shows and "data-error" not in shows
    seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', shows)[1]))
    assert seen["tip"] == "step 10\nloss 0.15"
    assert seen["pictures"] == 9 and seen["bar"] > 100 and seen["wide"] <= 1200
    assert seen["first"] == "1"  # rank 0 waited for it


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.watchdog(300)
def test_an_error_in_the_script_would_be_seen(run_dir, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(as_page(gather(run_dir)).replace("const facts = JSON", "const facts = nothing.JSON"))
    shows = browse(page, tmp_path / "profile", "--dump-dom")
    assert "data-error" in shows and 'data-ready="true"' not in shows
