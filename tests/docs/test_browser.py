"""The site in a real browser: it reads well on a desk and on a phone, by day and by night, and its search works."""

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("docs")]

CHROMIUM = Path(os.environ.get("GENESIS_CHROMIUM", "/usr/bin/chromium"))
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
TIMEOUT_MS = 90_000
SIZES = {"desktop": (1280, 900), "phone": (390, 800)}
PATHS = (
    "",
    "tutorials/your-own-text/",
    "how-to/resume/",
    "reference/metrics/",
    "reference/commands/fit/",
    "reference/genesis-callbacks/",
    "reference/api/genesis_callbacks/",
    "architecture/",
)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serves the built files on loopback."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(site))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        reason = f"no browser at {CHROMIUM}: install chromium, or name one by GENESIS_CHROMIUM"
        pytest.fail(reason) if os.environ.get("GENESIS_REQUIRE_BROWSER") == "1" else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Page]:
    """A page of one size and colour scheme. Requests that leave this machine, and errors of scripts, fail the test."""
    size, scheme = request.param
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda sent: complaints.append(sent.url) if not is_local(sent.url, address) else None)
    yield page
    context.close()
    assert complaints == []


def is_local(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))


def brightness(page: Page) -> float:
    """Returns how bright the background is, 0 to 255."""
    color = page.evaluate(
        """() => {
            const canvas = document.createElement("canvas").getContext("2d");
            canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
            canvas.fillRect(0, 0, 1, 1);
            return Array.from(canvas.getImageData(0, 0, 1, 1).data.slice(0, 3));
        }"""
    )
    return sum(color) / 3


def test_pages_fit_the_screen_and_follow_the_colour_scheme(page: Page, address: str) -> None:
    width = page.viewport_size["width"]
    for path in PATHS:
        page.goto(address + path)
        expect(page.locator("h1").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert (brightness(page) < 80) == is_dark, path
        broken = page.evaluate("Array.from(document.images).filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
        assert broken == []


def test_the_search_finds_how_to_resume(page: Page, address: str) -> None:
    page.goto(address)
    page.locator(".md-search__button:visible, label[for='__search']:visible").first.click()
    expect(page.get_by_placeholder("Search").last).to_be_focused()
    page.keyboard.type("resume", delay=20)
    page.locator("a[href*='how-to/resume/?h=resume']").first.click()
    expect(page.locator("h1").first).to_contain_text("Resume a run")
