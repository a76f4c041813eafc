"""Start the playground: settings -> engine -> log -> page -> web server.

The page is up while the models load. This process imports no torch: the models live in the engine's own processes.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

# Read by the page framework when it is imported; without it every start would be reported to its makers.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import uvicorn

from saguaro_core.config import CpuWeights, EngineConfig, Placement
from saguaro_core.engine import Engine
from saguaro_core.errors import SaguaroError
from saguaro_core.status import EngineStatus
from storage import Recorder
from ui.comparisons import ComparisonService
from ui.page import create_ui
from ui.run_log import StoredRunLog
from ui.server import ServerSettings, build_app

logger = logging.getLogger("saguaro")
StatusListener = Callable[[EngineStatus], None]
EngineFactory = Callable[[EngineConfig, StatusListener], Any]
# The page shares the machine with the models; it yields to them.
NICENESS = 19
USAGE_ERROR, START_ERROR = 2, 1


class CannotListen(SaguaroError):
    """The address is taken, is not this machine's, or is not allowed to this user."""


def build_parser() -> argparse.ArgumentParser:
    """The command line; defaults are those of EngineConfig and ServerSettings."""
    engine, server = EngineConfig(), ServerSettings()
    parser = argparse.ArgumentParser(
        prog="app.py", description="One chat prompt through AR, SD and SSD decoding, side by side."
    )
    parser.add_argument("--target", default=engine.target, help="the large model: a catalogue name, hub id or folder")
    parser.add_argument("--draft", default=engine.draft, help="the small model that guesses")
    parser.add_argument("--placement", default="auto", help="auto, or target=DEVICE,draft=DEVICE (cpu:0, cuda:1, mps)")
    parser.add_argument(
        "--cpu-weights",
        default=engine.cpu_weights,
        help=f"their form on CPUs: {', '.join(get_args(CpuWeights))} (default: %(default)s)",
    )
    parser.add_argument("--max-length", type=int, help="limit of prompt + answer in tokens (default: the target's own)")
    parser.add_argument("--host", default=server.host, help="address to listen on; beyond this machine needs --auth")
    parser.add_argument("--port", type=int, default=server.port, help="port to listen on")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask for this user and password everywhere")
    parser.add_argument("--database", type=Path, help="the log's file (default: in the user's data folder)")
    return parser


def read_settings(options: argparse.Namespace) -> tuple[EngineConfig, ServerSettings]:
    """Validated settings from parsed options. Raises InvalidRequest."""
    config = EngineConfig(
        target=options.target,
        draft=options.draft,
        placement=Placement.parse(options.placement),
        max_length=options.max_length,
        cpu_weights=options.cpu_weights,
    )
    return config, ServerSettings(host=options.host, port=options.port, auth=read_auth(options.auth))


def read_auth(text: str | None) -> tuple[str, str] | None:
    """`user:password` as a pair, None for no authentication. Raises ValueError."""
    if text is None:
        return None
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise ValueError("auth: write USER:PASSWORD, both not empty.")
    return user, password


def listen(settings: ServerSettings) -> socket.socket:
    """A listening socket, taken before anything is loaded. Raises CannotListen."""
    try:
        return open_socket(settings)
    except OSError as error:
        where, reason = f"{settings.url_host}:{settings.port}", error.strerror or reason_of(error)
        raise CannotListen(
            f"Cannot listen on {where} ({reason}). Give another --port, or end the other program."
        ) from error


def open_socket(settings: ServerSettings) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def reason_of(error: OSError) -> str:
    """What an error says, or its name if it says nothing."""
    return str(error) or type(error).__name__


def start_engine(config: EngineConfig, on_status: StatusListener) -> Any:
    """The real engine, started."""
    engine = Engine(config, on_status=on_status)
    engine.start()
    return engine


