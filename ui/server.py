"""The web application: guards around our own routes and the mounted page."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from saguaro_core.errors import InvalidRequest
from ui.comparisons import ComparisonService
from ui.guards import OriginGuard, PasswordGuard, ResponseHeaders
from ui.routes import build_routes
from ui.run_log import StoredRunLog
from ui.theme import HEAD, THEME

ASSETS = Path(__file__).parent / "assets"
# As a Host header has them.
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where the page is served and who may use it. Beyond this machine a password is required."""

    host: str = "127.0.0.1"
    port: int = 7860
    auth: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise InvalidRequest(f"port is {self.port}: give a whole number from 0 to 65535.")
        if not self.is_loopback and self.auth is None:
            raise InvalidRequest(
                f"host is {self.host!r}, which other machines can reach: give --auth user:password as well."
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url_host(self) -> str:
        """The host as an address in a browser has it: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def allowed_hosts(self) -> list[str]:
        """Names that a request may give. With a password any name will do: a rebound name carries no password."""
        return [*LOOPBACK_NAMES, self.url_host] if self.is_loopback else ["*"]


class RevalidatedFiles(StaticFiles):
    """Static files that the browser asks about every time, so that an upgraded page is never half old."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


def build_app(
    page: gr.Blocks,
    service: ComparisonService,
    log: StoredRunLog | None = None,
    settings: ServerSettings | None = None,
) -> FastAPI:
    """The application to serve. The log's folder is never handed out as files."""
    settings = settings or ServerSettings()
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=settings.allowed_hosts), Middleware(ResponseHeaders)]
    if settings.auth is not None:
        middleware.append(Middleware(PasswordGuard, *settings.auth))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=[*middleware, Middleware(OriginGuard)])
    app.include_router(build_routes(service, log))
    app.mount("/ui", RevalidatedFiles(directory=ASSETS))
    set_up_queue(page)
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        page,
        path="/",
        ssr_mode=False,
        # The framework's own history would keep a second copy of every answer in the browser.
        run_history=False,
        enable_monitoring=False,
        footer_links=["api", "settings"],
        max_file_size="1mb",
        blocked_paths=[str(log.recorder.path.parent)] if log else [],
        favicon_path=str(ASSETS / "icon.svg"),
        theme=THEME,
        head=HEAD,
    )
    return mounted


def set_up_queue(page: gr.Blocks) -> None:
    """No limit of the framework's own: runs wait in the engine's queue. Nor its eager polling, for the engine's sake.

    An idle queue looks for work every millisecond, which takes some per cent of a core from the models; on Windows the
    framework itself looks twenty times a second.
    """
    page.queue(max_size=None, default_concurrency_limit=None)
    queue = page._queue
    queue.sleep_when_free = queue.progress_update_sleep_when_free = 0.05
