"""Serving's front page in a real browser, over a live serving of which only the outside is faked."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.access.bearer_keys import Keyring, new_key, write_keys
from tests.browser import chromium

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # what its tests share

from live_serving import serving_live
from serving_cases import BODY, SCHEMA, Built, build, learn
from serving_fakes import FakeRows

PHONE = {"width": 360, "height": 740}
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'


class Shown:
    """A tab with the page, and what it did that nobody should see."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        )
        self.tab = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(url)
        self.wait("document.getElementById('state-text').textContent !== 'Loading'")

    def wait(self, script: str) -> None:
        """Until `script` is true."""
        deadline_s = time.monotonic() + 30
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline_s, f"{script} did not become true; {self.said}"
            self.tab.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector)

    def rank(self, body: Any) -> None:
        """By hand, and wait for what comes of it."""
        self.tab.fill("#body", body if isinstance(body, str) else json.dumps(body))
        self.tab.click("#rank")
        self.wait("!document.getElementById('rank').hasAttribute('aria-disabled')")


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open the page over a serving with these parts; everything is closed, and must have been quiet."""
    tabs: list[Shown] = []

    def change(built: Built, **parts: Any) -> Built:
        return Built(dataclasses.replace(built.context, **parts), built.waiting_for)

    built = build(tmp_path, FakeRows(SCHEMA), status_page="http://127.0.0.1:1/")
    text, key = new_key("page", ["rank"], 0)
    write_keys(tmp_path / "keys.json", [key])
    keyed: list[str] = []

    def open_(with_keys: bool = False, **options: Any) -> Shown:
        if with_keys:
            keyed.append(text)
            app.context = change(built, keys=Keyring(tmp_path / "keys.json")).context
        tabs.append(Shown(browser, live.url, **options))
        return tabs[-1]

    open_.key, open_.built = text, built  # type: ignore[attr-defined]
    with serving_live(built) as live:
        app = live.app
        yield open_
        for tab in tabs:
            tab.context.close()
    for tab in tabs:
        refused = [s for s in tab.said if "status of 4" not in s]
        assert refused == []
        assert all(url.startswith((tab.url, "data:")) for url in tab.asked), tab.asked


def test_the_serving_page_shows_what_is_served_and_links(shown: Any) -> None:
    page = shown()
    page.wait("document.querySelectorAll('#now dd').length > 5")
    assert page.text("h1") == "Ready" and page.tab.get_attribute("body", "data-tone") == "good"
    now = page.text("#now")
    assert "0-0" in now and "click, dwell" in now and "6 + 5" in now and "initial weights" in now
    links = page.tab.eval_on_selector_all(
        "#links a", "all => all.map(a => [a.textContent, a.getAttribute('href')])"
    )
    assert links == [
        ["API", "/docs"],
        ["OpenAPI", "/openapi.json"],
        ["Metrics", "/metrics"],
        ["Trainer", "http://127.0.0.1:1/"],
    ]
    assert page.tab.eval_on_selector_all("[aria-live]", "all => all.map(e => e.id)") == ["state"]


def test_missing_parts_are_shown_first(shown: Any) -> None:
    shown.built.waiting_for.append("rows of the shards")
    page = shown()
    assert page.text("h1") == "Not ready" and "waiting for rows of the shards" in page.text("#state-more")
    assert page.tab.get_attribute("body", "data-tone") == "warning"


def test_the_example_is_there_to_be_ranked_and_each_score_is_explained(shown: Any) -> None:
    learn(shown.built)
    page = shown()
    page.wait("document.getElementById('body').value !== ''")
    page.tab.click("#rank")
    page.wait("document.querySelectorAll('.candidate').length === 2")
    assert page.text("#said") == "ranked 2 candidates" and shown.built.records() == [], "nothing is logged"
    page.rank(BODY)
    page.wait("document.querySelectorAll('.candidate').length === 3")
    first = page.text(".candidate:first-child")
    assert re.search(r"1\.\s+\S+\s+click 0\.\d{4}\s+dwell 0\.\d{4}", first), first
    rows = [row.split("\t") for row in page.text(".candidate:first-child tbody").strip().split("\n")]
    by_name = {row[0].strip(): row[1:] for row in rows}
    assert by_name["history (request)"][:2] == ["8, 3", "2 of 2"] and by_name["mood (request)"][:2] == [
        "0.5",
        "–",
    ]
    sizes = [abs(float(row[3].replace("−", "-").replace("+", ""))) for row in rows if row[3] != "–"]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1], "what matters most comes first"
    page.tab.click(".candidate:last-child summary")
    assert page.tab.is_visible(".candidate:last-child table")


def test_a_refusal_names_the_field(shown: Any) -> None:
    page = shown()
    page.rank({**BODY, "ro": {"hours": 1}})
    assert "did you mean 'hour'" in page.text("#refused") and "$.ro.hours" in page.text("#refused")
    page.rank("{")
    assert page.text("#refused") != "" and page.tab.get_attribute("#refused", "role") == "alert"
    page.tab.click("#again")
    assert json.loads(page.tab.input_value("#body"))["request_id"] == "r-1"
    page.rank(BODY)
    assert page.text("#refused") == ""


def test_the_page_asks_for_a_key_if_serving_requires_one(shown: Any) -> None:
    page = shown(with_keys=True)
    assert page.text("h1") == "Unknown" and page.tab.is_visible("#key")
    page.tab.fill("#key", shown.key)
    page.tab.keyboard.press("Enter")
    page.wait("document.getElementById('state-text').textContent === 'Ready'")
    page.rank(BODY)
    assert "ranked 3 candidates" in page.text("#said")
    assert page.tab.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_everything_is_reachable_by_keyboard(shown: Any) -> None:
    page = shown()
    page.wait(
        "document.querySelectorAll('#links a').length === 4 && document.getElementById('body').value !== ''"
    )
    press, seen = page.tab.keyboard.press, []
    for _ in range(8):
        press("Tab")
        seen.append(
            page.tab.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
        )
    assert seen == [
        "Skip to the content",
        "API",
        "OpenAPI",
        "Metrics",
        "Trainer",
        "body",
        "rank",
        "again",
    ]
    page.tab.focus("#rank")
    press("Enter")
    page.wait("document.querySelectorAll('.candidate').length === 2")
    assert page.tab.evaluate("document.activeElement.id") == "rank", "the focus stays where it was"
    page.tab.focus(".candidate:last-child summary")
    press("Enter")
    assert page.tab.is_visible(".candidate:last-child table")
    page.tab.focus(".skip")
    press("Enter")
    assert page.tab.evaluate("document.activeElement.id") == "main"


def test_a_phone_scrolls_in_one_direction(shown: Any) -> None:
    page = shown(viewport=PHONE, has_touch=True, is_mobile=True)
    page.rank(BODY)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    size = page.tab.eval_on_selector_all(
        "p, dd, td, th, textarea",
        "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))",
    )
    assert size >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_in_the_way_of_anyone(shown: Any, scheme: str) -> None:
    page = shown(color_scheme=scheme)
    page.rank(BODY)
    page.tab.fill("#body", "{")
    page.tab.click("#rank")
    page.wait("document.getElementById('refused').textContent !== ''")
    dark = page.tab.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(n => n < 60)"
    )
    assert dark == (scheme == "dark")
    page.tab.evaluate(chromium.axe())
    wanted = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}"
    found = page.tab.evaluate(f"axe.run(document, {wanted})")
    assert [f"{v['id']}: {[n['html'][:120] for n in v['nodes']]}" for v in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_hostile_names_are_text_and_nothing_else(shown: Any) -> None:
    page = shown()
    page.rank({"candidates": [{"item_id": HOSTILE}, {"item_id": 2}]})
    page.wait("document.querySelectorAll('.candidate').length === 2")
    assert HOSTILE in page.text("#answer")
    page.rank({"candidates": [{"item_id": 2, HOSTILE[:40]: 1}]})
    assert "<img" in page.text("#refused")
    assert page.tab.evaluate("window.hurt === undefined && !document.querySelector('main img, main script')")


def test_the_page_reports_an_unreachable_server(shown: Any) -> None:
    page = shown()
    page.wait("document.getElementById('read').textContent !== ''")
    page.context.set_offline(True)
    page.tab.evaluate("document.getElementById('who').requestSubmit()")
    page.wait("document.getElementById('state-text').textContent === 'Unknown'")
    assert "the data shown is old (updated " in page.text("#state-more")
    page.rank(BODY)
    assert "does not answer" in page.text("#refused")
    page.context.set_offline(False)
    page.tab.evaluate("document.getElementById('who').requestSubmit()")
    page.wait("document.getElementById('state-text').textContent === 'Ready'")
    page.said = [s for s in page.said if "ERR_INTERNET_DISCONNECTED" not in s]