class PageServer(uvicorn.Server):
    """Ends the engine before the connections: its runs end with it, and then the streams end by themselves."""

    def __init__(self, config: uvicorn.Config, close_engine: Callable[[], None]) -> None:
        super().__init__(config)
        self._close_engine = close_engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # On a thread: the streams must go on meanwhile to tell their readers of the end.
        await asyncio.to_thread(self._close_engine)
        await super().shutdown(sockets)


class Supervisor:
    """Ends the program when its models cannot be loaded; once they were, the page stays up to say what happened."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.web: uvicorn.Server | None = None
        self._was_ready = False

    def on_status(self, status: EngineStatus) -> None:
        """Report progress; called on the engine client's thread."""
        progress = f" ({status.progress:.0%})" if status.progress is not None and status.state == "loading" else ""
        level = logging.ERROR if status.state == "failed" else logging.INFO
        logger.log(level, "%s%s", status.message, progress)
        self._was_ready |= status.state == "ready"
        if status.info is not None:
            leave_cores(status.info.target.cores)
        if status.state == "failed" and not self._was_ready:
            self.failure = status.message
            if self.web is not None:
                self.web.should_exit = True


def serve(
    config: EngineConfig, settings: ServerSettings, database: Path | None, engine_factory: EngineFactory = start_engine
) -> int:
    """Run until interrupted. Returns the exit status; raises SaguaroError for what cannot start."""
    supervisor = Supervisor()
    with listen(settings) as listener, Recorder(database) as recorder:
        engine = engine_factory(config, supervisor.on_status)
        try:
            yield_to_engine()
            log = StoredRunLog(recorder)
            service = ComparisonService(engine, log)
            asyncio.run(_serve_page(service, log, settings, listener, supervisor, engine.close))
        finally:
            engine.close()
    return 0 if supervisor.failure is None else START_ERROR


def yield_to_engine() -> None:
    """Lower the priority of this thread and of those it starts from now on, but of no engine process.

    Linux counts threads one by one, so what the engine client's own thread starts keeps its priority.
    """
    if sys.platform == "linux":
        os.nice(NICENESS)


def leave_cores(taken: Sequence[int]) -> None:
    """Move this process's threads off the target's cores, if others are there: the draft waits now and then, it
    never does.

    Called on the engine client's thread, which stays where it is: an engine process that it starts again must find
    all cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    free = os.sched_getaffinity(0) - set(taken)
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread_id in filter(None, others) if free else ():
        with contextlib.suppress(ProcessLookupError):  # The thread may just have ended.
            os.sched_setaffinity(thread_id, free)


async def _serve_page(
    service: ComparisonService,
    log: StoredRunLog,
    settings: ServerSettings,
    listener: socket.socket,
    supervisor: Supervisor,
    close_engine: Callable[[], None],
) -> None:
    # Built inside the loop: outside of one, the framework makes loops of its own that nobody closes.
    app = build_app(create_ui(service, log), service, log, settings)
    # A reader that takes nothing any more must not keep the program from ending.
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, server_header=False)
    web = supervisor.web = PageServer(config, close_engine)
    port = listener.getsockname()[1]
    if supervisor.failure is None:
        logger.info("Open http://%s:%d in a browser. Ctrl-C ends everything.", settings.url_host, port)
        await web.serve(sockets=[listener])


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None, engine_factory: EngineFactory = start_engine) -> int:
    """The command. Problems that the user can mend are one line and an exit status, never a trace."""
    # A polite kill ends the engine's processes like Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options = build_parser().parse_args(arguments)
    try:
        config, settings = read_settings(options)
    except (SaguaroError, ValueError) as error:
        logger.error("%s", error)
        return USAGE_ERROR
    try:
        return serve(config, settings, options.database, engine_factory)
    except SaguaroError as error:
        logger.error("%s", error)
    except OSError as error:
        logger.error("The system refused something that the program needs: %s", reason_of(error))
    except KeyboardInterrupt:
        return 0
    return START_ERROR


if __name__ == "__main__":
    sys.exit(main())
