"""The report in a real browser, opened from disk: it draws, filters, and asks for nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import programs, requests_of, started, wait_for
from toy_records import HOSTILE, make_record

from onlynorm.display import Curve
from onlynorm.evidence.records import RecordVerdict, write_record
from onlynorm.evidence.registry import Finding, Verdict, statements
from onlynorm.evidence.report.page import write_report

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report on disk: an ordinary record, a hostile one, every statement, three findings."""
    folder = tmp_path_factory.mktemp("report")
    hostile = make_record(
        artifact="toy:fig-2",
        title=HOSTILE,
        claim=HOSTILE,
        verdict=RecordVerdict.NOT_REPRODUCED,
        curves=(Curve(HOSTILE, [0, 1], [1, 2], panel=HOSTILE),),
        panels=(),
    )
    for record in (make_record(), hostile):
        write_record(folder / "records" / record.artifact.replace(":", "/") / "record.json", record)
    keys = [statement.key for statement in statements()[:3]]
    verdicts = (Verdict.HOLDS, Verdict.FAILS, Verdict.HOLDS)
    findings = [
        Finding(key, verdict, "seen by a zebra", {"x": 1.0}, 0.1) for key, verdict in zip(keys, verdicts, strict=True)
    ]
    return write_report(folder / "records", folder / "report.html", findings=findings).as_uri()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(running: Any, page: str) -> Any:
    """The browser with the page freshly opened, and nothing left of the test before."""
    running.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    running.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for log in ("browser", "performance"):
        running.get_log(log)
    running.get(page)
    return running


def shown_statements(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('.statement')].filter(s => s.offsetParent).map(s => s.id)"
    return list(browser.execute_script(script))


def test_the_page_draws_every_curve_without_error_and_asks_for_nothing(browser: Any, page: str) -> None:
    figures = browser.find_elements("css selector", ".figure svg:not(.narrow)")
    assert [len(figure.find_elements("css selector", "title")) for figure in figures] == [11, 2]
    assert all(figure.rect["width"] > 300 and figure.rect["height"] > 100 for figure in figures)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    asked = requests_of(browser)
    after = asked[asked.index(page) + 1 :]  # the browser opens its own empty tab first
    assert [url for url in after if not url.startswith("data:")] == []


def test_hostile_text_is_shown_and_does_not_run(browser: Any) -> None:
    assert browser.title == "onlynorm: reproduction report"
    heading = browser.find_element("css selector", "#toy-fig-2-quick h3")
    assert heading.text == HOSTILE
    assert browser.find_elements("css selector", "img") == []


def test_a_script_that_gets_in_cannot_run_or_call_home(browser: Any) -> None:
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'document.title = \"owned\"';"
        "document.body.append(s);"
    )
    assert browser.title != "owned"
    answer = browser.execute_async_script(
        "const done = arguments[0];fetch('https://example.invalid/').then(() => done('sent'), () => done('blocked'))"
    )
    assert answer == "blocked"
    blocked = [entry["message"] for entry in browser.get_log("browser")]
    assert any("Content Security Policy" in message for message in blocked)


def test_the_pointer_reaches_the_points_of_a_curve(browser: Any) -> None:
    point = browser.find_element("css selector", ".figure svg use:has(title)")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", point)
    script = (
        "const box = arguments[0].getBoundingClientRect();"
        "const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);"
        "return hit.querySelector('title')?.textContent"
    )
    assert browser.execute_script(script, point) == "law: 0.5, 1"  # drawn over the histogram


def test_statements_are_filtered_by_words_and_by_verdict(browser: Any) -> None:
    everything = shown_statements(browser)
    assert len(everything) == len(statements())
    box = browser.find_element("css selector", "#filter-text")
    box.send_keys("ZEBRA")
    wait_for(lambda: len(shown_statements(browser)) == 3, "the filter by words")
    assert browser.find_element("css selector", "#filter-count").text == f"3 of {len(everything)} shown"

    def press(verdict: str) -> None:
        button = browser.find_element("css selector", f'button[data-verdict="{verdict}"]')
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"

    press(Verdict.FAILS.value)
    assert shown_statements(browser) == everything[1:2]
    press("")
    assert shown_statements(browser) == everything[:3]
    box.clear()
    box.send_keys("no such words anywhere")
    wait_for(lambda: shown_statements(browser) == [], "the empty answer")
    visible = "return [...document.querySelectorAll('.statements')].filter(s => s.offsetParent).length"
    assert browser.execute_script(visible) == 0


def test_the_page_follows_the_dark_theme_plots_included(browser: Any) -> None:
    text = browser.find_element("css selector", ".figure svg text")

    def colours() -> list[str]:
        style = "getComputedStyle(document.body).backgroundColor, getComputedStyle(arguments[0]).fill"
        return list(browser.execute_script(f"return [{style}]", text))

    def emulate(theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    emulate("light")
    light = wait_for(lambda: [c for c in [colours()] if c[1] == "rgb(31, 35, 40)"], "the light theme")[0]
    emulate("dark")
    wait_for(lambda: colours()[1] == "rgb(230, 228, 223)", "the dark theme")
    assert colours()[0] != light[0]


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_sticks_out_at_any_width(browser: Any, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    sizes = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"

    def fits() -> bool:
        inner, outer = browser.execute_script(sizes)
        return inner <= outer <= width

    wait_for(fits, f"a layout of at most {width} pixels")  # plots are laid out again after the window has changed
    words = "return [...document.querySelectorAll('td:first-child a, h3, .name')].map(e => e.offsetWidth)"
    # A column squeezed to single letters fits any width and can be read at none.
    assert min(filter(None, browser.execute_script(words))) > 40


def test_without_a_browser_it_skips_at_home_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI has to have them"):
        programs()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        programs()
