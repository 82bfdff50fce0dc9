"""A real browser for tests: headless, silent, with a log of everything it requests."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
)


def programs() -> tuple[str, str]:
    """The browser and its driver; without them a skip that says why, and in CI a failure."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    wanted = f"{' or '.join(BROWSERS)}, and chromedriver"
    missing = f"needs {wanted}; on Debian: apt-get install chromium chromium-driver"
    if os.environ.get("CI") == "true":
        pytest.fail(f"the browser test {missing}. CI has to have them.")
    pytest.skip(missing)


@contextmanager
def started(profile: Path) -> Iterator[Any]:
    """A browser with a profile of its own, which is closed at the end."""
    from selenium import webdriver

    binary, driver = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield browser
    finally:
        browser.quit()


def wait_for(found: Callable[[], Any], what: str) -> Any:
    """The first truthy answer of `found` within twenty seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        answer = found()
        if answer:
            return answer
        time.sleep(0.05)
    return pytest.fail(f"{what} did not happen within twenty seconds")


def requests_of(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
