"""Whatever a model writes is shown as the characters it wrote, and none of it takes effect."""

from collections.abc import Callable

import pytest
from lanes import lane, send, set_limit, text_of, wait_all
from pages import ServedPage
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

HOSTILE = [
    "<b>x</b> <think>y</think> <hello>",
    " if a<b && c>d\n",
    "</div></section>",
    "<style>*{display:none}</style>",
    "<script>window.pwned=1</script>",
    "<img src=x onerror='window.pwned=1'>",
    "${window.pwned=1}",
    "{{value}}",
    "`+(window.pwned=1)+`",
    "C:\\users\\new",
    "\n```python\nprint('open fence')\n",
    "$x_1$ \\(y\\)",
    "\t tab",
    "a  b   c",
    " שלום עולם",
    "\u202edesrever",
    "\n日本語 ☕ ",
    "👨\u200d👩\u200d👧",
    "&amp;&lt;",
    "",
    "",
    "é",
    "\u0001\ufffd",
    " end",
]


def test_hostile_text_is_shown_copied_and_reopened_as_it_is(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(pieces=HOSTILE, endless=False, rate=None)
    page = open_page(served.url)
    prompt = "<img src=x onerror='window.pwned=1'>${window.pwned=1} <b>bold</b>"
    send(page, prompt)
    wait_all(page)
    expected = "".join(HOSTILE)
    for mode in ("ar", "sd", "ssd"):
        page.wait_for_function(f"document.querySelectorAll('.lane[data-mode={mode}] .tok').length === {len(HOSTILE)}")
        assert text_of(page, mode) == expected
        assert lane(page, mode).locator(".lane-text *:not(span)").count() == 0
    lane(page, "sd").get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == expected
    check_tips(page)
    page.get_by_role("tab", name="History").click()
    expect(page.locator(".history-title").first).to_have_text(prompt)
    page.locator(".history-open").first.click()
    wait_all(page)
    expect(page.locator(".stage-prompt")).to_have_text(prompt)
    assert page.evaluate("window.pwned") is None


def check_tips(page: Page) -> None:
    """Hovering shows whitespace and markup as characters; tokens without text leave no mark."""
    for index, shown in ((12, "tab"), (4, "<script>")):
        lane(page, "ar").locator(f"[data-i='{index}']").dispatch_event("mouseover", {"bubbles": True})
        expect(page.locator("#token-tip .piece")).to_contain_text(shown)
    lane(page, "sd").locator("[data-i='21']").dispatch_event("mouseover", {"bubbles": True})
    expect(page.locator("#token-tip")).to_contain_text("2 earlier tokens")
    widths = lane(page, "sd").locator(".held").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
    assert widths == [0, 0]


def test_a_failing_lane_shows_its_error_as_text_and_the_others_finish(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(fail_at={"sd": 7}, rate=300.0, notice="<i>the draft was lost</i>").url)
    set_limit(page, 20)
    send(page, "hello")
    for mode, phase in (("ar", "finished"), ("sd", "failed"), ("ssd", "finished")):
        page.wait_for_selector(f".lane[data-mode={mode}][data-phase={phase}]")
    expect(lane(page, "sd").locator(".lane-note")).to_contain_text("told to fail at token 7")
    expect(lane(page, "ar").locator(".lane-note")).to_have_text("<i>the draft was lost</i>")
    assert len(text_of(page, "sd")) > 0
    tiles = page.locator(".tile b")
    assert [tiles.nth(i).inner_text() for i in (0, 2)] == ["n/a", "n/a"]
    assert "×" in tiles.nth(1).inner_text()
