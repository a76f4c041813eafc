"""What streaming to the page costs the engine: the same SSD runs with and without a page, in pairs.

`python tests/page_cost.py [--prompts N] [--max-new-tokens N] [--browser PATH]` measures three situations in turn (A B C
A B C): an engine that nobody looks at; the application streaming to a reader that draws nothing, as to a browser on
another machine; and the application with Chromium drawing beside it on the same cores. While the engine runs alone,
the application is suspended, and so is Chromium unless it draws.
"""

import argparse
import logging
import queue
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
from playwright.sync_api import Error as BrowserError
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from saguaro_core.config import EngineConfig, Mode
from saguaro_core.engine import Engine
from saguaro_core.events import Event, RunFinished
from saguaro_core.prompts import PROMPTS, select_prompts
from storage import LogReader
from ui.settings import CompareSettings

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300.0
RUN_SECONDS = 300.0
SETTLE_SECONDS = 1.0
MODE: Mode = "ssd"
Speed = Callable[[str], float]


def checked(run: str, prompt: str, status: str | None, speed: float | None, error: str | None = None) -> float:
    """The speed of a run that finished. Ends the measurement, naming the run, if it did not or has no speed."""
    if status == "finished" and speed:
        return speed
    if status is None:
        what = f"did not end within {RUN_SECONDS:.0f} seconds, or was not recorded"
    elif status != "finished":
        what = f"is {status}, not finished"
    else:
        what = "has too few tokens for a speed: give more --max-new-tokens"
    raise SystemExit(f"The {run} run of {prompt!r} {what}{f' ({error})' if error else ''}.")


def alone(engine: Engine, settings: CompareSettings) -> Speed:
    """Tokens/s of a run that only its own caller follows."""

    def run(prompt: str) -> float:
        ended: queue.Queue[RunFinished] = queue.Queue()

        def on_event(event: Event) -> None:
            if isinstance(event, RunFinished):
                ended.put(event)

        engine.submit(uuid.uuid4().hex, settings.request(prompt, MODE), on_event)
        try:
            end = ended.get(timeout=RUN_SECONDS)
        except queue.Empty:
            return checked("alone", prompt, None, None)
        return checked("alone", prompt, end.status, end.figures.decode_tokens_per_second, end.error)

    return run


def logged(run: str, prompt: str, database: Path) -> float:
    """Tokens/s of the run that the log holds last."""
    time.sleep(SETTLE_SECONDS)  # The log writes what is still under way.
    entries = LogReader(database).history("", limit=1).entries
    if not entries or entries[0].prompt != prompt:
        return checked(run, prompt, None, None)
    last = entries[0].runs[0]
    return checked(run, prompt, last.status, last.decode_tokens_per_second, last.error)


def streamed(url: str, settings: CompareSettings, database: Path) -> Speed:
    """Tokens/s of a run whose whole stream a client of `/compare` reads, without drawing it."""

    def run(prompt: str) -> float:
        call = httpx.post(f"{url}/gradio_api/call/compare", json={"data": [prompt, settings.flat()]})
        address = f"{url}/gradio_api/call/compare/{call.raise_for_status().json()['event_id']}"
        with httpx.stream("GET", address, timeout=RUN_SECONDS) as stream:
            for _ in stream.iter_raw():
                pass
        return logged("streamed", prompt, database)

    return run


def drawn(page: Page, url: str, settings: CompareSettings, database: Path) -> Speed:
    """Tokens/s of a run that Chromium starts from the page and draws while it comes."""

    def run(prompt: str) -> float:
        _send(page, url, prompt, settings)
        lane = f".lane[data-mode={MODE}]"
        ends = ", ".join(f"{lane}[data-phase={phase}]" for phase in ("finished", "stopped", "failed"))
        with suppress(BrowserError):  # The log says why.
            page.wait_for_selector(ends, timeout=RUN_SECONDS * 1000)
        page.goto("about:blank")
        return logged("drawn", prompt, database)

    return run


def _send(page: Page, url: str, prompt: str, settings: CompareSettings) -> None:
    page.goto(url)
    page.wait_for_selector(".lane", timeout=RUN_SECONDS * 1000)
    for mode in ("AR", "SD"):
        page.get_by_role("checkbox", name=mode, exact=True).uncheck()
    page.get_by_label("Max new tokens").fill(str(settings.sampling.max_new_tokens))
    page.get_by_label("Max new tokens").blur()
    page.locator("#prompt textarea").fill(prompt)
    time.sleep(SETTLE_SECONDS)  # Loading the page is not part of a run.
    page.locator("#send").click()


@contextmanager
def application(database: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The real application on a free port, ready to answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "app.py", "--port", str(port), "--database", str(database)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
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
def suspended(*processes: psutil.Process) -> Iterator[None]:
    """Nothing of these processes and their children runs inside, and nothing of Chromium."""
    children = psutil.Process().children(recursive=True)
    tree = [one for process in processes for one in (process, *process.children(recursive=True))]
    tree += [process for process in children if "chrom" in process.name()]
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
        run_drawn = drawn(stack.enter_context(_open_browser(browser)), url, settings, database)
        for number, prompt in enumerate([prompts[0], *prompts]):  # The first round warms up.
            with suspended(process):
                round_speeds = [run_alone(prompt)]
            with suspended():
                round_speeds.append(run_streamed(prompt))
            round_speeds.append(run_drawn(prompt))
            if number:
                for name, speed in zip(speeds, round_speeds, strict=True):
                    speeds[name].append(speed)
    return speeds


@contextmanager
def _open_browser(path: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chromium.new_page(viewport={"width": 1400, "height": 950})
        chromium.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(prog="python tests/page_cost.py", description=__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts, at least 2 (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer (%(default)s)")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="Chromium, where it is not on the PATH")
    options = parser.parse_args(arguments)
    if not 2 <= options.prompts <= len(PROMPTS):
        parser.error(f"prompts is {options.prompts}: give a whole number from 2 to {len(PROMPTS)}.")
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
