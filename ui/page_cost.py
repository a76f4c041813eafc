"""What streaming to the page costs the engine: the same runs with and without a page, in pairs.

`python -m ui.page_cost [--prompts N] [--max-new-tokens N] [--browser PATH]` measures three situations in turn (A B C
A B C): an engine that nobody looks at; the application with a client of `/compare`, as if the browser were on another
machine; and the application with Chromium beside it on the same cores. While one situation runs, the processes of the
others are suspended.
"""

import argparse
import logging
import os
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

import psutil
from gradio_client import Client

from saguaro_core.config import EngineConfig, Mode
from saguaro_core.engine import Engine
from saguaro_core.events import Event, RunFinished
from saguaro_core.prompts import select_prompts
from storage import LogReader
from ui.settings import CompareSettings

START_SECONDS = 300.0
RUN_SECONDS = 300.0
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


def followed_by_client(url: str, settings: CompareSettings) -> Speed:
    """Tokens/s of a run that streams through the public endpoint."""
    client = Client(url, verbose=False)

    def run(prompt: str) -> float:
        updates = list(client.submit(prompt, settings.flat(), api_name="/compare"))
        return float(updates[-1]["lanes"][MODE]["figures"]["decode_tokens_per_second"])

    return run


def followed_by_browser(page: Any, url: str, settings: CompareSettings, database: Path) -> Speed:
    """Tokens/s of a run that Chromium draws while it comes."""

    def run(prompt: str) -> float:
        page.goto(url)
        page.wait_for_selector(".lane", timeout=RUN_SECONDS * 1000)
        for mode in ("AR", "SD"):
            page.get_by_role("checkbox", name=mode, exact=True).uncheck()
        page.get_by_label("Max new tokens").fill(str(settings.sampling.max_new_tokens))
        page.get_by_label("Max new tokens").blur()
        page.locator("#prompt textarea").fill(prompt)
        page.locator("#send").click()
        page.wait_for_selector(f".lane[data-mode={MODE}][data-phase=finished]", timeout=RUN_SECONDS * 1000)
        page.goto("about:blank")
        return _newest_speed(database)

    return run


def _newest_speed(database: Path) -> float:
    newest = LogReader(database).history("", limit=1).entries[0]
    return float(newest.runs[0].decode_tokens_per_second or 0.0)


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
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    """Nothing of these process trees runs inside."""
    tree = [p for process in processes for p in (process, *process.children(recursive=True))]
    for process in tree:
        process.suspend()
    try:
        yield
    finally:
        for process in tree:
            process.resume()


def measure(prompts: list[str], settings: CompareSettings, browser: str | None) -> dict[str, list[float]]:
    """Tokens/s of every prompt in every situation."""
    with ExitStack() as stack:
        database = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "page_cost.db"
        process, url = stack.enter_context(application(database))
        engine = stack.enter_context(Engine(EngineConfig()))
        engine.wait_ready(START_SECONDS)
        situations = {"alone": alone(engine, settings), "client": followed_by_client(url, settings)}
        others = {"alone": [process], "client": []}
        if browser is not None:
            page, browser_process = stack.enter_context(_open_browser(browser))
            situations["browser"] = followed_by_browser(page, url, settings, database)
            others = {"alone": [process, browser_process], "client": [browser_process], "browser": []}
        speeds: dict[str, list[float]] = {name: [] for name in situations}
        for number, prompt in enumerate([prompts[0], *prompts]):  # The first round warms up.
            for name, run in situations.items():
                with suspended(others[name]):
                    speed = run(prompt)
                if number:
                    speeds[name].append(speed)
                time.sleep(0.3)
    return speeds


@contextmanager
def _open_browser(path: str) -> Iterator[tuple[Any, psutil.Process]]:
    from playwright.sync_api import sync_playwright

    before = set(psutil.Process(os.getpid()).children(recursive=True))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        new = set(psutil.Process(os.getpid()).children(recursive=True)) - before
        yield chromium.new_page(), next(p for p in new if "chrom" in p.name())
        chromium.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(prog="python -m ui.page_cost", description=__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer (%(default)s)")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="Chromium, where it is not on the PATH")
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
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
