"""`python -m tests.browser.screenshot`: docs/page.png, the picture of the controller's page in the README, made anew."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser import chromium
from tests.browser.conftest import FLAGS
from tests.browser.replayed_run import ReplayedRun

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "page.png"
MOST_BYTES = 200_000


def main() -> None:
    """Write the picture.

    Raises:
        NoBrowserError: there is no browser here.
        SystemExit: it is too large for a repository.
    """
    run, binary = ReplayedRun(step_s=16.0).to_the_end(), chromium.chromium()
    for _ in range(2):
        run.step()
    url = run.serve()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(binary), env=chromium.environment(binary), args=list(FLAGS))
        tab = browser.new_page(viewport={"width": 1280, "height": 1010})
        tab.goto(url)
        while not tab.inner_text("#read").startswith("read "):
            tab.wait_for_timeout(50)
        tab.screenshot(path=str(PICTURE))
        browser.close()
    if PICTURE.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{PICTURE}: expected at most {MOST_BYTES} bytes, got {PICTURE.stat().st_size}")


if __name__ == "__main__":
    main()
