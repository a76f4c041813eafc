"""What stands between the network and the page: origin check, password, response headers. Plain ASGI.

They wrap the whole application, so that our own routes and every route of the page framework are covered alike.
"""

import base64
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# The page framework evaluates its own templates, hence 'unsafe-eval'; nothing may be fetched from elsewhere.
CONTENT_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; media-src 'self' data: blob:; worker-src 'self' blob:; "
    "connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)


class OriginGuard:
    """Refuses state-changing requests that another site's page makes in the user's browser (403)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not is_same_origin(Headers(scope=scope)):
            response = PlainTextResponse("This request comes from another site's page and is refused.", 403)
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)


def is_same_origin(headers: Headers) -> bool:
    """True for requests of our own page and of programs, which send no Origin."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    return bool(netloc := urlsplit(origin).netloc) and netloc == headers.get("host")


class PasswordGuard:
    """HTTP basic authentication for every route; off when `user` is None."""

    def __init__(self, app: ASGIApp, user: str, password: str) -> None:
        self.app = app
        self._expected = f"{user}:{password}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(Headers(scope=scope).get("authorization", "")):
            await self.app(scope, receive, send)
            return
        challenge = {"WWW-Authenticate": 'Basic realm="Saguaro playground", charset="UTF-8"'}
        response = Response("Give the user name and the password that the server was started with.", 401, challenge)
        await response(scope, receive, send)

    def _is_allowed(self, header: str) -> bool:
        scheme, _, payload = header.partition(" ")
        try:
            given = base64.b64decode(payload, validate=True)
        except ValueError:  # No base64, or not even ASCII.
            return False
        return scheme.lower() == "basic" and secrets.compare_digest(given, self._expected)


class ResponseHeaders:
    """Adds the headers that keep the page from loading or being loaded by anything else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", CONTENT_POLICY)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                headers.setdefault("Referrer-Policy", "no-referrer")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)
