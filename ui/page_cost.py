"""What streaming to the page costs the engine: the same SSD runs with and without a page, in pairs.

`python -m ui.page_cost [--prompts N] [--max-new-tokens N] [--browser PATH]` measures three situations in turn (A B C
A B C): an engine that nobody looks at; the application streaming to a reader that draws nothing, as to a browser on
another machine; and the application with Chromium drawing beside it on the same cores. While the engine runs alone,
the application and Chromium are suspended.
"""

import argparse
import logging
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from saguaro_core.config import EngineConfig, Mode
from saguaro_core.engine import Engine
from saguaro_core.events import Event, RunFinished
from saguaro_core.prompts import select_prompts
from storage import LogReader
from storage.records import HistoryEntry
from ui.settings import CompareSettings

START_SECONDS = 300.0
RUN_SECONDS = 300.0
SETTLE_SECONDS = 1.0
MODE: Mode = "ssd"
Speed = Callable[[str], float]


def alone(engine: Engine, settings: CompareSettings) -> Speed:
    """Tokens/s of a run that only its own caller follows."""

    def run(prompt: str) -> float:
        finished = threading.Event()
        speeds: list[float] = []

        def on_event(event: Event) -> None:
            if isinstance(event, RunFinished):
                speeds.append(event.figures.decode_tokens_per_second or 0.0)
                finished.set()

        engine.submit(uuid.uuid4().hex, settings.request(prompt, MODE), on_event)
        finished.wait(RUN_SECONDS)
        return speeds[0]

    return run


def streamed(url: str, settings: CompareSettings, database: Path) -> Speed:
    """Tokens/s of a run whose whole stream a client of `/compare` reads, without drawing it."""

    def run(prompt: str) -> float:
        call = httpx.post(f"{url}/gradio_api/call/compare", json={"data": [prompt, settings.flat()]})
        address = f"{url}/gradio_api/call/compare/{call.raise_for_status().json()['event_id']}"
        with httpx.stream("GET", address, timeout=RUN_SECONDS) as stream:
            for _ in stream.iter_raw():
                pass
        time.sleep(SETTLE_SECONDS)  # The log writes what is still under way.
        return float(_newest(database).runs[0].decode_tokens_per_second or 0.0)

    return run


class PageRuns:
    """Runs that are started from the page, in Chromium."""

    def __init__(self, page: Any, url: str, settings: CompareSettings, database: Path) -> None:
        self.page, self.url, self.settings, self.database = page, url, settings, database

    def drawn(self, prompt: str) -> float:
        """Tokens/s of a run that Chromium draws while it comes."""
        self._send(prompt)
        selector = f".lane[data-mode={MODE}][data-phase=finished]"
        self.page.wait_for_selector(selector, timeout=RUN_SECONDS * 1000)
        return self._speed()

    def _send(self, prompt: str) -> None:
        page = self.page
        page.goto(self.url)
        page.wait_for_selector(".lane", timeout=RUN_SECONDS * 1000)
        for mode in ("AR", "SD"):
            page.get_by_role("checkbox", name=mode, exact=True).uncheck()
        page.get_by_label("Max new tokens").fill(str(self.settings.sampling.max_new_tokens))
        page.get_by_label("Max new tokens").blur()
        page.locator("#prompt textarea").fill(prompt)
        time.sleep(SETTLE_SECONDS)  # Loading the page is not part of a run.
        page.locator("#send").click()

    def _speed(self) -> float:
        self.page.goto("about:blank")
        time.sleep(SETTLE_SECONDS)  # The log writes what is still under way.
        return float(_newest(self.database).runs[0].decode_tokens_per_second or 0.0)


def _newest(database: Path) -> HistoryEntry:
    return LogReader(database).history("", limit=1).entries[0]


@contextmanager
def application(database: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The real application on a free port, ready to answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "app.py", "--port", str(port), "--database", str(database)]
    with subprocess.Popen(
        command, cwd=Path(__file__).resolve().parents[1], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.strip() == "Ready":
                    break
            else:
                raise SystemExit("the application ended before it was ready.")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Nothing of the application runs inside, and nothing of Chromium."""
    children = psutil.Process().children(recursive=True)
    tree = [process, *process.children(recursive=True), *(p for p in children if "chrom" in p.name())]
    for one in tree:
        one.suspend()
    try:
        yield
    finally:
        for one in tree:
            one.resume()


def measure(prompts: list[str], settings: CompareSettings, browser: str) -> dict[str, list[float]]:
    """Tokens/s of every prompt in every situation."""
    speeds: dict[str, list[float]] = {"alone": [], "streamed": [], "drawn": []}
    with ExitStack() as stack:
        database = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "page_cost.db"
        process, url = stack.enter_context(application(database))
        engine = stack.enter_context(Engine(EngineConfig()))
        engine.wait_ready(START_SECONDS)
        run_alone = alone(engine, settings)
        run_streamed = streamed(url, settings, database)
        runs = PageRuns(stack.enter_context(_open_browser(browser)), url, settings, database)
        for number, prompt in enumerate([prompts[0], *prompts]):  # The first round warms up.
            with suspended(process):
                round_speeds = [run_alone(prompt)]
            round_speeds += [run_streamed(prompt), runs.drawn(prompt)]
            if number:
                for name, speed in zip(speeds, round_speeds, strict=True):
                    speeds[name].append(speed)
    return speeds


@contextmanager
def _open_browser(path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chromium.new_page(viewport={"width": 1400, "height": 950})
        chromium.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(prog="python -m ui.page_cost", description=__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer (%(default)s)")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="Chromium, where it is not on the PATH")
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if options.browser is None:
        sys.stderr.write("No Chromium was found: install it, or name it with --browser.\n")
        return 2
    settings = CompareSettings.from_flat({"modes": [MODE], "max_new_tokens": options.max_new_tokens})
    prompts = [prompt.text for prompt in select_prompts(options.prompts)]
    speeds = measure(prompts, settings, options.browser)
    for name, values in speeds.items():
        ratios = [value / base for value, base in zip(values, speeds["alone"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sys.stdout.write(
            f"{name:8} {statistics.median(values):6.1f} tokens/s   of the speed alone: {middle:.3f} "
            f"(quartiles {low:.3f} to {high:.3f})\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
