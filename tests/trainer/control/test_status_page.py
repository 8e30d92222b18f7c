"""The JSON documents and static files of the controller's status page, and their delivery over HTTP."""

from __future__ import annotations

import http.client
import json
import math
from typing import Any
from urllib.parse import urlsplit

import pytest

from roostream.runtime.scrape import ScrapedMetrics
from tests.browser.replayed_run import MEMBERS, ReplayedRun
from trainer.control.status_page import ChangeLog, History, Resolution, plain, static_files

HOSTILE = '<img src=x onerror="alert(1)"></script>"&\u202e'


@pytest.fixture
def run() -> ReplayedRun:
    replayed = ReplayedRun()
    for _ in range(4):
        replayed.step()
    return replayed


def request(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=5)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    result = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return result


def test_status_json_is_the_controller_s_status_plus_the_page_key(run: ReplayedRun) -> None:
    document = run.page.status()
    page = document.pop("page")
    assert document == plain(run.controller.status())
    assert page["headline"]["state"] == "catching_up"
    assert page["members"] == [f"{role} {n}" for role, n in MEMBERS]
    assert page["newest"]["values"]["ne"] == document["reports"]["worker 0"]["metrics"]["ne"]
    assert page["figures"]["shards"]["shard-1"]["rows"]["d8"] > 0


def test_the_number_of_rows_is_unknown_while_a_shard_does_not_answer(run: ReplayedRun) -> None:
    shards = run.page.status()["page"]["figures"]["shards"]
    newest = run.page.status()["page"]["newest"]["values"]
    assert newest["rows"] == sum(sum(shard["rows"].values()) for shard in shards.values()) > 0
    run.silent_programs = frozenset({"shard-1"})
    run.step()
    assert run.page.status()["page"]["newest"]["values"]["rows"] is None


def test_findings_have_a_start_time_and_their_end_is_a_change(run: ReplayedRun) -> None:
    assert run.page.status()["page"]["findings"] == []
    run.silent_programs = frozenset({"serving"})
    run.step()
    began_s = run.page.status()["page"]["at_s"]
    run.step()
    (finding,) = run.page.status()["page"]["findings"]
    assert finding["key"] == "silent serving" and finding["since_s"] == pytest.approx(began_s, abs=0.5)
    run.silent_programs = frozenset()
    run.step()
    document = run.page.status()["page"]
    assert document["findings"] == []
    assert [c["what"] for c in document["changes"] if "serving" in c["now"]] == ["unknown", "over"]


def test_a_rollback_is_a_change_with_its_reason(run: ReplayedRun) -> None:
    run.step(broken="a shard is away")
    changes = run.page.status()["page"]["changes"]
    assert any(c["what"] == "rollback" and "a shard is away" in c["now"] for c in changes), changes


def test_history_json_contains_the_past(run: ReplayedRun) -> None:
    fine = run.page.history()["grains"][0]
    assert len(fine["slot"]) == 4 and fine["slot"] == sorted(fine["slot"])
    assert [v is not None for v in fine["values"]["trained_per_s"]] == [False, True, True, True]
    assert all(len(column) == 4 for column in fine["values"].values())


def test_the_page_works_without_scrape_targets(run: ReplayedRun) -> None:
    run.silent_programs = frozenset(
        {"shard-0", "shard-1", "worker", "serving", "joiner", "auditor", "simulate"}
    )
    run.step()
    document = run.page.status()["page"]
    assert document["figures"]["shards"] == {} and document["newest"]["values"]["rows"] is None
    assert {f["level"] for f in document["findings"]} == {"unknown"}


