"""The controller's status page in a real browser, served by a real controller with a recorded run's data."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roostream.runtime.work_unit import WorkUnit
from tests.browser import chromium
from tests.browser.replayed_run import ReplayedRun

HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'
PHONE = {"width": 360, "height": 740}


class OpenPage:
    """A tab with the page; records the console messages and the URLs that the page requests."""

    def __init__(self, browser: Any, run: ReplayedRun, prefix: str = "", **options: Any) -> None:
        """`prefix` is a path prefix that a proxy in front of the controller removes."""
        self.run, origin = run, run.serve()
        self.url = origin + prefix
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        )
        if prefix:
            self.context.route(
                f"{self.url}**",
                lambda route: route.fulfill(
                    response=route.fetch(url=route.request.url.replace(prefix, "", 1))
                ),
            )
        self.tab = self.context.new_page()
        self.console_messages: list[str] = []
        self.requested_urls: list[str] = []
        self.tab.on(
            "console", lambda message: self.console_messages.append(f"{message.type}: {message.text}")
        )
        self.tab.on("pageerror", lambda error: self.console_messages.append(str(error)))
        self.tab.on("request", lambda request: self.requested_urls.append(request.url))
        self.tab.goto(self.url)
        self.wait("document.getElementById('read').textContent.startsWith('read ')")

    def wait(self, script: str) -> None:
        """Wait until `script` is true. Polls from outside, because the page's content security policy forbids
        Playwright's `wait_for_function`."""
        deadline_s = time.monotonic() + 15
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline_s, f"{script} did not become true; {self.console_messages}"
            self.tab.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector)

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="session")
def finished_run() -> ReplayedRun:
    """A run at its end. Tests share it and must not step it."""
    return ReplayedRun().run_to_end()


@pytest.fixture
def open_page(browser: Any, finished_run: ReplayedRun) -> Iterator[Any]:
    """Return a function that opens the page with options of a browser context.

    At the end, all tabs are closed. They must have logged nothing and requested nothing from other servers.
    """
    tabs: list[OpenPage] = []

    def open_tab(run: ReplayedRun | None = None, **options: Any) -> OpenPage:
        tabs.append(OpenPage(browser, run or finished_run, **options))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.close()
        assert [s for s in tab.console_messages if not s.startswith("debug")] == []
        assert all(url.startswith((tab.url, "data:")) for url in tab.requested_urls), tab.requested_urls


def test_the_page_shows_state_first_and_history_at_once(open_page: Any) -> None:
    page = open_page()
    assert page.text("h1") == "Caught up" and "behind by 0 ms" in page.text("#state-more")
    assert "No known problems." in page.text("#wrong")
    status = page.run.page.status()
    assert f"{status['reports']['worker 0']['metrics']['ne']:.4f}" in page.text("#now")
    curve = page.tab.get_attribute("figure:nth-child(2) path.c0", "d")
    assert curve.count("L") >= len(page.run.run) - 2, "every step of the run is in the line"
    assert re.search(
        r"Normalized entropy, last \d+ (s|min)\. NE: 0\.\d+ to 1?\.?\d+",
        page.tab.get_attribute("figure:nth-child(2) svg", "aria-label"),
    )
    assert page.text("#rows-body tbody tr:last-child").startswith("all") and "samples-3" in page.text(
        "#partitions-body"
    )


def test_the_page_works_behind_a_proxy_that_removes_a_path_prefix(open_page: Any) -> None:
    page = open_page(prefix="ops/loop/")
    assert page.text("h1") == "Caught up"
    assert page.tab.evaluate("document.querySelector('footer a').href") == f"{page.url}status.json"


