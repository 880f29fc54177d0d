"""report.html in a real browser: it draws, opens, moves, prints, and runs nothing that a model wrote.

The page under test is that of a real run of the model that ships with the package; where a test needs a page of another
kind, it is made of synthetic data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from equivtest.engines.base import EngineOptions
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.run import RunOptions, run
from equivtest.records import Word
from equivtest.report.html import write_html
from tests.report.browser import NoBrowser, find_chromium
from tests.report.make import report_data
from tests.report.make_tokens import HOSTILE_TEXTS

PHONE = {"viewport": {"width": 375, "height": 800}, "is_mobile": True, "has_touch": True}
LARGEST = 6_000_000
"""Bytes of the page of a gate run of three configs."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        try:
            path = find_chromium(playwright.chromium)
        except NoBrowser as missing:
            with warnings.catch_warnings():
                # Not the error that other warnings are, but in the summary of every run.
                warnings.simplefilter("always")
                warnings.warn(f"NO BROWSER: report.html was opened by none; {missing}", stacklevel=1)
            pytest.skip(f"no browser: {missing}")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a smoke run with the model `tiny`."""
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    run(
        RunOptions(
            budget="smoke", engine=EngineOptions(model="tiny", threads=1), analysis=AnalysisOptions(), run_dir=run_dir
        )
    )
    return run_dir / "report.html"


@pytest.fixture
def show(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page; at the end of the test it must have said and asked nothing."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path, **options: Any) -> Page:
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url == path.as_uri() or complaints.append(f"asks for {asked.url}"))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose tokens, prompts and names try to be markup."""
    data = report_data(Word.DIFFERENT, num_prompts=2, num_positions=6)
    name = "<script>window.harmed = true</script>"
    data = replace(data, title=name, headline=name, diagnosis=(name,), reasons=(name,))
    return write_html(data, tmp_path_factory.mktemp("hostile") / "report.html")


def width_of(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))


@contextmanager
def opened_cell(page: Page) -> Iterator[Page]:
    """With the cell's window open, and closed again."""
    page.wait_for_selector("dialog[open] .plot svg")
    yield page
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")


def test_every_chart_is_drawn_and_says_what_it_shows(report: Path, show: Callable[..., Page]) -> None:
    page = show(report)
    charts = page.locator("main svg")
    assert charts.count() == 14, "four forests, two PIT, three TV, three quantile figures, acceptance, power"
    for chart in charts.all():
        box = chart.bounding_box()
        assert box is not None
        assert box["width"] > 200
        assert box["height"] > 100
        assert chart.locator("path").count() > 5
        assert len(chart.get_attribute("aria-label") or "") > 40


def test_a_click_opens_the_two_histograms_of_a_cell(report: Path, show: Callable[..., Page]) -> None:
    page = show(report)
    page.locator("table.heat td[data-title]").nth(3).click()
    with opened_cell(page):
        assert page.locator("#cell-title").inner_text() == "off vs on: topp95, story, position 3"
        rows = page.locator("dialog tbody tr")
        bars = page.locator("dialog .plot svg g[aria-label=bar] rect")
        assert 1 < rows.count() <= 13
        assert bars.count() == 2 * rows.count()
        assert max(bar.bounding_box()["width"] for bar in bars.all()) > 50
        intervals = page.locator("dialog .plot svg g[aria-label=rule] line")
        assert intervals.count() == 2 * rows.count()
        counts = [int(text.split(" ")[0]) for text in page.locator("dialog td:nth-child(3)").all_inner_texts()]
        assert sum(counts) == 64, "every sample of arm off is in its histogram"
        page.get_by_role("button", name="Next position").click()
        assert page.locator("#cell-title").inner_text() == "off vs on: topp95, story, position 4"


def test_arrow_keys_move_and_enter_opens_and_the_focus_comes_back(report: Path, show: Callable[..., Page]) -> None:
    page = show(report)
    first = page.locator("table.heat td[data-title]").first
    assert page.locator("table.heat").first.locator("td[tabindex='0']").count() == 1, "one stop of the tab key a map"
    first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.ariaLabel").startswith("chat, position 1: p ")
    assert page.locator(".readout").inner_text().startswith("chat, position 1: p ")
    page.keyboard.press("Enter")
    with opened_cell(page):
        assert page.locator("#cell-title").inner_text() == "off vs on: topp95, chat, position 1"
    assert page.evaluate("document.activeElement.ariaLabel").startswith("chat, position 1: p ")


def test_a_cell_of_a_control_and_a_row_of_the_largest_open_too(report: Path, show: Callable[..., Page]) -> None:
    page = show(report)
    page.locator("table.heat[data-comparison=off_biased] td.r").first.click()
    with opened_cell(page):
        assert page.locator("#cell-title").inner_text().startswith("off vs biased: ")
        assert page.locator("dialog .numbers").inner_text().startswith("rejected; ")
    button = page.locator("button.opens").first
    place = button.locator("xpath=../..").locator("td")
    prompt, position = place.nth(1).inner_text(), place.nth(2).inner_text()
    button.click()
    with opened_cell(page):
        assert page.locator("#cell-title").inner_text() == f"off vs on: topp95, {prompt}, position {position}"


def test_hovering_a_cell_says_its_numbers_and_the_map_shows_tv_when_asked(
    report: Path, show: Callable[..., Page]
) -> None:
    page = show(report)
    cell = page.locator("table.heat td[data-title]").nth(5)
    cell.scroll_into_view_if_needed()
    place = cell.bounding_box()
    cell.hover()
    assert cell.bounding_box() == place, "what is said must not move what is pointed at"
    assert page.locator(".readout").inner_text() == cell.get_attribute("aria-label")
    p_value = cell.inner_text()
    page.locator("#layer-tv").check()
    assert cell.inner_text() != p_value
    assert page.locator(".of-tv").is_visible()
    assert not page.locator(".of-p").is_visible()


