"""Measure in chromium how long pages take to load. Prints one JSON line for each page.

    python benchmarks/page_load.py [--tensors 1000] [--steps 100000] [--runs 10000] [--rounds 3] [--zooms 5]
                                   [--directory DIR] [--peers PYTHON] [--slow-line]

The pages are the run page of a run of the demo's size (36 tensors, 600 steps, three baselines), that of a
long run, and a list of runs. Each round opens each page in a new browser profile, whose cache is empty; the
server has answered the page before. All figures are medians:

- `first_chart_s`: from the start of the navigation until a chart (of the list: a row) is painted
- `interactive_s`: until the first chart of the page reacts to zooming
- `idle_s`: until the last script, answer and chart of what is in the window
- `bytes`: transferred
- `over_limit`: `interactive_s` over that of a bare page in the same round (`limit_s`): plotly's script as its
  package has it, and the same figure in one HTML file, drawn with one call and the same options
- `over_served`: the same with the script that the server sends, which is smaller
- `zoom_s`: of each run page, from the release of the mouse until the finer data is drawn
- `live_s`: of the run of the demo's size, from the commit of new rows until the chart shows them

With `--slow-line`, the run pages are loaded with 1.6 Mbit/s each way and 150 ms for an answer, too:
`slow_first_chart_s`, `slow_interactive_s` and `slow_bytes`.

With `--peers`, other tools in that Python's environment show a loss with as many steps as the long run has;
their lines have `peer`. A tool that is not installed there has a line with `left_out`. To make it:

    python -m venv peers && peers/bin/pip install tensorboard mlflow trackio
    python benchmarks/page_load.py --peers peers/bin/python
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3
from plotly.offline import get_plotlyjs

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
WINDOW = {"width": 1440, "height": 900}
PATIENCE_MS = 90_000
# In bytes per second and milliseconds, as Chromium's developer protocol takes them.
SLOW_LINE = {"offline": False, "latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 200_000}
QUIET_MS = 700

# Runs before the page's scripts: notes when charts and rows are painted, and when the main thread was busy.
WATCH = """
window.bench = {busy: 0, states: {}};
new PerformanceObserver((list) => {
  const ends = list.getEntries().map((task) => task.startTime + task.duration);
  bench.busy = Math.max(bench.busy, ...ends);
}).observe({type: "longtask", buffered: true});
const SHOWN = ".figure__drawn svg, .figure[data-state=ready], #runs tbody tr";
const look = () => {
  if (!("chart" in bench.states) && document.querySelector(SHOWN)) {
    bench.states.chart = true;
    // After the next frame it is painted.
    requestAnimationFrame(() => setTimeout(() => { bench.chart = performance.now(); }));
  }
  const first = document.querySelector("[data-figure]");
  if (!("ready" in bench.states) && first?.dataset.state === "ready") {
    bench.states.ready = true;
    bench.ready = performance.now();
  }
  bench.waiting = document.querySelectorAll(".figure:is([data-state=loading], [data-state=drawn])").length;
};
const changes = {subtree: true, childList: true, attributes: true, attributeFilter: ["data-state"]};
new MutationObserver(look).observe(document, changes);
"""
TIMES = """() => {
  const resources = performance.getEntriesByType("resource");
  const ends = resources.filter((one) => !one.name.endsWith("/events")).map((one) => one.responseEnd);
  const last = Math.max(bench.busy, bench.ready ?? 0, bench.chart ?? 0, ...ends);
  return {chart: bench.chart, ready: bench.ready, last, waiting: bench.waiting ?? 0, now: performance.now()};
}"""
BARE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>bare</title><div id="chart"></div>
<script id="figure" type="application/json">%s</script><script src="/plotly.js"></script><script>
const {data, layout} = JSON.parse(document.getElementById("figure").textContent);
const config = {responsive: true, displayModeBar: false, showTips: false, doubleClick: false};
Plotly.newPlot("chart", data, layout, config).then(() => { bench.ready = performance.now(); });
</script></html>"""


def which(programs: tuple[str, ...]) -> str:
    """The first of the programs that is installed."""
    program = next(filter(None, map(shutil.which, programs)), None)
    if program is None:
        raise SystemExit("chromium is not installed (Debian: apt-get install chromium)")
    return program


