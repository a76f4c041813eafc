"""How much memory the whole product needs: starts the real application, runs one comparison in it, and looks on."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saguaro_core.bench_memory import MemoryFigures, PeakSampler, format_memory
from saguaro_core.bench_terminal import say
from saguaro_core.config import EngineConfig
from saguaro_core.errors import SaguaroError
from saguaro_core.prompts import WARM_UP

_APP = Path(__file__).resolve().parent.parent / "app.py"
_HOST = "127.0.0.1"
_MAX_NEW_TOKENS = 128
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 600.0
_END_SECONDS = 20.0
# The limit of the product with its default pair.
BUDGET_BYTES = 1_600_000_000


class AppFailedError(SaguaroError):
    """The application did not start or did not answer, so there is nothing to measure."""


def measure_app_memory(config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """The table and the JSON data of one comparison in the application. Raises AppFailedError."""
    with _running_app(config) as (process, url), PeakSampler(process.pid) as sampler:
        _await_ready(process, url, config.load_timeout)
        idle = sampler.figures()
        say("Running one comparison")
        _compare(url)
        memory = sampler.figures()
    return _format(idle, memory), _to_json(config, idle, memory)


@contextmanager
def _running_app(config: EngineConfig) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """The application on a free port, with a log of its own that is thrown away; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="saguaro-bench-") as folder:
        port = _free_port()
        arguments = ["--target", config.target, "--draft", config.draft, "--port", str(port), "--host", _HOST]
        placement = config.placement
        if (placement.target, placement.draft) != ("auto", "auto"):
            arguments += ["--placement", f"target={placement.target},draft={placement.draft}"]
        command = [sys.executable, str(_APP), *arguments, "--database", str(Path(folder) / "runs.db")]
        process = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"})
        try:
            yield process, f"http://{_HOST}:{port}"
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _await_ready(process: "subprocess.Popen[bytes]", url: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AppFailedError(f"the application ended with exit status {process.returncode}: its reason is above.")
        try:
            if json.loads(_get(f"{url}/api/status"))["state"] == "ready":
                return
        except urllib.error.URLError:
            pass  # It does not listen yet.
        time.sleep(_POLL_SECONDS)
    raise AppFailedError(f"the application was not ready after {timeout:g} s.")


def _compare(url: str) -> None:
    """One comparison of all modes through the public endpoint, to its end."""
    data = {"data": [WARM_UP.text, {"max_new_tokens": _MAX_NEW_TOKENS}]}
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{url}/gradio_api/call/compare", json.dumps(data).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310 - our own address
        event_id = json.load(answer)["event_id"]
    stream = _get(f"{url}/gradio_api/call/compare/{event_id}").decode()
    if "event: complete" not in stream:
        raise AppFailedError(f"the comparison did not end: {stream[-300:]}")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310 - our own address
        body: bytes = answer.read()
        return body


def _format(idle: MemoryFigures | None, memory: MemoryFigures | None) -> str:
    lines = ["the application, its engine and its draft, over loading and one comparison", *format_memory(memory)]
    if idle is not None and memory is not None:
        lines.append(f"memory: {idle.pss_bytes / 1e6:.0f} MB together once loaded, before the comparison (PSS)")
        held = memory.pss_bytes if memory.peak_pss_bytes is None else memory.peak_pss_bytes
        verdict = "yes" if held < BUDGET_BYTES else "no"
        lines.append(f"under {BUDGET_BYTES / 1e9:.1f} GB resident: {verdict} (PSS at the peak)")
    return "\n".join(lines) + "\n"


def _to_json(config: EngineConfig, idle: MemoryFigures | None, memory: MemoryFigures | None) -> dict[str, Any]:
    return {
        "target": config.target,
        "draft": config.draft,
        "app_memory": None if memory is None else memory.to_json(),
        "app_memory_once_loaded": None if idle is None else idle.to_json(),
        "budget_bytes": BUDGET_BYTES,
    }
