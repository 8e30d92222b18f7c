"""The controller's page in a real browser, fed by a real controller with the reports of a replayed run."""

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


class Opened:
    """A tab with the page, and what it did that nobody should see."""

    def __init__(self, browser: Any, run: ReplayedRun, prefix: str = "", **options: Any) -> None:
        """`prefix`: a path that a proxy before the controller removes."""
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
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(self.url)
        self.wait("document.getElementById('read').textContent.startsWith('read ')")

    def wait(self, script: str) -> None:
        """Until `script` is true; asked from outside, since the page's policy forbids to evaluate text
        inside."""
        deadline_s = time.monotonic() + 15
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline_s, f"{script} did not become true; {self.said}"
            self.tab.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector)

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="session")
def finished() -> ReplayedRun:
    """A run at its end; not to be moved on."""
    return ReplayedRun().to_the_end()


@pytest.fixture
def opened(browser: Any, finished: ReplayedRun) -> Iterator[Any]:
    """Open the page with these options of a browser's context; everything is closed, and must have been
    quiet."""
    tabs: list[Opened] = []

    def open_(run: ReplayedRun | None = None, **options: Any) -> Opened:
        tabs.append(Opened(browser, run or finished, **options))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.close()
        assert [s for s in tab.said if not s.startswith("debug")] == []
        assert all(url.startswith((tab.url, "data:")) for url in tab.asked), tab.asked


def test_the_page_shows_state_first_and_history_at_once(opened: Any) -> None:
    page = opened()
    assert page.text("h1") == "Caught up" and "behind by 0 ms" in page.text("#state-more")
    assert "No known problems." in page.text("#wrong")
    told = page.run.page.status()
    assert f"{told['reports']['worker 0']['metrics']['ne']:.4f}" in page.text("#now")
    curve = page.tab.get_attribute("figure:nth-child(2) path.c0", "d")
    assert curve.count("L") >= len(page.run.run) - 2, "every step of the run is in the line"
    assert re.search(
        r"Normalized entropy, last \d+ (s|min)\. NE: 0\.\d+ to 1?\.?\d+",
        page.tab.get_attribute("figure:nth-child(2) svg", "aria-label"),
    )
    assert page.text("#rows-body tbody tr:last-child").startswith("all") and "samples-3" in page.text(
        "#partitions-body"
    )


def test_the_page_works_behind_a_proxy_that_removes_a_path_prefix(opened: Any) -> None:
    page = opened(prefix="ops/loop/")
    assert page.text("h1") == "Caught up"
    assert page.tab.evaluate("document.querySelector('footer a').href") == f"{page.url}status.json"


def test_readers_and_buffers_are_shown(opened: Any) -> None:
    run = ReplayedRun().to_the_end()
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
    rows = [row.split("\t") for row in opened(run).text("#readers-body tbody").strip().split("\n")]
    assert rows[0][:3] == ["all", "2 connected, 3 wanted (1 to 4); 1 leases expired", "5 requested"]
    assert rows[1][:4] == [
        "buffer of worker 0",
        "25 % full; waited 1.5 s, 12.5 % of its time",
        "5 in flight",
        "4",
    ]
    assert [HOSTILE, "reads split 7 for worker 0", "1", "2"] in [row[:4] for row in rows[2:]]
    assert ["b:1/y", "has no lease"] in [row[:2] for row in rows[2:]]


def test_quality_is_shown_by_window_and_slice_beside_drifted_inputs(opened: Any) -> None:
    page = opened()
    told = page.run.page.status()["reports"]["worker 0"]["metrics"]
    windows = [row.split("\t") for row in page.text("#windows-body tbody").strip().split("\n")]
    assert [row[0] for row in windows] == ["click, the last hour", "click, the last hour, frozen at 1-2"]
    assert windows[0][2:] == [
        f"{told[name]:.{n}f}"
        for name, n in (("base_rate", 4), ("ne", 4), ("ne", 4), ("auc", 4), ("calibration", 3))
    ]
    slices = page.text("#slices-body tbody").strip().split("\n")
    assert [row.split("\t")[0] for row in slices] == ["surface: article", "surface: front"], (
        "the larger first"
    )
    inputs = [row.split("\t") for row in page.text("#drift-body tbody").strip().split("\n")]
    assert inputs[1] == ["feature 19", "0.475, moved", "50.0 %", "100.0 %", "0.020"] and len(inputs) == 14
    assert inputs[-1][:3] == ["new ids of user", "–", "3.1 %"]


