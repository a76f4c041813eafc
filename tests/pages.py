"""A whole application on a free port for tests: the real page, the real log in a temporary folder, any engine."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import uvicorn

from storage import Recorder
from ui.comparisons import ComparisonService
from ui.page import create_ui
from ui.run_log import StoredRunLog
from ui.server import ServerSettings, build_app


@dataclass(frozen=True)
class ServedPage:
    """A running page and what stands behind it."""

    url: str
    service: ComparisonService
    log: StoredRunLog
    engine: Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served_page(engine: Any, database: Path, auth: tuple[str, str] | None = None) -> Iterator[ServedPage]:
    """Serve the page over a started engine until the block ends."""
    port = free_port()
    with Recorder(database) as recorder:
        log = StoredRunLog(recorder)
        service = ComparisonService(engine, log)
        app = build_app(create_ui(service, log), service, log, ServerSettings(port=port, auth=auth))
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started, f"no page on port {port}"
        try:
            yield ServedPage(f"http://127.0.0.1:{port}", service, log, engine)
        finally:
            server.should_exit = True
            thread.join(timeout=10)
