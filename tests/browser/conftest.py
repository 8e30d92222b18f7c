"""One headless browser for all tests of a module. Where no browser can be installed, the tests are skipped.

The browser's driver runs an event loop in the tests' thread, so it ends before other modules run theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import chromium

FLAGS = ("--no-sandbox", "--headless=shell", "--disable-gpu", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a Playwright `Browser`."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives the browser, is not installed"
    )
    try:
        binary = chromium.chromium()
    except chromium.NoBrowserError as error:
        pytest.skip(f"no browser here: {error}")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(
                executable_path=str(binary),
                env=chromium.environment(binary),
                args=list(FLAGS),
                timeout=60_000,
            )
        except playwright.Error as error:
            pytest.skip(f"the browser cannot be started here: {str(error)[:200]}")
        yield browser
        browser.close()
