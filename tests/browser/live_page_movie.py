"""`python -m tests.browser.live_page_movie [URL]` records docs/live-page.gif, the animation in the README.

It films serving's front page at URL. Without a URL it starts the demo and waits until MIN_TRAINED requests
are trained. A new visitor clicks three items of one kind, and the film ends when the last click is trained.
Every frame is a screenshot of the page; only the pointer is drawn. The wait for the training is shown SPEEDUP
times as fast.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, ImageDraw
from playwright.sync_api import sync_playwright

from infra.options import demo
from infra.stack import Stack
from tests.browser import chromium
from tests.browser.conftest import FLAGS
from tests.e2e.loop_stack import applied, wait_until

MOVIE = Path(__file__).resolve().parents[2] / "docs" / "live-page.gif"
MAX_BYTES = 2_000_000
MIN_TRAINED = 5000
CLICKS_S = 4.0  # recorded after each click
SPEEDUP = 6.0
ANIMATION_MS = 700  # duration of the page's animation
_STEP_MS = 70
_COLORS = 96
_PAUSE_ANIMATIONS = """(() => {
    const moves = document.getAnimations();
    moves.forEach(a => a.pause());
    if (moves.length) Object.defineProperty(document, "hidden", { value: true, configurable: true });
    return moves.length;
})()"""
MAX_TRAINING_S = 600.0


class Recorder:
    """Records screenshots of a tab. Each is shown for as long as it took until the next."""

    def __init__(self, tab: Any, clip: dict[str, float]) -> None:
        self.tab, self.clip, self.speed = tab, clip, 1.0
        self.frames: list[tuple[Image.Image, float]] = []  # image, seconds it is shown
        self.pointer = (clip["width"] * 0.8, clip["height"] * 0.9)

    def film(self, seconds: float, until: str = "false") -> bool:
        """Record for `seconds` of the page's time, or until the script `until` is true. Return whether it
        was."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            end_s += self._film_animations()
            begin_s = time.monotonic()
            frame = self._frame()
            if self.tab.evaluate(until):
                return True
            self.tab.wait_for_timeout(max(0.0, 90 * self.speed - 1000 * (time.monotonic() - begin_s)))
            self._add(frame, (time.monotonic() - begin_s) / self.speed)
        return False

    def _film_animations(self) -> float:
        """Record the page's running animations frame by frame. Return the seconds that this took.

        Screenshots are too slow for a smooth film, so the animations are paused at each frame, and the page
        sends no requests meanwhile. Times that the page measures are longer by these pauses.
        """
        begin_s = time.monotonic()
        if not self.tab.evaluate(_PAUSE_ANIMATIONS):
            return 0.0
        for ms in range(0, ANIMATION_MS, _STEP_MS):
            self.tab.evaluate(f"document.getAnimations().forEach(a => {{ a.currentTime = {ms}; }})")
            self._add(self._frame(), _STEP_MS / 1000)
        self.tab.evaluate("document.getAnimations().forEach(a => a.finish()); delete document.hidden")
        return time.monotonic() - begin_s

    def click(self, selector: str) -> None:
        """Move the drawn pointer to an element, show it there pressed for a moment, and click the element."""
        box = self.tab.locator(selector).bounding_box()
        x, y = box["x"] - self.clip["x"] + 60, box["y"] - self.clip["y"] + box["height"] / 2
        still, (from_x, from_y) = self._screenshot(), self.pointer
        for step in range(1, 7):
            self.pointer = (from_x + (x - from_x) * step / 6, from_y + (y - from_y) * step / 6)
            self._add(self._draw(still.copy()), 0.07)
        self._add(self._draw(still.copy(), pressed=True), 0.25)
        self.tab.click(selector)

    def save(self, path: Path) -> None:
        """Write the GIF with one palette for all frames, so that unchanged pixels take no space."""
        palette = self.frames[-1][0].quantize(_COLORS, dither=Image.Dither.NONE)
        images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame, _ in self.frames]
        times_ms = [max(round(seconds * 100), 2) * 10 for _, seconds in self.frames]
        times_ms[-1] = 4000
        images[0].save(
            path, save_all=True, append_images=images[1:], duration=times_ms, loop=0, optimize=True
        )

    def _screenshot(self) -> Image.Image:
        return Image.open(io.BytesIO(self.tab.screenshot(clip=self.clip))).convert("RGB")

    def _frame(self) -> Image.Image:
        return self._draw(self._screenshot())

    def _draw(self, image: Image.Image, pressed: bool = False) -> Image.Image:
        x, y = self.pointer
        draw = ImageDraw.Draw(image)
        if pressed:
            draw.ellipse((x - 14, y - 14, x + 14, y + 14), outline="#b3201a", width=3)
        arrow = [(0, 0), (0, 19), (5, 15), (8, 22), (11, 20), (8, 14), (14, 14)]
        draw.polygon([(x + dx, y + dy) for dx, dy in arrow], fill="#1b1f24", outline="#ffffff")
        return image

    def _add(self, frame: Image.Image, seconds: float) -> None:
        if self.frames and ImageChops.difference(self.frames[-1][0], frame).getbbox() is None:
            self.frames[-1] = (frame, self.frames[-1][1] + seconds)
        else:
            self.frames.append((frame, seconds))


def record(url: str) -> None:
    """Record the page at `url` and write the GIF.

    Raises:
        NoBrowserError: no browser can be installed.
        SystemExit: the file is larger than MAX_BYTES, or the clicks were not trained in time.
    """
    binary = chromium.chromium()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(binary), env=chromium.environment(binary), args=list(FLAGS)
        )
        tab = browser.new_page(viewport={"width": 1000, "height": 1400})
        tab.goto(url)
        tab.wait_for_selector(".story:nth-child(12) .cause", state="attached")
        tab.wait_for_selector("#stages li")
        names = tab.eval_on_selector_all(".story .name", "all => all.map(e => e.textContent)")
        clicked = items_of_lowest_kind(names)
        top = tab.locator("#live").bounding_box()["y"] - 12
        cards = tab.locator("#cards").bounding_box()
        clip = {"x": 0.0, "y": top, "width": 1000.0, "height": cards["y"] + cards["height"] + 12 - top}
        recorder = Recorder(tab, clip)
        recorder.film(2.0)
        for name in clicked:
            recorder.click(f".story:has-text('{name}') .pick")
            recorder.film(CLICKS_S)
        recorder.speed = SPEEDUP
        trained = recorder.film(90.0, "document.querySelectorAll('#stages .done').length === 4")
        recorder.speed = 1.0
        recorder.film(1.5)
        browser.close()
    if not trained:
        raise SystemExit("the last click was not trained within 90 s")
    recorder.save(MOVIE)
    if MOVIE.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{MOVIE}: expected at most {MAX_BYTES} bytes, got {MOVIE.stat().st_size}")


def items_of_lowest_kind(names: list[str]) -> list[str]:
    """Return the items of the kind with the lowest average rank, among the kinds with several items."""
    ranks_by_kind: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_by_kind.setdefault(name.split()[0], []).append(rank)
    ranks = max((p for p in ranks_by_kind.values() if len(p) > 1), key=lambda p: sum(p) / len(p))
    return [names[rank] for rank in ranks]


def main() -> None:
    if len(sys.argv) > 1:
        record(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as home, Stack(Path(home), demo()) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=180)
        wait_until("enough trained requests", lambda: applied(stack) >= MIN_TRAINED, MAX_TRAINING_S)
        record(stack.endpoints.serving + "/")


if __name__ == "__main__":
    main()
