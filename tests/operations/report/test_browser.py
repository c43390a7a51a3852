"""The report in a real browser: every chart has marks, on a desk and on a phone, by day and by night."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from genesis.operations.report.write import write_report
from tests.operations.report.runs import row_of, write_log, write_run

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("report")]

CHROMIUM = Path(os.environ.get("GENESIS_CHROMIUM", "/usr/bin/chromium"))
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SIZES = {"desktop": (1280, 900), "phone": (390, 800)}
MIN_FONT_PIXELS = 8.5

COUNT_MARKS = """figure => [...figure.querySelectorAll('svg path, svg use')].filter(mark => {
    const box = mark.getBoundingClientRect();
    const inside = figure.getBoundingClientRect();
    return box.width + box.height > 3 && box.left >= inside.left - 1 && box.right <= inside.right + 1;
}).length"""
FONT_SIZES = """() => [...document.querySelectorAll('svg text')].map(text => {
    const scale = text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width;
    return parseFloat(getComputedStyle(text).fontSize) * scale;
}).filter(size => size > 0)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        reason = f"no browser at {CHROMIUM}: install chromium, or name one by GENESIS_CHROMIUM"
        pytest.fail(reason) if os.environ.get("GENESIS_REQUIRE_BROWSER") == "1" else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    first, second = (write_run(directory / name) for name in ("first", "a-second-run-with-a-rather-long-name"))
    write_log(second, [row_of(step) for step in range(1, 2001)])
    (first / "config.yaml").write_text("a: '<script>document.title = 1</script>'\n" + "b" * 500 + ": 1\n")
    write_report([first, second], directory / "out.html")
    return directory / "out.html"


def open_page(browser: Browser, report: Path, size: str, scheme: str) -> tuple[Page, list[str]]:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda sent: complaints.append(sent.url) if not sent.url.startswith("file:") else None)
    page.goto(report.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    return page, complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_every_chart_has_marks_and_nothing_leaves_the_page(
    browser: Browser, report: Path, size: str, scheme: str
) -> None:
    page, complaints = open_page(browser, report, size, scheme)
    figures = page.locator("figure").all()
    assert len(figures) >= 13
    assert {figure.get_attribute("id"): figure.evaluate(COUNT_MARKS) > 4 for figure in figures} == {
        figure.get_attribute("id"): True for figure in figures
    }
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert min(page.evaluate(FONT_SIZES)) >= MIN_FONT_PIXELS
    assert complaints == []
    assert page.title() == "2 runs"
    page.context.close()


def test_dark_and_light_differ_and_text_contrasts_with_its_ground(browser: Browser, report: Path) -> None:
    grounds, inks = [], []
    for scheme in ("light", "dark"):
        page, _ = open_page(browser, report, "phone", scheme)
        grounds.append(page.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor"))
        inks.append(page.evaluate("getComputedStyle(document.querySelector('#loss svg text')).fill"))
        page.context.close()
    assert grounds == ["rgb(255, 255, 255)", "rgb(26, 32, 40)"]
    assert inks[0] != inks[1]


def test_a_run_is_hidden_by_its_checkbox(browser: Browser, report: Path) -> None:
    page, _ = open_page(browser, report, "desktop", "light")
    curves = page.locator("#loss .run-1")
    assert curves.count() >= 1
    assert curves.first.is_visible()
    page.locator("#show-1").uncheck()
    assert not curves.first.is_visible()
    assert page.locator("#loss .run-0").first.is_visible()
    page.context.close()


def test_the_pointer_shows_values_and_a_drag_shows_a_part(browser: Browser, report: Path) -> None:
    page, complaints = open_page(browser, report, "desktop", "light")
    chart = page.locator("#loss svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box

    def go(share: float) -> None:
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.4 * box["height"])

    go(0.5)
    tip = page.locator("#loss .tip")
    assert tip.is_visible()
    assert tip.locator("b").inner_text().startswith("step: ")
    assert tip.locator("div").count() == 4  # training and held-out of two runs
    page.mouse.down()
    go(0.7)
    page.mouse.up()
    assert page.locator("#loss .zoom path.run-1").count() == 2
    assert not page.locator("#loss svg > g:not(.zoom, .over) .run-1").first.is_visible()
    numbers = [float(text.replace(",", "")) for text in page.locator("#loss .zoom text").all_text_contents()]
    assert max(numbers) < 2000  # a part of the 2,000 steps
    page.locator("#loss button").click()
    assert page.locator("#loss svg > g:not(.zoom, .over) .run-1").first.is_visible()
    page.locator("#show-1").uncheck()
    go(0.5)
    assert tip.locator("div").count() == 2
    page.locator("#loss svg").focus()
    before = tip.inner_text()
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text() != before
    assert complaints == []
    page.context.close()