class Browser:
    """Opens pages in new profiles and reads their times."""

    def __init__(self, playwright: Any, origin: str, cookie: str) -> None:
        self.line: dict[str, Any] | None = None
        """The conditions of the network; None: as fast as it is."""
        self._chromium = playwright.chromium.launch(executable_path=which(PROGRAMS), args=FLAGS)
        name, _, value = cookie.partition("=")
        self._cookie = {"name": name, "value": value, "url": origin}

    def close(self) -> None:
        self._chromium.close()

    @contextmanager
    def page(self, address: str) -> Iterator[tuple[Any, list[float]]]:
        """A page in a new profile, and the sizes of its answers in bytes as they arrive."""
        context = self._chromium.new_context(viewport=WINDOW, reduced_motion="reduce")
        context.add_cookies([self._cookie])
        context.add_init_script(WATCH)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        if self.line is not None:
            session.send("Network.emulateNetworkConditions", self.line)
        sizes: list[float] = []
        session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
        page.goto(address, wait_until="commit")
        try:
            yield page, sizes
        finally:
            context.close()

    def load(self, address: str, has_chart: bool = True) -> dict[str, float]:
        """The times of one load, in seconds, and its bytes."""
        with self.page(address) as (page, sizes):
            times = self.wait(page, "ready" if has_chart else "chart")
            return {
                "first_chart_s": times["chart"] / 1e3 if times["chart"] else times["ready"] / 1e3,
                "interactive_s": (times["ready"] if has_chart else times["chart"]) / 1e3,
                "idle_s": times["last"] / 1e3,
                "bytes": sum(sizes),
            }

    def wait(self, page: Any, key: str) -> dict[str, float]:
        """Wait until the page does nothing more."""
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while True:
            times: dict[str, float] = page.evaluate(TIMES)
            is_quiet = not times["waiting"] and times["now"] - times["last"] > QUIET_MS
            if times.get(key) is not None and is_quiet:
                return times
            if time.monotonic() > deadline:
                raise SystemExit(f"{page.url} is not ready after {PATIENCE_MS / 1e3:g} s: {times}")
            page.wait_for_timeout(50)

    def zoom(self, address: str, zooms: int) -> list[float]:
        """Drag over parts of the first chart; seconds from the release of the mouse to the drawn data."""
        with self.page(address) as (page, _):
            self.wait(page, "ready")
            page.evaluate(
                "document.addEventListener('mouseup', (event) => { bench.released = event.timeStamp; }, true)"
            )
            name = page.evaluate("document.querySelector('[data-figure]').id")
            times = []
            for i in range(zooms):
                box = page.locator(f"#{name} .nsewdrag").first.bounding_box()
                left, width, middle = box["x"], box["width"], box["y"] + box["height"] / 2
                drawn = page.evaluate(DRAWN, name)
                page.mouse.move(left + width * (0.1 + 0.02 * i), middle)
                page.mouse.down()
                page.mouse.move(left + width * 0.5, middle, steps=4)
                page.mouse.move(left + width * 0.8, middle, steps=2)
                page.mouse.up()
                end = self.wait_for(page, lambda: page.evaluate(DRAWN, name), drawn)
                times.append((end - page.evaluate("bench.released")) / 1e3)
                page.locator(f"#{name} [data-reset]").click()
                self.wait_for(page, lambda: page.evaluate(DRAWN, name), end)
                page.wait_for_timeout(300)
            return times

    def live(self, address: str, write: Callable[[], float], rounds: int) -> list[float]:
        """Seconds from a commit to the drawn chart; `write` commits a row and returns the time of that."""
        with self.page(address) as (page, _):
            self.wait(page, "ready")
            page.locator("[data-live][data-state=live]").wait_for()
            name = page.evaluate("document.querySelector('[data-figure]').id")
            times = []
            for _ in range(rounds):
                drawn = page.evaluate(DRAWN, name)
                committed = write()
                end = self.wait_for(page, lambda: page.evaluate(DRAWN, name), drawn)
                times.append(page.evaluate("performance.timeOrigin") / 1e3 + end / 1e3 - committed)
                page.wait_for_timeout(1500)
            return times

    @staticmethod
    def wait_for(page: Any, read: Callable[[], float], before: float) -> float:
        """The first value above `before`."""
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while (value := read()) <= before:
            if time.monotonic() > deadline:
                raise SystemExit(f"{page.url}: nothing was drawn")
            page.wait_for_timeout(10)
        return value


# When the figure was last drawn with an answer of the server.
DRAWN = "(name) => performance.getEntriesByName(`fp8:drawn:${name}`).at(-1)?.startTime ?? 0"