def test_readers_and_buffers_are_shown(open_page: Any) -> None:
    run = ReplayedRun().run_to_end()
    lease = {"split": 7, "worker": 0, "position": 0, "reader": HOSTILE, "for_s": 1.0}
    run.controller.readers = lambda: {
        **{
            "wanted": 3,
            "least": 1,
            "most": 4,
            "there": 2,
            "splits_wanted": 5,
            "splits_leased": 9,
            "leases_expired": 1,
        },
        "buffers": {
            "0": {"fullness": 0.25, "in_flight": 5, "stalled_s": 1.5, "stall_share": 0.125, "pieces": 4}
        },
        "readers": {
            HOSTILE: {"held_splits": 1, "held_pieces": 2, "sent_bytes": 2048, "silent_s": 0.2},
            "b:1/y": {"silent_s": 1.0},
        },
        "leases": [lease],
    }
    rows = [row.split("\t") for row in open_page(run).text("#readers-body tbody").strip().split("\n")]
    assert rows[0][:3] == ["all", "2 connected, 3 wanted (1 to 4); 1 leases expired", "5 requested"]
    assert rows[1][:4] == [
        "buffer of worker 0",
        "25 % full; waited 1.5 s, 12.5 % of its time",
        "5 in flight",
        "4",
    ]
    assert [HOSTILE, "reads split 7 for worker 0", "1", "2"] in [row[:4] for row in rows[2:]]
    assert ["b:1/y", "has no lease"] in [row[:2] for row in rows[2:]]


def test_quality_is_shown_by_window_and_slice_beside_drifted_inputs(open_page: Any) -> None:
    page = open_page()
    metrics = page.run.page.status()["reports"]["worker 0"]["metrics"]
    windows = [row.split("\t") for row in page.text("#windows-body tbody").strip().split("\n")]
    assert [row[0] for row in windows] == ["click, the last hour", "click, the last hour, frozen at 1-2"]
    assert windows[0][2:] == [
        f"{metrics[name]:.{n}f}"
        for name, n in (("base_rate", 4), ("ne", 4), ("ne", 4), ("auc", 4), ("calibration", 3))
    ]
    slices = page.text("#slices-body tbody").strip().split("\n")
    assert [row.split("\t")[0] for row in slices] == ["surface: article", "surface: front"], (
        "the larger slice comes first"
    )
    inputs = [row.split("\t") for row in page.text("#drift-body tbody").strip().split("\n")]
    assert inputs[1] == ["feature 19", "0.475, moved", "50.0 %", "100.0 %", "0.020"] and len(inputs) == 14
    assert inputs[-1][:3] == ["new ids of user", "–", "3.1 %"]


def test_the_verdict_on_the_model_is_shown_with_each_baseline(open_page: Any) -> None:
    page = open_page()
    assert page.text("#verdict").startswith("The model is ahead in request AUC: +0.0200 [+0.0100, +0.0300]")
    rows = [row.split("\t") for row in page.text("#baselines-body tbody").strip().split("\n")]
    assert rows == [
        ["request AUC, by item alone", "8,000", "0.7100", "0.6900", "+0.0200", "+0.0100 to +0.0300"],
        ["request AUC, by linear alone", "8,000", "0.7100", "0.6800", "+0.0300", "+0.0200 to +0.0400"],
        ["NE, by item alone", "9,000", "0.9290", "0.9300", "−0.0010", "−0.0040 to +0.0020"],
    ]


def test_the_page_follows_changes_and_announces_only_the_state(open_page: Any) -> None:
    run = ReplayedRun()
    for _ in range(6):
        run.step()
    page = open_page(run)
    assert page.text("h1") == "Catching up" and "caught up in about" in page.text("#state-more")
    assert page.tab.eval_on_selector_all("[aria-live]", "all => all.map(e => e.id)") == ["state"]
    points = page.tab.get_attribute("figure:nth-child(2) path.c0", "d").count("L")
    page.tab.focus("#partitions-body .table")
    run.run_to_end()
    run.silent_programs = frozenset({"serving"})
    run.step()
    page.wait("document.getElementById('state-text').textContent === 'Caught up'")
    page.wait("document.getElementById('wrong').textContent.includes('serving does not answer')")
    page.wait(
        "document.querySelector('figure:nth-child(2) path.c0').getAttribute('d').split('L').length > "
        f"{points + 2}"
    )
    assert (
        page.tab.evaluate("document.activeElement.getAttribute('aria-label')")
        == "Partitions of the training input"
    )
    assert "Unknown" in page.text("#wrong") and "caught up, was catching up" in page.text("#changes-body")


def test_a_hold_for_an_idle_stream_is_shown_on_a_phone(open_page: Any) -> None:
    run = ReplayedRun().run_to_end()
    run.hold_idle("nothing to read for 60 s")
    run.step()
    run.gone_members, run.silent_programs = frozenset({("worker", 0)}), frozenset({"worker"})
    run.step()
    page = open_page(run, viewport=PHONE)
    assert (
        page.text("h1") == "On hold: nothing to read"
        and page.tab.get_attribute("body", "data-tone") == "good"
    )
    assert "nothing to read for 60 s" in page.text("#state-more") and "No known problems." in page.text(
        "#wrong"
    )
    commits = page.text("#commits-body")
    assert "transient: nothing to read for 60 s" in commits and re.search(
        r"training .*; relative to training: temporary \d+\.\d\d, ", commits
    )
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "no element is wider than the screen"
    )