def test_the_verdict_on_the_model_is_shown_with_each_baseline(opened: Any) -> None:
    page = opened()
    assert page.text("#verdict").startswith("The model is ahead in request AUC: +0.0200 [+0.0100, +0.0300]")
    rows = [row.split("\t") for row in page.text("#baselines-body tbody").strip().split("\n")]
    assert rows == [
        ["request AUC, by item alone", "8,000", "0.7100", "0.6900", "+0.0200", "+0.0100 to +0.0300"],
        ["request AUC, by linear alone", "8,000", "0.7100", "0.6800", "+0.0300", "+0.0200 to +0.0400"],
        ["NE, by item alone", "9,000", "0.9290", "0.9300", "−0.0010", "−0.0040 to +0.0020"],
    ]


def test_the_page_follows_changes_and_announces_only_the_state(opened: Any) -> None:
    run = ReplayedRun()
    for _ in range(6):
        run.step()
    page = opened(run)
    assert page.text("h1") == "Catching up" and "caught up in about" in page.text("#state-more")
    assert page.tab.eval_on_selector_all("[aria-live]", "all => all.map(e => e.id)") == ["state"]
    points = page.tab.get_attribute("figure:nth-child(2) path.c0", "d").count("L")
    page.tab.focus("#partitions-body .table")
    run.to_the_end()
    run.silent = frozenset({"serving"})
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


def test_an_idle_stream_is_shown_also_on_a_phone(opened: Any) -> None:
    run = ReplayedRun().to_the_end()
    run.hold_idle("nothing to read for 60 s")
    run.step()
    run.gone, run.silent = frozenset({("worker", 0)}), frozenset({"worker"})
    run.step()
    page = opened(run, viewport=PHONE)
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
        "nothing is wider than the phone"
    )


def test_history_is_shown_as_far_as_it_is_committed(opened: Any) -> None:
    run = ReplayedRun(history=[WorkUnit("samples/0", 0, 40), WorkUnit("samples/1", 0, 10)])
    for _ in range(6):
        run.step(watch=run.watch(20, "initial"))
    page = opened(run)
    assert page.text("h1") == "Training history"
    assert "11 of 50 historical samples committed (22 %), epoch 1 of 1" in page.text("#state-more"), (
        "5 and 6 offsets"
    )


def test_a_page_without_its_controller_shows_the_age_of_its_values(opened: Any) -> None:
    page = opened()
    page.context.set_offline(True)
    page.wait("!document.getElementById('old').hidden")
    assert re.search(r"has not answered since \d\d:\d\d:\d\d. ", page.text("#old"))
    assert page.text("h1") == "Unknown" and page.tab.get_attribute("body", "data-tone") == "unknown"
    page.context.set_offline(False)
    page.wait(
        "document.getElementById('old').hidden && document.getElementById('state-text').textContent === "
        "'Caught up'"
    )
    page.said = [s for s in page.said if "ERR_INTERNET_DISCONNECTED" not in s]


def test_everything_is_reachable_by_keyboard(opened: Any) -> None:
    page = opened()
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
    assert outline == "solid", "where the focus is can be seen"
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


def test_a_phone_scrolls_in_one_direction(opened: Any) -> None:
    page = opened(viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (
        page.tab.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < PHONE["height"] / 2
    )
    size = page.tab.eval_on_selector_all(
        "p, dd, td, th", "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert size >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_in_the_way_of_anyone(opened: Any, scheme: str) -> None:
    run = ReplayedRun()
    run.silent = frozenset({"joiner"})
    for _ in range(6):
        run.step(leaving=True)
    page = opened(run, color_scheme=scheme)
    page.tab.click("figure:first-child summary")
    chromium.assert_accessible(page.tab, scheme)


def test_the_layout_does_not_shift(opened: Any) -> None:
    page = opened(ReplayedRun().to_the_end())
    script = """() => new Promise(done => { let sum = 0;
        new PerformanceObserver(list => { for (const e of list.getEntries()) sum += e.value; })
            .observe({type: 'layout-shift'});
        setTimeout(() => done(sum), 2500); })"""
    page.run.step()
    assert page.tab.evaluate(script) < 0.02


def test_hostile_names_are_text_and_nothing_else(opened: Any) -> None:
    run = ReplayedRun()
    for _ in range(4):
        run.step()
    row = {"topic": HOSTILE, "partition": 0, "state": HOSTILE, "reason": HOSTILE}
    run.step(broken=HOSTILE, watch={"state": HOSTILE, "reason": HOSTILE, "partitions": [row]})
    page = opened(run)
    assert HOSTILE in page.text("#partitions-body") and HOSTILE in page.text("#changes-body")
    assert page.tab.evaluate("window.hurt === undefined && !document.querySelector('main img, main script')")
