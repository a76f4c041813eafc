"""Several tabs, refused sends, loading, the keyboard, and small or dark screens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lanes import lane, send, set_limit, text_of, wait_all, wait_phase
from pages import ServedPage
from playwright.sync_api import Browser, Page, expect

from storage import LogReader

pytestmark = pytest.mark.browser


def test_four_tabs_are_answered_one_after_another_without_mixing(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=150.0)
    pages = [open_page(served.url) for _ in range(4)]
    for number, page in enumerate(pages):
        set_limit(page, 20 + number)
        send(page, f"tab {number}")
    expect(pages[3].locator(".stage-state")).to_contain_text("ahead")
    for number, page in enumerate(pages):
        wait_all(page)
        expect(lane(page, "ssd").locator("span.tok, span.held")).to_have_count(20 + number)
        expect(page.locator(".stage-prompt")).to_have_text(f"tab {number}")


def test_a_waiting_tab_moves_up_when_the_one_before_it_ends(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=100.0)
    pages = [open_page(served.url) for _ in range(3)]
    for page in pages:
        send(page, "hello")
        wait_phase(page, "ssd", "queued")
    state = pages[2].locator(".stage-state")
    expect(state).to_have_text("queued: 2 comparisons ahead")
    pages[1].locator("#stop").click()
    expect(state).to_have_text("queued: 1 comparison ahead")
    for page in (pages[2], pages[0]):
        page.locator("#stop").click()
        wait_all(page, "stopped", 5)


def test_a_comparison_that_cannot_be_shown_says_whether_it_is_deleted_or_cannot_be_read(
    serve_echo: Callable[..., ServedPage], browser: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = serve_echo(rate=None)
    # Not watched: a browser reports every refusal as an error of its own.
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{served.url}/?comparison=nothing")
        expect(page.locator(".stage-caption [role=alert]")).to_contain_text("may have been deleted")
        monkeypatch.setattr(served.log, "reader", LogReader(tmp_path / "gone.db"))
        page.goto(f"{served.url}/?comparison=stored")
        alert = page.locator(".stage-caption [role=alert]")
        expect(alert).to_contain_text("gone.db could not be read")
        expect(alert).not_to_contain_text("deleted")


def test_a_send_while_an_answer_runs_is_refused_and_changes_nothing(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=60.0)
    page = open_page(served.url)
    set_limit(page, 60)
    page.locator("#prompt textarea").fill("first")
    page.locator("#send").dblclick()
    wait_phase(page, "ar", "decode")
    page.locator("#prompt textarea").fill("second")
    page.get_by_label("Max new tokens").fill("5")
    page.locator("#prompt textarea").press("Enter")
    expect(page.locator(".notice[role=alert]")).to_contain_text("still running")
    expect(page.locator("#prompt textarea")).to_have_value("second")
    wait_all(page)
    expect(lane(page, "ssd").locator("span.tok")).to_have_count(60)
    assert len(served.log.history("", None, None, None)["rows"]) == 1


def test_a_closed_tab_leaves_the_run_going_and_history_has_it(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=150.0)
    page = open_page(served.url)
    set_limit(page, 40)
    send(page, "left alone")
    wait_phase(page, "ar", "decode")
    (comparison,) = served.service.active()
    page.close()
    again = open_page(served.url)
    while comparison.is_active:
        again.wait_for_timeout(50)
    again.get_by_role("tab", name="History").click()
    expect(again.locator(".run-chip")).to_have_count(3)
    expect(again.locator(".run-chip[data-phase=finished]")).to_have_count(3)


def test_stopping_while_queued_ends_all_lanes(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=100.0)
    first, second = open_page(served.url), open_page(served.url)
    send(first, "first")
    wait_phase(first, "ar", "decode")
    send(second, "second")
    wait_phase(second, "ar", "queued")
    second.locator("#stop").click()
    wait_all(second, "stopped", 5)
    first.keyboard.press("Escape")
    wait_all(first, "stopped", 5)


def test_bad_settings_are_named_on_the_page_and_nothing_is_stored(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    served = serve_echo(rate=None)
    page = open_page(served.url)
    alert = page.locator("#panel-notice .notice[role=alert]")
    # The rarely used fields are made when they are first shown, and must then still be empty.
    page.get_by_text("More", exact=True).click()
    expect(page.get_by_label("Fix acceptance a")).to_have_value("")
    send(page, "   ")
    expect(alert).to_contain_text("The prompt is empty")
    page.get_by_label("Seed").fill("x1")
    send(page, "hello")
    expect(alert).to_contain_text("seed is 'x1': give a whole number from 0 to")
    page.get_by_label("Seed").fill("1")
    set_limit(page, -1)
    send(page, "hello")
    expect(alert).to_contain_text("max_new_tokens is -1")
    assert served.log.history("", None, None, None)["rows"] == []


def test_loading_is_shown_and_a_send_meanwhile_is_refused(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(load_seconds=6.0, rate=None).url)
    expect(page.locator(".pill")).to_contain_text("Reading the target's weights")
    send(page, "too early")
    expect(page.locator("#panel-notice .notice[role=alert]")).to_contain_text("still loading")
    expect(page.locator("#prompt textarea")).to_have_value("too early")
    expect(page.locator(".pill")).to_contain_text("Ready", timeout=20_000)
    page.locator("#send").click()
    wait_all(page)


def test_the_preset_reads_custom_once_a_value_is_changed_by_hand(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(rate=None).url)
    preset, temperature = page.locator("#preset input"), page.get_by_label("number input for Temperature")

    def choose(name: str) -> None:
        preset.click()
        page.get_by_role("option", name=name, exact=True).click()

    expect(preset).to_have_value("Greedy")
    for name in ("Rejection, C = 0.5", "Sampled, same tokens", "Rejection sampling"):
        choose(name)
        expect(temperature).to_have_value("0.8")
        page.wait_for_timeout(1000)  # What the preset sets itself must not rename it, however late that is heard.
        expect(preset).to_have_value(name)
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Seed").blur()
    page.wait_for_timeout(500)
    expect(preset).to_have_value("Rejection sampling")
    temperature.fill("0.9")
    temperature.blur()
    expect(preset).to_have_value("Custom")
    choose("Greedy")
    expect(temperature).to_have_value("0")
    page.get_by_role("radio", name="Rejection").check()
    expect(preset).to_have_value("Custom")
    page.get_by_role("radio", name="Shared noise").check()
    expect(preset).to_have_value("Greedy")


def test_a_missing_draft_is_said_and_ar_still_answers(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(draft_error="its tokens differ at id 7", rate=None).url)
    expect(page.locator("#panel-notice")).to_contain_text("its tokens differ at id 7")
    send(page, "hello")
    wait_phase(page, "ar", "finished")
    wait_phase(page, "ssd", "failed")
    assert text_of(page, "ssd") == ""
    expect(lane(page, "ssd").locator("dd").nth(3)).to_have_text("n/a")
    page.get_by_role("tab", name="Model").click()
    expect(page.locator(".model")).to_contain_text("the target's alone at work: SSD needs a draft")
    expect(page.locator(".model")).not_to_contain_text("2 at work")
    expect(page.locator(".card.bad")).to_contain_text("its tokens differ at id 7")


def test_the_keyboard_alone_sends_and_reads_tokens(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_echo(rate=None).url)
    set_limit(page, 12)
    page.locator("#prompt textarea").fill("hello")
    page.keyboard.press("Control+Enter")
    wait_all(page)
    lane(page, "ar").locator(".lane-text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-tip")).to_contain_text("at 1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lanes_stack_on_a_narrow_screen_and_nothing_overflows(
    serve_echo: Callable[..., ServedPage], open_page: Callable[..., Page], scheme: str
) -> None:
    page = open_page(serve_echo(rate=None).url, color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 800})
    toggle = page.locator("#settings-toggle")
    toggle.click()
    expect(page.get_by_label("Seed")).to_be_visible()
    toggle.click()
    send(page, "hello")
    wait_all(page)
    boxes = [lane(page, mode).bounding_box() for mode in ("ar", "sd", "ssd")]
    tops = [box["y"] for box in boxes if box]
    assert tops == sorted(tops)
    assert len(set(tops)) == 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