def test_the_sample_browser_tells_origins_apart_without_colour(report: Path, show: Callable[..., Page]) -> None:
    page = show(report)
    page.locator("#browser select[name=prompt]").select_option("chat")
    before = page.locator(".texts").inner_text()
    page.get_by_role("button", name="Next sample").click()
    assert page.locator("#browser output").inner_text() == "sample 2 of the first 12"
    assert page.locator(".texts").inner_text() != before
    assert page.locator(".texts h3").all_inner_texts() == ["off: plain decoding", "on: speculative decoding"]
    assert page.locator(".texts > div").nth(0).locator("mark:not(.o-p)").count() == 0
    speculative = page.locator(".texts > div").nth(1).locator("mark")
    assert speculative.count() == 16
    lines = page.evaluate(
        "[...document.querySelectorAll('#browser .key mark')].map(m => getComputedStyle(m).textDecoration)"
    )
    assert len(set(lines)) == 4


def test_text_of_the_model_is_text(hostile: Path, show: Callable[..., Page]) -> None:
    """Tokens, prompts and names that are scripts: none runs, and all of them can be read."""
    page = show(hostile)
    page.locator("table.heat td[data-title]").first.click()
    with opened_cell(page):
        said = page.locator("dialog").inner_text()
        for text in (*list(HOSTILE_TEXTS.values())[:5], "␣↵⇥", "⟨U+0000⟩⟨U+001B⟩⟨U+202E⟩⟨U+200B⟩", "#10"):
            assert text.replace(" ", "␣") in said.replace(" ", "␣")
        page.mouse.move(400, 400)
    page.locator("#browser summary").click()
    assert "<script>window.harmed" in page.locator("#browser .prompt").inner_text()
    for mark in page.locator(".texts mark").all():
        mark.hover()
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    assert page.locator("script:not([type])").count() == 5, "the two of others and three of ours"


def test_the_policy_of_the_page_stops_a_script_that_gets_into_it(
    tmp_path: Path, hostile: Path, chromium: Browser
) -> None:
    """The second wall: without the policy the same script runs."""
    planted = hostile.read_text("utf-8").replace("<main>", "<main><script>window.harmed = true</script>", 1)
    unguarded = planted.replace("Content-Security-Policy", "Nothing")
    page = chromium.new_page()
    for text, harmed in ((planted, None), (unguarded, True)):
        (tmp_path / "page.html").write_text(text, "utf-8")
        page.goto((tmp_path / "page.html").as_uri())
        assert page.evaluate("window.harmed") is harmed
    page.close()


@pytest.mark.parametrize("which", ["report", "hostile"])
def test_a_phone_shows_it_without_scrolling_sideways(
    which: str, request: pytest.FixtureRequest, show: Callable[..., Page]
) -> None:
    page = show(request.getfixturevalue(which), **PHONE)
    assert width_of(page) == 375
    page.locator("table.heat td[data-title]").first.tap()
    with opened_cell(page):
        assert width_of(page) == 375
        assert page.locator("dialog").bounding_box()["width"] <= 375
        assert page.locator("dialog .plot svg").bounding_box()["width"] <= 345


def test_dark_follows_the_system_and_the_button(report: Path, show: Callable[..., Page]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('main svg text')).fill"
    light, dark = show(report), show(report, color_scheme="dark")
    colours = {(page.evaluate(ground), page.evaluate(ink)) for page in (light, dark)}
    assert len(colours) == 2
    light.get_by_role("button", name="Dark").click()
    assert (light.evaluate(ground), light.evaluate(ink)) == (dark.evaluate(ground), dark.evaluate(ink))
    light.get_by_role("button", name="Light").click()
    assert light.evaluate(ground) != dark.evaluate(ground)


def test_on_paper_it_is_light_whole_and_without_controls(report: Path, show: Callable[..., Page]) -> None:
    page = show(report, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for hidden in ("nav", "#theme", ".layers", ".readout", ".skip"):
        assert not page.locator(hidden).is_visible()
    assert page.locator("h2#verdict").is_visible()
    assert page.locator("button.opens").first.is_visible(), "the position of a cell"
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == page.locator("details.stays").count() == 1
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 1
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_first_stop_of_the_tab_key_leads_to_the_verdict(report: Path, show: Callable[..., Page]) -> None:
    page = show(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    page.keyboard.press("Enter")
    assert page.url.endswith("#verdict")
    assert page.locator("main table").count() == page.locator("main table > caption").count() > 8
    assert page.locator("main thead th:not([scope]), main tbody th:not([scope])").count() == 0


def test_without_scripts_the_page_can_still_be_read(report: Path, show: Callable[..., Page]) -> None:
    page = show(report, java_script_enabled=False)
    assert page.locator("h2#verdict").is_visible()
    assert page.locator("main svg").count() == 14
    assert page.locator("table.heat td[title]").count() == 96
    assert not page.locator("#browser").is_visible()


def test_a_gate_run_of_three_configs_stays_under_its_size_and_its_maps_are_whole(
    tmp_path: Path, show: Callable[..., Page]
) -> None:
    path = write_html(report_data(configs=("topp95", "topk50", "topk20p90")), tmp_path / "report.html")
    assert path.stat().st_size < LARGEST
    page = show(path)
    assert page.locator("table.heat td[data-title]").count() == 3 * 3 * 256
