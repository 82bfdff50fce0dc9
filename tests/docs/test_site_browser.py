"""The site in a real browser, opened from disk: links and search work, and nothing is requested from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browsing import requests_of, started, wait_for

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly built site; tutorials are not run for it."""
    folder = tmp_path_factory.mktemp("documentation")
    places = ["--pages", str(folder / "pages"), "--site", str(folder / "site")]
    command = [sys.executable, "-m", "tools.docs", "--no-run", *places]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(running: Any, site: Path) -> Any:
    """The browser at the first page, with empty logs."""
    running.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for log in ("browser", "performance"):
        running.get_log(log)
    running.get((site / "index.html").as_uri())
    return running


def outside(browser: Any, site: Path) -> list[str]:
    """Requests since the last look that leave the folder of the site."""
    inside = (f"{site.as_uri()}/", "data:", "about:", "blob:", "chrome:", "chrome-untrusted:")
    return [url for url in requests_of(browser) if not url.startswith(inside)]


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_every_link_of_the_navigation_opens_its_page(browser: Any, site: Path) -> None:
    script = "return [...document.querySelectorAll('nav a.md-nav__link, a.md-tabs__link')].map(a => a.href)"
    links = [link.partition("#")[0] for link in browser.execute_script(script)]
    browser.get((site / "reference.html").as_uri())
    links += [link.partition("#")[0] for link in browser.execute_script(script)]
    assert len(set(links)) > 20
    for link in dict.fromkeys(links):
        browser.get(link)
        assert browser.title.endswith("onlynorm"), link
        assert browser.find_elements("css selector", "h1"), link
    assert errors(browser) == []
    assert outside(browser, site) == []


def test_a_click_follows_a_link_within_the_text(browser: Any, site: Path) -> None:
    link = browser.find_element("css selector", "article a[href='diagnose.html']")
    browser.execute_script("arguments[0].click()", link)
    wait_for(lambda: browser.current_url == (site / "diagnose.html").as_uri(), "the page of the link")
    assert "plain SGD" in browser.find_element("css selector", "h1").text


def test_the_search_finds_a_page_and_opens_it(browser: Any, site: Path) -> None:
    box = browser.find_element("css selector", "input[name=query]")
    box.click()
    box.send_keys("Khatri-Rao")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    links = wait_for(lambda: browser.execute_script(found), "the result of the search")
    assert any("/solvers.html" in link for link in links)
    browser.get(links[0])
    assert browser.find_elements("css selector", "h1")
    assert errors(browser) == []
    assert outside(browser, site) == []


def test_no_page_or_style_or_script_names_another_server(site: Path) -> None:
    """A browser asks for what it needs; this finds what it would ask for on a day that it needs more."""
    loads = ('src="http', 'src="//', 'rel="stylesheet" href="http', "@import", "url(http", "unpkg.com", "googleapis")
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    named = {path.name: [word for word in loads if word in path.read_text(encoding="utf-8")] for path in pages}
    assert {name: words for name, words in named.items() if words} == {}


class Links(HTMLParser):
    """What a page links to or loads, and what can be linked to within it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "srcset", "poster", "xlink:href"):
                self.urls.append(value or "")
            elif name in ("id", "name"):
                self.anchors.add(value or "")


def test_every_link_and_source_of_every_page_is_a_file_and_an_anchor_of_the_site(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    dead, n_files = set(), 0
    for page, links in pages.items():
        for url in links.urls:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            n_files += 1
            target = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            known = pages[target].anchors if target in pages else {"", parts.fragment}
            if not target.is_file() or unquote(parts.fragment) not in known:
                dead.add((page.relative_to(site).as_posix(), url))
    assert n_files > 50 * len(pages)
    assert sorted(dead) == []


def test_formulas_are_drawn(browser: Any, site: Path) -> None:
    browser.get((site / "papers" / "giannou2023.html").as_uri())
    wanted = len(browser.find_elements("css selector", ".arithmatex"))
    assert wanted > 10
    drawn = "return document.querySelectorAll('mjx-container svg').length"
    wait_for(lambda: browser.execute_script(drawn) == wanted, "drawing of all formulas")
    assert browser.find_elements("css selector", "mjx-merror") == []
    assert errors(browser) == []
    assert outside(browser, site) == []


def test_no_page_is_wider_than_a_phone(browser: Any, site: Path) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    widths = {}
    for path in sorted(site.rglob("*.html")):
        browser.get(path.as_uri())
        widths[path.name] = browser.execute_script("return document.documentElement.scrollWidth")
    assert {name: width for name, width in widths.items() if width > 390} == {}
