"""The main job in a real browser: send, watch three lanes, hover a token, stop, find it again, take it home."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from echo_engine import EchoEngine, Script
from lanes import figure, lane, send, set_limit, text_of, wait_all, wait_phase
from pages import ServedPage, served_page
from playwright.sync_api import Page, expect

from saguaro_core.config import EngineConfig
from saguaro_core.engine import Engine

pytestmark = pytest.mark.browser


@pytest.fixture(params=["scripted", pytest.param("real", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedPage]:
    """The page over the scripted engine, and over the real pair."""
    engine: EchoEngine | Engine
    if request.param == "real":
        request.getfixturevalue("default_target_dir")
        engine = Engine(EngineConfig())
    else:
        engine = EchoEngine(Script(rate=150.0))
    engine.start()
    try:
        engine.wait_ready(timeout=300)
        with served_page(engine, tmp_path / "log" / "saguaro.db") as page:
            yield page
    finally:
        engine.close()


def test_send_hover_stop_find_and_export(served: ServedPage, open_page: Callable[..., Page]) -> None:
    page = open_page(served.url)
    set_limit(page, 24)
    send(page, "Name three desert plants.")
    wait_all(page, seconds=120)
    assert text_of(page, "ar") == text_of(page, "sd") == text_of(page, "ssd") != ""
    expect(page.locator(".tile.same b")).to_have_text("yes")
    expect(page.locator(".tile").nth(1).locator("b")).to_contain_text("×")
    assert figure(page, "ar", "acceptance") == "n/a"
    assert figure(page, "ssd", "acceptance").endswith("%")
    assert figure(page, "ar", "tokens") == str(lane(page, "ar").locator(".tok, .held").count())
    check_hover(page)
    check_stop(page)
    check_history(page)


def check_hover(page: Page) -> None:
    token = lane(page, "sd").locator(".tok.draft, .tok.bonus").first
    token.hover()
    tip = page.locator("#token-tip")
    expect(tip).to_be_visible()
    for word in ("token", "origin", "time", "round", "place", "p target", "q draft"):
        expect(tip).to_contain_text(word)
    expect(tip.locator(".alternatives li").first).to_be_visible()
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()


def check_stop(page: Page) -> None:
    set_limit(page, 6000)
    send(page, "Count upwards from one and never stop.")
    wait_phase(page, "ar", "decode", 60)
    page.wait_for_function("document.querySelectorAll('.lane[data-mode=ar] .tok').length > 8", timeout=60_000)
    page.keyboard.press("Escape")
    wait_all(page, "stopped", 20)
    assert len(text_of(page, "ar")) > 0
    expect(page.locator(".tile").first.locator("b")).to_have_text("n/a")
    expect(page.locator("#send")).to_be_visible()


def check_history(page: Page) -> None:
    partial = text_of(page, "ar")
    page.get_by_role("tab", name="History").click()
    rows = page.locator(".history-list > li[data-id]")
    expect(rows).to_have_count(2)
    expect(rows.first.locator(".run-chip").first).to_contain_text("stopped")
    with page.expect_download() as download:
        rows.first.get_by_role("link", name="JSON", exact=True).click()
    exported = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert "Count upwards" in json.dumps(exported)
    page.get_by_label("Search").fill("three desert")
    expect(rows).to_have_count(1)
    page.get_by_label("Search").fill("")
    expect(rows).to_have_count(2)
    rows.first.locator(".history-open").click()
    expect(lane(page, "ar").locator(".phase")).to_contain_text("stopped")
    page.wait_for_function("document.querySelectorAll('.lane[data-mode=ar] .tok').length > 8")
    assert text_of(page, "ar") == partial


def test_an_opened_address_shows_its_comparison_again(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=200.0)
    page = open_page(served.url)
    set_limit(page, 30)
    send(page, "hello")
    wait_all(page)
    text, address = text_of(page, "ssd"), page.url
    assert "comparison=" in address
    again = open_page(address)
    wait_all(again)
    again.wait_for_function("document.querySelectorAll('.lane[data-mode=ssd] .tok').length === 30")
    assert text_of(again, "ssd") == text
    expect(again.locator(".stage-prompt")).to_have_text("hello")
    again.get_by_role("button", name="Use prompt and settings").click()
    expect(again.locator("#prompt textarea")).to_have_value("hello")
    expect(again.get_by_label("Max new tokens")).to_have_value("30")


def test_a_comparison_is_deleted_only_after_a_yes(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(rate=None).url)
    set_limit(page, 5)
    send(page, "hello")
    wait_all(page)
    page.get_by_role("tab", name="History").click()
    rows = page.locator(".history-list > li[data-id]")
    page.get_by_role("button", name="Delete hello").click()
    page.get_by_role("button", name="Keep").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Delete hello").click()
    page.get_by_role("button", name="Yes, delete").click()
    expect(rows).to_have_count(0)
    expect(page.locator(".history-empty")).to_be_visible()
