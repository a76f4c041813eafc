"""A whole application on a free port for tests: the real page, the real log in a temporary folder, any engine."""

import asyncio
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
        settings = ServerSettings(port=port, auth=auth)
        servers: list[uvicorn.Server] = []

        async def serve() -> None:
            # Built inside a running loop, the framework makes no loops of its own that nobody closes.
            app = build_app(create_ui(service, log), service, log, settings)
            config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)
            servers.append(uvicorn.Server(config))
            await servers[0].serve()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not (servers and servers[0].started) and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert servers, f"no page on port {port}"
        assert servers[0].started, f"no page on port {port}"
        try:
            yield ServedPage(f"http://127.0.0.1:{port}", service, log, engine)
        finally:
            servers[0].should_exit = True
            thread.join(timeout=10)