def test_progress_of_historical_training_is_shown(open_page: Any) -> None:
    run = ReplayedRun(history=[WorkUnit("samples/0", 0, 40), WorkUnit("samples/1", 0, 10)])
    for _ in range(6):
        run.step(watch=run.watch(20, "initial"))
    page = open_page(run)
    assert page.text("h1") == "Training history"
    assert "11 of 50 historical samples committed (22 %), epoch 1 of 1" in page.text("#state-more"), (
        "5 offsets of one partition and 6 of the other"
    )


def test_a_page_without_its_controller_shows_the_age_of_its_values(open_page: Any) -> None:
    page = open_page()
    page.context.set_offline(True)
    page.wait("!document.getElementById('old').hidden")
    assert re.search(r"has not answered since \d\d:\d\d:\d\d. ", page.text("#old"))
    assert page.text("h1") == "Unknown" and page.tab.get_attribute("body", "data-tone") == "unknown"
    page.context.set_offline(False)
    page.wait(
        "document.getElementById('old').hidden && document.getElementById('state-text').textContent === "
        "'Caught up'"
    )
    page.console_messages = [s for s in page.console_messages if "ERR_INTERNET_DISCONNECTED" not in s]


def test_everything_is_reachable_by_keyboard(open_page: Any) -> None:
    page = open_page()
    press = page.tab.keyboard.press
    seen = []
    for _ in range(12):
        press("Tab")
        seen.append(
            page.tab.evaluate("document.activeElement.textContent.trim() || document.activeElement.name")
        )
    assert (
        seen[:4] == ["Skip to the content", "Trends", "Quality", "Freshness"]
        and seen[9] == "span"
        and "Numbers" in seen[10]
    )
    outline = page.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focused element has a visible outline"
    page.tab.focus("#span input")
    press("ArrowRight")
    press("ArrowRight")
    assert "6 h" in page.tab.get_attribute("figure svg", "aria-label").replace("360 min", "6 h")
    page.tab.focus("figure summary")
    press("Enter")
    rows = page.tab.inner_text("figure:first-child tbody").split("\n")
    assert len(rows) > 2 and all(re.fullmatch(r"[\d: -]+\t\d.*(s|min)", row) for row in rows), rows
    page.tab.focus(".skip")
    press("Enter")
    assert page.tab.evaluate("document.activeElement.id") == "main"


def test_the_page_fits_the_width_of_a_phone(open_page: Any) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (
        page.tab.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < PHONE["height"] / 2
    )
    size = page.tab.eval_on_selector_all(
        "p, dd, td, th", "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert size >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(open_page: Any, scheme: str) -> None:
    run = ReplayedRun()
    run.silent_programs = frozenset({"joiner"})
    for _ in range(6):
        run.step(leaving=True)
    page = open_page(run, color_scheme=scheme)
    page.tab.click("figure:first-child summary")
    chromium.assert_accessible(page.tab, scheme)


def test_the_layout_does_not_shift(open_page: Any) -> None:
    page = open_page(ReplayedRun().run_to_end())
    script = """() => new Promise(done => { let sum = 0;
        new PerformanceObserver(list => { for (const e of list.getEntries()) sum += e.value; })
            .observe({type: 'layout-shift'});
        setTimeout(() => done(sum), 2500); })"""
    page.run.step()
    assert page.tab.evaluate(script) < 0.02


def test_markup_in_names_is_shown_as_text(open_page: Any) -> None:
    run = ReplayedRun()
    for _ in range(4):
        run.step()
    row = {"topic": HOSTILE, "partition": 0, "state": HOSTILE, "reason": HOSTILE}
    run.step(broken=HOSTILE, watch={"state": HOSTILE, "reason": HOSTILE, "partitions": [row]})
    page = open_page(run)
    assert HOSTILE in page.text("#partitions-body") and HOSTILE in page.text("#changes-body")
    assert page.tab.evaluate("window.hurt === undefined && !document.querySelector('main img, main script')")
