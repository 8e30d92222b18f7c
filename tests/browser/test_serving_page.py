"""Serving's front page in a real browser, over a real serving with fake rows and fake online features."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roostream.wire.records import decode
from serving.access.bearer_keys import Keyring, new_key, write_keys
from serving.rank_json import JsonParser
from tests.browser import chromium
from tests.serving.live_serving import run_live_serving
from tests.serving.serving_cases import (
    BODY,
    NOW_MS,
    SCHEMA,
    InProcessServing,
    build_serving,
    serve_random_weights,
)
from tests.serving.serving_fakes import FakeHydrator, FakeRows

PHONE = {"width": 360, "height": 740}
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'


class OpenPage:
    """A tab with the page; records the console messages and the URLs that the page requests."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        )
        self.tab = self.context.new_page()
        self.console_messages: list[str] = []
        self.requested_urls: list[str] = []
        self.tab.on(
            "console", lambda message: self.console_messages.append(f"{message.type}: {message.text}")
        )
        self.tab.on("pageerror", lambda error: self.console_messages.append(str(error)))
        self.tab.on("request", lambda request: self.requested_urls.append(request.url))
        self.tab.goto(url)
        self.wait("document.getElementById('state-text').textContent !== 'Loading'")

    def wait(self, script: str) -> None:
        """Wait until `script` is true."""
        deadline_s = time.monotonic() + 30
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline_s, f"{script} did not become true; {self.console_messages}"
            self.tab.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector)

    def rank(self, body: Any) -> None:
        """Fill in a request by hand, send it and wait for the answer or the error."""
        self.tab.fill("#body", body if isinstance(body, str) else json.dumps(body))
        self.tab.click("#rank")
        self.wait("!document.getElementById('rank').hasAttribute('aria-disabled')")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Start a serving program and return a function that opens its page, `with_keys` if access needs a key.

    At the end, all tabs are closed. They must have logged nothing but refused requests and requested nothing
    from other servers.
    """
    tabs: list[OpenPage] = []

    def change(serving: InProcessServing, **parts: Any) -> InProcessServing:
        return InProcessServing(dataclasses.replace(serving.context, **parts), serving.waiting_for)

    settings: dict[str, Any] = {"status_page": "http://127.0.0.1:1/", "join_window_ms": 20_000}
    serving = build_serving(tmp_path, FakeRows(SCHEMA), hydrator := FakeHydrator(), **settings)
    serving.service.on_scored = serving.context.recent.add
    text, key = new_key("page", ["rank", "engage"], 0)
    write_keys(tmp_path / "keys.json", [key])

    def open_tab(with_keys: bool = False, **options: Any) -> OpenPage:
        if with_keys:
            app.context = change(serving, keys=Keyring(tmp_path / "keys.json")).context
        tabs.append(OpenPage(browser, live.url, **options))
        return tabs[-1]

    open_tab.key, open_tab.serving, open_tab.hydrator = text, serving, hydrator  # type: ignore[attr-defined]
    with run_live_serving(serving) as live:
        app = live.app
        yield open_tab
        for tab in tabs:
            tab.context.close()
    for tab in tabs:
        assert [s for s in tab.console_messages if "status of 4" not in s] == []
        assert all(url.startswith((tab.url, "data:")) for url in tab.requested_urls), tab.requested_urls


def test_the_serving_page_shows_what_is_served_and_links(open_page: Any) -> None:
    page = open_page()
    page.wait("document.querySelectorAll('#now dd').length > 5")
    assert page.text("h1") == "Ready" and page.tab.get_attribute("body", "data-tone") == "good"
    now = page.text("#now")
    assert "0-0" in now and "click, dwell" in now and "6 + 5" in now and "initial weights" in now
    links = page.tab.eval_on_selector_all(
        "#links a", "all => all.map(a => [a.textContent, a.getAttribute('href')])"
    )
    assert links == [
        ["API", "docs"],
        ["OpenAPI", "openapi.json"],
        ["Metrics", "metrics"],
        ["Trainer", "http://127.0.0.1:1/"],
    ]
    assert page.tab.eval_on_selector_all("[aria-live]", "all => all.map(e => e.id)") == ["state"]


def test_the_page_shows_what_serving_waits_for(open_page: Any) -> None:
    open_page.serving.waiting_for.append("rows of the shards")
    page = open_page()
    assert page.text("h1") == "Not ready" and "waiting for rows of the shards" in page.text("#state-more")
    assert page.tab.get_attribute("body", "data-tone") == "warning"


def test_the_example_request_is_ranked_and_each_score_is_explained(open_page: Any) -> None:
    serve_random_weights(open_page.serving)
    page = open_page()
    page.wait("document.getElementById('body').value !== ''")
    page.tab.click("#rank")
    page.wait("document.querySelectorAll('.candidate').length === 2")
    assert page.text("#said") == "ranked 2 candidates" and open_page.serving.records() == [], (
        "nothing is logged"
    )
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
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1], (
        "the most important feature comes first"
    )
    page.tab.click(".candidate:last-child summary")
    assert page.tab.is_visible(".candidate:last-child table")


def test_a_refusal_names_the_field(open_page: Any) -> None:
    page = open_page()
    page.rank({**BODY, "ro": {"hours": 1}})
    assert "did you mean 'hour'" in page.text("#refused") and "$.ro.hours" in page.text("#refused")
    page.rank("{")
    assert page.text("#refused") != "" and page.tab.get_attribute("#refused", "role") == "alert"
    page.tab.click("#again")
    assert json.loads(page.tab.input_value("#body"))["request_id"] == "r-1"
    page.rank(BODY)
    assert page.text("#refused") == ""


def test_the_page_asks_for_a_key_if_serving_requires_one(open_page: Any) -> None:
    page = open_page(with_keys=True)
    assert page.text("h1") == "Unknown" and page.tab.is_visible("#key")
    page.tab.fill("#key", open_page.key)
    page.tab.keyboard.press("Enter")
    page.wait("document.getElementById('state-text').textContent === 'Ready'")
    page.rank(BODY)
    assert "ranked 3 candidates" in page.text("#said")
    assert page.tab.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_everything_is_reachable_by_keyboard(open_page: Any) -> None:
    page = open_page()
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


def test_the_page_fits_the_width_of_a_phone(open_page: Any) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    page.rank(BODY)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    size = page.tab.eval_on_selector_all(
        "p, dd, td, th, textarea",
        "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))",
    )
    assert size >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(open_page: Any, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    page.rank(BODY)
    page.tab.fill("#body", "{")
    page.tab.click("#rank")
    page.wait("document.getElementById('refused').textContent !== ''")
    chromium.assert_accessible(page.tab, scheme)


def test_markup_in_names_is_shown_as_text(open_page: Any) -> None:
    page = open_page()
    page.rank({"candidates": [{"item_id": HOSTILE}, {"item_id": 2}]})
    page.wait("document.querySelectorAll('.candidate').length === 2")
    assert HOSTILE in page.text("#answer")
    page.rank({"candidates": [{"item_id": 2, HOSTILE[:40]: 1}]})
    assert "<img" in page.text("#refused")
    assert page.tab.evaluate("window.hurt === undefined && !document.querySelector('main img, main script')")


def test_the_page_reports_an_unreachable_server(open_page: Any) -> None:
    page = open_page()
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
    page.console_messages = [s for s in page.console_messages if "ERR_INTERNET_DISCONNECTED" not in s]


def open_live_list(open_page: Any, **options: Any) -> OpenPage:
    """Open the page with its live list: twelve items of four kinds that another client had ranked."""
    serve_random_weights(open_page.serving)
    candidates = [{"item_id": 100 + i, "nro": {"topics": [1 + i % 4], "age_h": i}} for i in range(12)]
    body = {"user_id": 9, "ro": {"user": [9]}, "candidates": candidates}
    open_page.serving.service.rank(JsonParser(SCHEMA).parse(json.dumps(body).encode()), NOW_MS)
    page = open_page(**options)
    page.wait("document.querySelectorAll('.story .score:not(:empty)').length === 12")
    return page


def item_order(page: OpenPage) -> list[str]:
    return page.tab.eval_on_selector_all(".story .name", "all => all.map(e => e.textContent)")


def order_changed_script(before: list[str]) -> str:
    """Return a script that tells whether the order of the items differs from `before`."""
    names = "[...document.querySelectorAll('.story .name')].map(e => e.textContent).join()"
    return f"{names} !== {json.dumps(','.join(before))}"


def logged_records(serving: InProcessServing) -> list[tuple[str, int, str]]:
    """Return (request id, user id, action or "") of each record that serving logged."""
    messages = [decode(record.value)[1] for record in serving.records()]
    return [(m.header.request_id, m.header.user_id, getattr(m, "action", "")) for m in messages]


def click_item(page: OpenPage, name: str) -> None:
    page.tab.click(f".story:has-text('{name}') .pick")
    page.wait("document.querySelectorAll('#stages li').length === 4")


def test_the_list_is_in_the_served_order_and_looking_at_it_logs_nothing(open_page: Any) -> None:
    page = open_live_list(open_page)
    assert open_page.serving.records() == []
    scores = [
        float(text)
        for text in page.tab.eval_on_selector_all(".score", "all => all.slice(0, 12).map(e => e.textContent)")
    ]
    assert (
        scores == sorted(scores, reverse=True) and len(set(scores)) > 1 and len(set(item_order(page))) == 12
    )
    assert page.text("#stages") == "Nothing is logged until you click."
    rows = page.text("#why-table tbody").split("\n")
    assert len(rows) > 5 and any("topics" in row for row in rows), rows
    page.tab.click(".story:last-child .why")
    assert item_order(page)[-1] in page.text("#why-title")


def test_a_click_is_logged_like_a_clients_and_updated_features_change_the_order(open_page: Any) -> None:
    page = open_live_list(open_page)
    page.tab.fill("#user", "17")
    page.tab.keyboard.press("Enter")
    before = item_order(page)
    click_item(page, name := before[7])
    ((request, user, _), (other, same, action)) = logged_records(open_page.serving)
    assert request == other and request.startswith("page-") and user == same == 17 and action == "click"
    page.wait("document.getElementById('verdict').textContent.includes('features')")
    assert "waiting" in page.text("#stages") and "closes in 20 s" in page.text("#stages")
    item = int(name.split()[1])
    open_page.hydrator.ro = {"history": {"item": [item], "action": [1], "time": [NOW_MS]}}
    page.wait("document.querySelectorAll('#stages .done').length === 2")
    assert "history" in page.text("#stages .done:nth-child(2)")
    page.wait(f"document.querySelectorAll('.moved:not(:empty)').length > 1 && {order_changed_script(before)}")
    assert re.search(r"features [+−]0\.\d{3}", page.text("#cards")) and "training" not in page.text("#cards")
    assert "training" in (verdict := page.text("#verdict")) and "not joined yet" in verdict
    page.tab.click(f".story:has-text('{name}') .why")
    history = next(row for row in page.text("#why-table tbody").split("\n") if row.startswith("history"))
    assert history.split("\t")[1:3] == ["missing", name], "values at the time of the click, and now"


def test_training_is_named_as_the_cause_and_a_trained_click_is_shown(open_page: Any) -> None:
    page = open_live_list(open_page)
    click_item(page, item_order(page)[3])
    serve_random_weights(open_page.serving, seed=2)
    page.wait("/training [+−]0/.test(document.getElementById('cards').textContent)")
    assert "features" not in page.text("#cards") and "not joined yet" in page.text("#verdict")
    open_page.serving.context.watermark.clock.advance(21.0)
    page.wait("document.querySelectorAll('#stages .done').length === 2")
    assert "perhaps yours" in page.text("#verdict")
    versions = open_page.serving.service.versions
    versions.install(versions.newest, NOW_MS + 22_000, NOW_MS + 20_500)
    page.wait("document.querySelectorAll('#stages .done').length === 3")
    assert "version 1-9" in page.text("#stages .done:last-child") and "of yours" in page.text("#verdict")
    assert "trained" in page.text("#live-said")


@pytest.mark.slow
def test_the_focus_stays_on_a_card_that_moves(open_page: Any) -> None:
    page = open_live_list(open_page)
    name = item_order(page)[-1]
    page.tab.focus(f".story:has-text('{name}') .pick")
    before = item_order(page)
    page.tab.keyboard.press("Enter")
    serve_random_weights(open_page.serving, seed=3)
    page.wait(order_changed_script(before))
    assert name in page.tab.evaluate("document.activeElement.textContent"), "the focus moved with its card"


@pytest.mark.slow
def test_a_paused_list_sends_no_requests(open_page: Any) -> None:
    page = open_live_list(open_page)
    page.tab.click("#pause")
    assert page.tab.get_attribute("#pause", "aria-pressed") == "true"
    page.tab.wait_for_timeout(300)
    num_asked = len([url for url in page.requested_urls if url.endswith("/v1/explain")])
    page.tab.wait_for_timeout(1500)
    assert len([url for url in page.requested_urls if url.endswith("/v1/explain")]) == num_asked


@pytest.mark.slow
def test_a_visitor_can_be_another_user_and_see_other_items(open_page: Any) -> None:
    page = open_live_list(open_page)
    first = page.tab.input_value("#user")
    page.tab.click("#guest")
    assert page.tab.input_value("#user") != first and page.tab.input_value("#user").startswith("guest-")
    page.tab.fill("#user", HOSTILE)
    page.tab.click("#visitor button:first-of-type")
    assert HOSTILE[:40] in page.text("#live-said")
    page.tab.click("#others")
    page.wait("document.querySelectorAll('.story .score:not(:empty)').length === 12")
    assert page.tab.evaluate("window.hurt === undefined && !document.querySelector('main img, main script')")


@pytest.mark.slow
def test_the_live_list_needs_a_key_if_serving_requires_one(open_page: Any) -> None:
    serve_random_weights(open_page.serving)
    open_page.serving.service.rank(JsonParser(SCHEMA).parse(json.dumps(BODY).encode()), NOW_MS)
    page = open_page(with_keys=True)
    assert not page.tab.is_visible("#shop")
    page.tab.fill("#key", open_page.key)
    page.tab.keyboard.press("Enter")
    page.wait("document.querySelectorAll('.story .score:not(:empty)').length === 3")
    click_item(page, item_order(page)[1])
    assert [action for *_, action in logged_records(open_page.serving)] == ["", "click"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"color_scheme": "light"}, {"color_scheme": "dark", "viewport": PHONE}])
def test_the_live_list_is_accessible(open_page: Any, options: dict[str, Any]) -> None:
    page = open_live_list(open_page, **options)
    click_item(page, item_order(page)[2])
    open_page.hydrator.ro = {"history": {"item": [100], "action": [1], "time": [NOW_MS]}}
    page.wait("document.querySelectorAll('#stages .done').length === 2")
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    chromium.assert_accessible(page.tab, options["color_scheme"])


@pytest.mark.parametrize("prefix", ["", "/behind/a-proxy"])
def test_the_documentation_pages_work_offline_and_send_an_example(
    browser: Any, tmp_path: Path, prefix: str
) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    with run_live_serving(serving) as live:
        context, url = browser.new_context(), live.url + prefix

        def forward(route: Any) -> None:
            path = route.request.url.removeprefix(live.url)
            if path.startswith(prefix):
                route.continue_(url=live.url + path.removeprefix(prefix))
            else:
                route.fulfill(status=404)

        if prefix:
            context.route(f"{live.url}/**", forward)
        tab, console_messages, requested_urls = context.new_page(), list[str](), list[str]()
        tab.on("console", lambda message: console_messages.append(message.text))
        tab.on("pageerror", lambda error: console_messages.append(str(error)))
        tab.on("request", lambda request: requested_urls.append(request.url))
        tab.goto(f"{url}/")
        tab.locator("#now dd").nth(5).wait_for()
        tab.click("#links a >> text=API")
        rank = "#operations-traffic-rank"
        tab.click(f"{rank} .opblock-summary-control")
        tab.click(f"{rank} .try-out__btn")
        tab.click(f"{rank} .execute")
        status = tab.inner_text(f"{rank} table.live-responses-table tr.response .response-col_status")
        assert status.startswith("200") and len(serving.records()) == 1
        tab.goto(f"{url}/redoc")
        tab.wait_for_selector("h1:has-text('Roostream serving')")
        context.close()
        assert [text for text in console_messages if "redoc/logo" not in text] == [], (
            "Redoc's logo is blocked"
        )
        loaded = [url_ for url_ in requested_urls if "redoc/logo" not in url_]
        assert all(url_.startswith((f"{url}/", "data:", "blob:")) for url_ in loaded), loaded