@contextmanager
def bare_page(plotly: bytes, figure: dict[str, Any]) -> Iterator[str]:
    """Serve the page that is the limit. Yields its address."""
    page = BARE % json.dumps(figure).replace("<", "\\u003c")
    files = {
        "/": ("text/html; charset=utf-8", gzip.compress(page.encode())),
        "/plotly.js": ("text/javascript; charset=utf-8", gzip.compress(plotly)),
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kind, body = files.get(self.path, ("text/plain", gzip.compress(b"")))
            self.send_response(200)
            headers = {"Content-Type": kind, "Content-Encoding": "gzip", "Content-Length": str(len(body))}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()


def fill(supervisor: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The pages and the session cookie of a filled installation."""
    command = [sys.executable, str(Path(__file__).with_name("page_load_fill.py"))]
    command += ["--tensors", str(options.tensors), "--steps", str(options.steps), "--runs", str(options.runs)]
    surroundings = {**os.environ, **supervisor.environment}
    done = subprocess.run(command, env=surroundings, check=True, stdout=subprocess.PIPE, text=True)
    filled: dict[str, Any] = json.loads(done.stdout)
    return filled


def get(url: str, cookie: str) -> bytes:
    """The body of an answer; also makes the server's first answer to this address."""
    answer = urllib3.request(
        "GET", url, headers={"cookie": cookie, "accept-encoding": "gzip"}, redirect=False
    )
    if answer.status != 200:
        raise SystemExit(f"{url}: {answer.status}")
    return answer.data


def first_figure(url: str, cookie: str) -> tuple[str, dict[str, Any]]:
    """The address of plotly and the first figure of a page."""
    page = get(url, cookie).decode()
    script, address = (
        re.search(r'name="plotly" content="([^"]+)"', page),
        re.search(r'data-figure="([^"]+)"', page),
    )
    assert script and address, "the page has no chart"
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    figure: dict[str, Any] = json.loads(get(origin + address[1].replace("&amp;", "&"), cookie))["figure"]
    return origin + script[1], figure


def writer(supervisor: Any, address: str) -> Callable[[], float]:
    """A function that posts one row to the run of a page and returns the time of the answer."""
    from chaos import make_token

    run = address.rstrip("/").rpartition("/")[2]
    token = make_token(supervisor)
    sender, numbers = str(uuid.uuid4()), itertools.count()

    def write() -> float:
        seq = next(numbers)
        now = datetime.now(UTC).isoformat()
        rows = [{"step": 600 + seq, "time": now, "scalars": {"loss": 2.5 + seq / 10}}]
        answer = urllib3.request(
            "POST",
            f"{supervisor.url}/api/v1/runs/{run}/batches",
            body=json.dumps({"protocol": 1, "writer": sender, "seq": seq, "rows": rows}),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        committed = time.time()
        if answer.status >= 300:
            raise SystemExit(f"{answer.status} {answer.data[:300]!r}")
        return committed

    return write


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    keys = rounds[0]
    return {key: round(statistics.median(times[key] for times in rounds), 3) for key in keys}


def slow_times(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The medians that are reported of a slow line."""
    times = medians(rounds)
    return {f"slow_{key}": times[key] for key in ("first_chart_s", "interactive_s", "bytes")}


def median_ratio(times: list[float], limits: list[float]) -> float:
    """The median of the ratios of the rounds."""
    return round(statistics.median(mine / limit for mine, limit in zip(times, limits, strict=True)), 3)


def measure_run(
    browser: Browser, url: str, cookie: str, name: str, options: argparse.Namespace
) -> dict[str, Any]:
    """The times of a run page beside those of the bare page, round by round."""
    script, figure = first_figure(url, cookie)
    own, limit, served = [], [], []
    with (
        bare_page(get_plotlyjs().encode(), figure) as bare,
        bare_page(get(script, cookie), figure) as bare_served,
    ):
        for _ in range(options.rounds):
            limit.append(browser.load(bare)["interactive_s"])
            own.append(browser.load(url))
            served.append(browser.load(bare_served)["interactive_s"])
    mine = [times["interactive_s"] for times in own]
    return {
        "page": name,
        **medians(own),
        "over_limit": median_ratio(mine, limit),
        "limit_s": round(statistics.median(limit), 3),
        "over_served": median_ratio(mine, served),
        "zoom_s": round(statistics.median(browser.zoom(url, options.zooms)), 3),
    }


def main() -> None:
    """Measure, and print one JSON line for each page."""
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--zooms", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, help="keeps the installation and its runs for the next time"
    )
    parser.add_argument("--peers", help="the Python of an environment with tensorboard, mlflow and trackio")
    parser.add_argument("--slow-line", action="store_true", help="also load the run pages over a slow line")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with (
        tempfile.TemporaryDirectory() as scratch,
        Supervisor(options.directory or Path(scratch) / "up", port=0) as supervisor,
        sync_playwright() as playwright,
    ):
        filled = fill(supervisor, options)
        cookie, pages = (
            filled["cookie"],
            {name: supervisor.url + path for name, path in filled["pages"].items()},
        )
        browser = Browser(playwright, supervisor.url, cookie)
        names = {"demo": "run, 36 tensors x 600 steps, three baselines",
                 "long": f"run, {options.tensors} tensors x {options.steps} steps"}  # fmt: skip
        for key, name in names.items():
            report(measure_run(browser, pages[key], cookie, name, options))
        get(pages["list"], cookie)
        loads = [browser.load(pages["list"], has_chart=False) for _ in range(options.rounds)]
        report({"page": f"list of {options.runs} runs", **medians(loads), "over_limit": None})
        live = browser.live(pages["demo"], writer(supervisor, pages["demo"]), options.zooms)
        report({"page": "new rows of a run", "live_s": round(statistics.median(live), 3)})
        if options.slow_line:
            browser.line = SLOW_LINE
            for key, name in names.items():
                report(
                    {"page": name, **slow_times([browser.load(pages[key]) for _ in range(options.rounds)])}
                )
        browser.close()
        if options.peers:
            import page_load_peers

            for line in page_load_peers.measure(playwright, options.peers, options.steps, options.rounds):
                report(line)


def report(line: dict[str, Any]) -> None:
    """Print one line."""
    print(json.dumps({"benchmark": "page_load", **line}), flush=True)


if __name__ == "__main__":
    main()
