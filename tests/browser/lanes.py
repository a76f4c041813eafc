"""What browser tests do with the page: send, wait for lanes, read them."""

from playwright.sync_api import Locator, Page, expect

SECONDS = 1000


def lane(page: Page, mode: str) -> Locator:
    return page.locator(f".lane[data-mode={mode}]")


def send(page: Page, prompt: str) -> None:
    page.locator("#prompt textarea").fill(prompt)
    page.locator("#send").click()


def wait_phase(page: Page, mode: str, phase: str, seconds: float = 30) -> None:
    page.wait_for_selector(f".lane[data-mode={mode}][data-phase={phase}]", timeout=seconds * SECONDS)


def wait_all(page: Page, phase: str = "finished", seconds: float = 60) -> None:
    for mode in ("ar", "sd", "ssd"):
        wait_phase(page, mode, phase, seconds)


def text_of(page: Page, mode: str) -> str:
    return lane(page, mode).locator(".lane-text").evaluate("element => element.textContent") or ""


def wait_text(page: Page, mode: str, text: str) -> None:
    expect(lane(page, mode).locator(".lane-text")).to_have_text(text, use_inner_text=False)


def figure(page: Page, mode: str, label: str) -> str:
    cell = lane(page, mode).locator("footer dl > div").filter(has=page.locator(f"dt:text-is('{label}')")).locator("dd")
    return cell.inner_text()


def set_limit(page: Page, tokens: int) -> None:
    page.get_by_label("Max new tokens").fill(str(tokens))
    page.get_by_label("Max new tokens").blur()
