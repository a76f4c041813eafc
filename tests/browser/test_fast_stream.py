"""Three lanes of 4,000 tokens at 500 tokens a second: the page keeps up, and the engine is not slowed by it."""

import time
from collections.abc import Callable

import pytest
from lanes import figure, lane, send, set_limit, wait_all, wait_phase
from pages import ServedPage
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

NUM_TOKENS = 4000
RATE = 500.0


@pytest.mark.slow
def test_the_browser_is_done_soon_after_the_server(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=RATE, speed={"ar": 1.0, "sd": 2.0, "ssd": 4.0})
    page = open_page(served.url)
    set_limit(page, NUM_TOKENS)
    send(page, "hello")
    wait_phase(page, "ar", "decode")
    (comparison,) = served.service.active()
    while comparison.is_active:
        time.sleep(0.02)
    server_done = time.monotonic()
    wait_all(page, seconds=20)
    for mode in ("ar", "sd", "ssd"):
        expect(lane(page, mode).locator(f"[data-i='{NUM_TOKENS - 1}']")).to_be_attached()
    assert time.monotonic() - server_done < 2.0
    assert figure(page, "ar", "tokens") == str(NUM_TOKENS)
    # The speed shown is the engine's: its commits over its clock, whatever the page did.
    assert float(lane(page, "ar").locator(".speed b").inner_text()) == pytest.approx(RATE, rel=0.05)


def test_the_page_scrolls_along_only_while_it_is_at_the_end(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(rate=200.0).url)
    send(page, "hello")
    text = lane(page, "ar").locator(".lane-text")
    page.wait_for_function("document.querySelector('.lane-text').scrollTop > 40")
    text.evaluate("element => { element.scrollTop = 0; }")
    before = text.locator("span").count()
    page.wait_for_function(f"document.querySelectorAll('.lane[data-mode=ar] span').length > {before + 40}")
    assert text.evaluate("element => element.scrollTop") == 0