def test_a_report_that_cannot_be_read_leaves_a_gap_in_the_page_and_ends_nothing(
    run: ReplayedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status = run.controller.status
    monkeypatch.setattr(run.controller, "status", lambda: {**status(), "reports": {"worker 0": "nothing"}})
    before = run.page.history()
    run.step()
    assert run.page.history()["grains"] == before["grains"] and "gap" in caplog.text
    monkeypatch.undo()
    run.step()
    assert run.page.history()["grains"] != before["grains"]


def test_numbers_that_are_not_finite_are_unknown_in_json() -> None:
    value = {1: [math.nan, math.inf, 2.5, None, True], "text": ScrapedMetrics}
    assert plain(value) == {"1": [None, None, 2.5, None, True], "text": str(ScrapedMetrics)}


def test_documents_are_served_under_a_strict_policy_and_nothing_else_is(run: ReplayedRun) -> None:
    url = run.serve()
    for path in (*static_files(), "/status.json", "/history.json"):
        status, headers, body = request(url, path)
        assert status == 200 and body and int(headers["content-length"]) == len(body), path
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        if path.endswith(".json"):
            assert headers["content-type"] == "application/json" and isinstance(json.loads(body), dict)
    for method in ("POST", "OPTIONS"):
        status, headers, _ = request(url, "/status.json", method)
        assert status == 405 and headers["allow"] == "GET, HEAD", method
    for path in ("/web/index.html", "/%2e%2e/page.py", "//etc/passwd", "/page.js%00"):
        status, _, body = request(url, path)
        assert status == 404 and body.startswith(b"expected /metrics, /livez, /readyz, /, "), path


def test_a_hostile_name_stays_data(run: ReplayedRun) -> None:
    row = {"topic": HOSTILE, "partition": 0, "state": HOSTILE, "lag_records": 1}
    hostile: dict[str, Any] = {"watch": {"state": HOSTILE, "partitions": [row]}, "broken": HOSTILE}
    run.step(**hostile)
    _, headers, body = request(run.serve(), "/status.json")
    assert headers["content-type"] == "application/json"
    assert HOSTILE in json.dumps(json.loads(body), ensure_ascii=False).replace('\\"', '"')


def test_the_page_has_no_inline_script_style_or_foreign_address() -> None:
    html = static_files()["/"]().body.decode()
    assert "style=" not in html and "<style" not in html and " on" + "click" not in html and "://" not in html
    for path in static_files():
        text = static_files()[path]().body.decode()
        unsafe = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(")
        assert not [word for word in unsafe if word in text]


def test_an_idle_hold_is_shown_without_findings_about_workers(
    run: ReplayedRun,
) -> None:
    run.hold_idle("nothing to read for 60 s")
    run.step()
    assert run.controller.status()["state"] == "held"
    document = run.page.status()["page"]
    assert document["headline"]["state"] == "transient_hold", (
        "the hold must be shown even while the worker still reports its old state"
    )
    run.gone_members, run.silent_programs = frozenset({("worker", 0)}), frozenset({"worker"})
    run.step(), run.step()
    document = run.page.status()
    assert "worker 0" not in document["reports"] and document["page"]["findings"] == []
    training = document["page"]["training"]
    assert (training["state"], training["reason"]) == ("held", "nothing to read for 60 s")
    assert document["page"]["headline"]["text"] == "On hold: nothing to read"
    assert run.controller.end_idle()
    run.gone_members = run.silent_programs = frozenset()
    run.step()
    assert run.page.status()["page"]["headline"]["state"] == "catching_up"


# History and change log


def test_a_step_is_one_point_with_its_newest_known_values() -> None:
    history = History(resolutions=(Resolution(10, 5),))
    for at_s, value in ((0, 1.0), (4, 2.0), (9, None), (10, 5.0)):
        history.add(at_s, {"ne": value})
    (grain,) = history.series()
    assert grain == {"step_s": 10, "slot": [0, 1], "at_s": [9, 10], "values": {"ne": [2.0, 5.0]}}


def test_a_coarse_line_does_not_hide_a_peak() -> None:
    history = History(frozenset({"lag_ms"}), (Resolution(60, 5),))
    for at_s, lag in ((0, 1.0), (10, 900.0), (20, 3.0)):
        history.add(at_s, {"lag_ms": lag, "ne": lag})
    assert history.series()[0]["values"] == {"lag_ms": [900.0], "ne": [3.0]}


def test_unknown_values_stay_unknown_and_steps_without_readings_are_gaps() -> None:
    history = History(resolutions=(Resolution(10, 9),))
    history.add(0, {"ne": 1.0})
    history.add(10, {"ne": None})
    history.add(50, {"ne": 2.0, "auc": 0.7})
    (grain,) = history.series()
    assert grain["slot"] == [0, 1, 5]
    assert grain["values"] == {"auc": [None, None, 0.7], "ne": [1.0, None, 2.0]}


def test_memory_is_bounded_in_every_resolution() -> None:
    history = History(resolutions=(Resolution(10, 3), Resolution(60, 2)))
    for at_s in range(0, 1000, 10):
        history.add(at_s, {"n": float(at_s)})
    fine, coarse = history.series()
    assert fine["values"]["n"] == [970.0, 980.0, 990.0] and coarse["values"]["n"] == [950.0, 990.0]


def test_a_change_has_the_old_value_and_its_time() -> None:
    changes = ChangeLog()
    changes.observe(1, 1001, {"state": "catching_up", "incarnation": "1"})
    changes.observe(2, 1002, {"state": "catching_up", "incarnation": "1"})
    assert not changes.newest and changes.since_s("state") == 1
    changes.observe(3, 1003, {"state": "caught_up", "incarnation": "1"})
    assert [tuple(c) for c in changes.newest] == [(3, 1003, "state", "catching_up", "caught_up")]
    assert changes.since_s("state") == 3 and changes.since_s("incarnation") == 1
