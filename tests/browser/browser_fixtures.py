"""A real Chromium on a real page. Every test also checks that nothing left this machine and no error was logged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoEngine, Script
from pages import ServedPage, served_page
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

LOCAL = ("http://127.0.0.1:", "data:", "blob:", "about:")


@dataclass
class Watch:
    """What a page said and asked for."""

    complaints: list[str] = field(default_factory=list)

    def follow(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"console: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith(LOCAL):
            self.complaints.append(f"left this machine: {request.url}")


# Not for the whole session: while Playwright is open this thread counts as running an event loop, and later tests start
# their own.
@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        instance = playwright.chromium.launch(executable_path=chromium_path, args=arguments)
        yield instance
        instance.close()


@pytest.fixture
def watch() -> Iterator[Watch]:
    watcher = Watch()
    yield watcher
    assert watcher.complaints == []


@pytest.fixture
def open_page(browser: Browser, watch: Watch) -> Iterator[Callable[..., Page]]:
    """Opens a page at an address, watched, and waits until its lanes are drawn."""
    contexts = []

    def open_one(url: str, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": 1400, "height": 950}, **options)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        watch.follow(page)
        page.goto(url)
        page.wait_for_selector(".lane", timeout=30_000)
        return page

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture
def serve_echo(tmp_path: Path) -> Iterator[Callable[..., ServedPage]]:
    """Serves a page over a scripted engine; the arguments are the script's."""
    closers: list[Any] = []

    def serve(**script: Any) -> ServedPage:
        engine = EchoEngine(Script(**script))
        engine.start()
        closers.append(engine.close)
        manager = served_page(engine, tmp_path / "log" / "saguaro.db")
        served = manager.__enter__()
        closers.append(lambda: manager.__exit__(None, None, None))
        return served

    yield serve
    for close in reversed(closers):
        close()
