"""`python -m tests.browser.screenshot URL` writes docs/page.png, the README's screenshot of the controller's
status page at URL."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser import chromium
from tests.browser.conftest import FLAGS

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "page.png"
MAX_BYTES = 200_000


def main() -> None:
    """Write the screenshot.

    Raises:
        NoBrowserError: no browser can be installed.
        SystemExit: no URL is given, or the file is larger than MAX_BYTES.
    """
    if len(sys.argv) != 2:
        raise SystemExit("expected the address of a controller's page, as `roostream demo` prints it")
    url, binary = sys.argv[1], chromium.chromium()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(binary), env=chromium.environment(binary), args=list(FLAGS)
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 1010})
        tab.goto(url)
        while not tab.inner_text("#read").startswith("read "):
            tab.wait_for_timeout(50)
        tab.screenshot(path=str(PICTURE))
        browser.close()
    if PICTURE.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{PICTURE}: expected at most {MAX_BYTES} bytes, got {PICTURE.stat().st_size}")


if __name__ == "__main__":
    main()
