"""`roostream status`: the table and the JSON that it builds from the reports and metrics of a stack's
programs."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from infra.auditor import sums
from infra.auditor.accounts import Accounts
from roostream.cli import status
from roostream.cli import status_table as table
from roostream.cli.output import render_rows
from roostream.cli.program_health import unhealthy_controller, unhealthy_programs
from roostream.runtime import scrape
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.scrape import ScrapedMetrics
from tests.runtime.raw_server import NOT_HTTP, raw_server
from trainer.control import scrape_targets
from trainer.control.holds import ratios

WORKER = """# TYPE roostream_worker_state gauge
roostream_worker_state{state="initial"} 0.0
roostream_worker_state{state="caught_up"} 1.0
# TYPE roostream_worker_lag_seconds gauge
roostream_worker_lag_seconds 1.5
roostream_worker_eta_seconds NaN
"""
SIMULATE = """# TYPE roostream_simulator_click_rate gauge
roostream_simulator_click_rate{order="served",window="recent"} 0.3
roostream_simulator_click_rate{order="random",window="recent"} 0.2
roostream_simulator_click_rate{order="best",window="recent"} 0.5
roostream_simulator_click_rate{order="served",window="total"} 0.25
roostream_simulator_click_rate{order="random",window="total"} 0.2
"""
CONTROL: dict[str, Any] = {
    "state": "committed",
    "seq": 12,
    "incarnation": 2,
    "commit_age_ms": 4000.0,
    "trained": 5432,
    "freshness": {"close_to_readable": {"p50_ms": 131.0, "p99_ms": 206.0}},
    "reports": {
        "worker 0": {
            "step": 40,
            "requests": 1000,
            "watermark_ms": 1_700_000_000_000,
            "metrics": {"ne": 0.9, "auc": 0.7, "requests": 1000},
            "watch": {"state": "caught_up", "lag_ms": 1500, "eta_s": [0.0, 0.0, 0.0]},
        }
    },
    "workers": 1,
    "wanted_workers": 1,
}
SHARD = "failed: no disk (its log: s.log)"


def make_status(control: Mapping[str, Any] = CONTROL, simulate: str = "", **overrides: Any) -> dict[str, Any]:
    """Return the status of a stack whose controller reports `control`; `overrides` replace its parts."""
    rows = scrape.parse('roostream_shard_rows{stack="d16"} 7\n')
    return {
        "programs": {
            "worker": {"state": "ready", "pid": 1, "restarts": 2},
            "shard-0": {"state": "failed", "pid": None, "restarts": 12},
        },
        "troubles": {"shard-0": SHARD},
        "lost_records": {},
        "rates": {"impressions": 25.04, "samples": None},
        "joiner": status.joiner_state(None, ScrapedMetrics()),
        "trainer": status.trainer_state(control),
        "workers": status.workers_state(control),
        "rows": scrape_targets.rows_by_stack(["shard-0"], {"shard-0": rows}),
        "commit": status.commit_state(control),
        "freshness": status.freshness_state(control),
        "metrics": status.quality(control),
        "click_rate": scrape_targets.click_rate(scrape.parse(simulate)),
        "guarantees": {"g1": sums.of_programs({})},
        **overrides,
    }


def table_rows(control: Mapping[str, Any] = CONTROL, simulate: str = "", **overrides: Any) -> dict[str, str]:
    """Return the rows of the printed table, by name."""
    return dict(table.rows(make_status(control, simulate, **overrides)))


def audit_sums(*, is_current: bool = True, behind: int | None = 0, **overrides: Any) -> dict[str, Any]:
    """Return an auditor's sums after a round trip through its /metrics page."""
    found = dataclasses.replace(Accounts().sums(), **overrides)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: sums.metrics_of(found, is_current, behind), sums.METRICS))
    return sums.of_programs({"auditor": scrape.parse(generate_latest(registry).decode())})


def test_scraped_text_is_found_by_name_and_labels_and_nonsense_is_empty() -> None:
    worker = scrape.parse(WORKER)
    assert worker.value("roostream_worker_lag_seconds") == 1.5
    assert worker.ms("roostream_worker_lag_seconds") == 1500.0
    assert worker.value("roostream_worker_eta_seconds") is None, "NaN is treated as a missing value"
    assert worker.state("roostream_worker_state", "state") == "caught_up"
    assert worker.by("roostream_worker_state", "state") == {"initial": 0.0, "caught_up": 1.0}
    assert not scrape.fetch("http://127.0.0.1:1/metrics") and not scrape.parse('x{a="1} nonsense')
    assert scrape.fetch_all({"a": None}) == {}


def test_the_table_names_problems_first_and_shows_a_dash_for_what_is_not_known() -> None:
    rows = table_rows({})
    assert rows["trainer"].startswith("–, watermark –") and rows["devices"] == "–"
    assert rows["commit"].startswith("–, –, age –, – since the start"), "0-0 would be a measured commit"
    assert rows["accounted"] == "unknown, because not every auditor answers"
    assert rows["click rate"] == "served –, random –, best –; served / random is – now, – since the start"
    found = make_status(simulate=SIMULATE)
    found["guarantees"] = {"g1": audit_sums(folded=3, engagements=5, dead_engagements=1, pending=1)}
    first, *_ = lines = table.rows(found)
    rows = dict(lines)
    assert first == ("NOT READY", f"shard-0: {SHARD}")
    assert rows["programs"] == "1 ready, shard-0 failed, 14 restarts"
    assert rows["trainer"].startswith("caught_up, watermark 2023-11-14 22:13:20, behind 1.5 s")
    assert rows["click rate"].endswith("served / random is 1.50 now, 1.25 since the start")
    assert rows["accounted"].startswith("yes: 5 engagements = 3 folded + 0 corrected + 1 dead + 1 pending; ")
    assert "not ready: shard-0" in table.line(found, 12.0) and "accounted yes" in table.line(found, 12.0)


def three_workers(number: int, wanted: int, **report: Any) -> dict[str, Any]:
    """Return a controller's report about three workers."""
    reports = {
        f"worker {n}": {"step": 9, "requests": 100 + n, "broken": "no shard 0" if n == 1 else "", **report}
        for n in (2, 0, 1)
    }
    members = {name: {"incarnation": 3, "silent_ms": 200.0} for name in reports}
    return {**CONTROL, "workers": number, "wanted_workers": wanted, "reports": reports, "members": members}


def test_workers_are_shown_one_by_one_and_summed() -> None:
    assert status.trainer_state(three_workers(2, 3))["requests"] == 201
    assert table_rows(three_workers(2, 3))["workers"].split("\n") == [
        "2 training, 3 requested",
        "worker 0: trained 100 since its start, step 9, last report 200 ms ago",
        "worker 1: no shard 0, step 9, last report 200 ms ago",
        "worker 2: standing by, step 9, last report 200 ms ago",
    ]
    restarted = table_rows(three_workers(2, 2, requests=0, duplicates=0))["trainer"]
    assert "trained 5,432 as of the last commit; since the workers started: trained 0, skipped 0" in restarted


def test_a_part_is_never_shown_as_the_sum_of_all_workers_or_shards() -> None:
    both = three_workers(2, 2, candidates=50, outcomes={"taken": 5, "trained": 4})
    whole = status.trainer_state(both)
    assert (whole["candidates"], whole["outcomes"]["taken"]) == (100, 10)
    one_silent = {**both, "reports": {"worker 1": both["reports"]["worker 1"]}}
    part = status.trainer_state(one_silent)
    assert (part["candidates"], part["requests"], part["outcomes"]) == (None, None, {})
    rows = scrape.parse('roostream_shard_rows{stack="d16"} 7\n')
    one, two = (
        scrape.parse(
            f'roostream_serving_requests_total{{status="200"}} {n}\nroostream_serving_degraded_total 1\n'
            'roostream_serving_model_version{version="1-3"} 1\n'
        )
        for n in (5, 7)
    )
    processes = ["controller", "serving", "serving-1"]
    both_answer = scrape_targets.serving_state(processes, {"serving": one, "serving-1": two})
    assert both_answer == {"requests": 12, "degraded": 2, "version": "1-3"}
    assert scrape_targets.serving_state(processes, {"serving": one})["requests"] is None
    programs = ["worker", "shard-0", "shard-1"]
    assert scrape_targets.rows_by_stack(programs, {"shard-0": rows, "shard-1": rows}) == {"d16": 14}
    assert scrape_targets.rows_by_stack(programs, {"shard-0": rows, "shard-1": ScrapedMetrics()}) == {}
    assert scrape_targets.rows_by_stack(programs, {"shard-0": rows}) == {}


def test_progress_of_historical_training_is_shown() -> None:
    initial = {"epoch": 2, "epochs": 3, "records": 90_000, "left": 40_000}
    prefix = "caught_up (history: 50,000 of 90,000 samples committed, epoch 2 of 3"
    timed = {"eta_s": [600.0, 500.0, 700.0], "last_close_ms": 1_700_000_000_000}
    for more, end in (
        ({}, ", time left unknown)"),
        ({"eta_s": [None, None, None]}, ", time left unknown)"),
        (timed, ", up to 2023-11-14 22:13:20, time left 10.0 min)"),
    ):
        row = table_rows({**CONTROL, "initial": {**initial, **more}})["trainer"]
        assert row.startswith(f"{prefix}{end}, watermark")


@pytest.mark.parametrize(
    ("watch", "begin"),
    [
        ({}, "unknown (not every worker reports), watermark –"),
        (
            {"watch": {"state": "unknown", "reason": "the training loop has not turned for 12 s"}},
            "unknown (the training loop has not turned for 12 s), watermark –",
        ),
        (
            {"watch": {"state": "blocked", "reason": "samples-1: a transaction is open"}},
            "blocked (samples-1: a transaction is open), watermark –",
        ),
    ],
)
def test_the_reason_of_the_training_state_is_shown(watch: dict[str, Any], begin: str) -> None:
    row = table_rows({**CONTROL, "reports": {"worker 0": watch}})["trainer"]
    assert row.startswith(begin)


def test_the_status_says_what_closed_the_requests() -> None:
    assert "closed by" not in table_rows()
    closed = audit_sums(closed_by={"window": 30, "engaged": 69, "next_request": 1})
    assert table_rows(guarantees={"g1": closed})["closed by"] == "engaged 69%, window 30%, next_request 1%"


def test_sums_survive_the_round_trip_through_metrics() -> None:
    given: dict[str, Any] = {
        "requests": 1 << 40,
        "dead_letters": {"too_late": 2},
        "actions": {'a"b\n[/c]': 1},
    }
    found = audit_sums(**given)
    expected = dataclasses.asdict(dataclasses.replace(Accounts().sums(), **given))
    assert {k: v for k, v in found.items() if k not in ("state", "behind")} == expected
    assert found["state"] == "yes" and found["behind"] == 0


@pytest.mark.parametrize(
    ("is_current", "behind", "accounted", "state", "text"),
    [
        (True, 0, True, "yes", "yes: "),
        (True, 0, False, "no", "NO, 7 are missing: "),
        (True, 0, True, "waiting", "not yet, 3 wait for the joiner"),
        (False, 1234, False, "reading", "still reading, 1,234 records left"),
        (True, None, True, "unknown", "unknown now, because Kafka did not report"),
        (False, None, True, "unknown", "unknown now, because Kafka did not report"),
    ],
)
def test_only_complete_current_readings_are_judged(
    is_current: bool, behind: int | None, accounted: bool, state: str, text: str
) -> None:
    late = 3 if state == "waiting" else 0
    found = audit_sums(is_current=is_current, behind=behind, accounted=accounted, overdue=7, late=late)
    assert found["state"] == state and found["accounted"] == {"yes": True, "no": False}.get(state)
    assert table.book_rows(found)[0][1].startswith(text)


def test_values_missing_from_a_sum_are_named() -> None:
    by_reason = {
        "dead_letters": {"too_late": 3},
        "untrained_by": {"non_finite": 1},
        "unreadable": {"rows": 4},
    }
    since = {"since_ms": 1_700_000_000_000, "lost_records": 5, "predicted_by": {"trained": 5, "negative": 2}}
    rows = dict(table.book_rows(audit_sums(only_repeated=2, **by_reason, **since)))
    assert "2 only in a repeated sample" in rows["accounted"]
    assert rows["dead letters"] == "too_late 3" and rows["untrained"] == "non_finite 1"
    assert rows["audited"].startswith("events since 2023-11-14 22:13:20")
    assert rows["not counted"].startswith("5 records") and rows["predicted"] == "negative 2, trained 5"


def rows_with_outcomes(**outcomes: int) -> dict[str, str]:
    zero = dict.fromkeys(("taken", "trained", "frozen", "negative", "random", "stale", "non_finite"), 0)
    return table_rows({**CONTROL, "reports": {"worker 0": {"step": 4, "outcomes": {**zero, **outcomes}}}})


def test_skipped_requests_are_shown_and_add_up() -> None:
    text = "requests since the workers started = 6 trained + 3 negative + 1 non_finite"
    skipped = {"trained": 6, "negative": 3, "non_finite": 1}
    assert rows_with_outcomes(taken=10, **skipped)["selection"] == f"10 {text}"
    assert rows_with_outcomes(taken=13, **skipped)["selection"] == f"13 {text}; ERROR: 3 are missing"
    assert "selection" not in rows_with_outcomes(taken=5, trained=5)


def test_skips_of_slipstream_are_shown_with_their_control() -> None:
    rows = rows_with_outcomes(taken=200, trained=150, stale=50)
    assert rows["selection"].endswith("50 stale")
    assert 'policy = "random", keep = 0.750' in rows["control"]
    assert "control" not in rows_with_outcomes(taken=200, trained=150, random=50)


def test_the_last_error_of_a_program_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "joiner.log"
    log.write_text("first\njoiner: no such file [/bold]\n")
    entry = {"pid": None, "log": str(log), "restarts": 3}
    found = unhealthy_programs(
        {
            "joiner": {**entry, "state": "failed"},
            "kafka": {**entry, "state": "ready"},
            "simulate": {**entry, "state": "ended"},
            "worker": {**entry, "state": "waiting", "restarts": 0},
            "controller": {**entry, "state": "failed", "restarts": 0, "said": "no table"},
            "serving": {**entry, "state": "waiting", "said": "Kafka is away"},
            "shard-0": {**entry, "state": "starting", "restarts": 0},
        }
    )
    assert found == {
        "joiner": f"failed: joiner: no such file [/bold] (its log: {log})",
        "worker": "waiting",
        "controller": f"failed: no table (its log: {log})",
        "serving": f"waiting after 3 restarts: Kafka is away (its log: {log})",
        "shard-0": f"starting: joiner: no such file [/bold] (its log: {log})",
    }


class ReadinessHandler(BaseHTTPRequestHandler):
    reason = "it waits for the controller to restore it"

    def do_GET(self) -> None:
        self.send_response(503 if self.path == "/readyz" and self.reason else 200)
        self.end_headers()
        self.wfile.write(f"{self.reason or 'ok'}\n".encode())

    def log_message(self, *args: object) -> None:
        """Do not log requests."""


def test_a_starting_program_shows_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "worker.log"
    entry = {"pid": 1, "log": str(log), "restarts": 0, "state": "starting"}
    with ThreadingHTTPServer(("127.0.0.1", 0), ReadinessHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        worker = {"worker": {**entry, "metrics": f"http://127.0.0.1:{server.server_port}/metrics"}}
        assert unhealthy_programs(worker) == {
            "worker": f"starting: {ReadinessHandler.reason} (its log: {log})"
        }
        monkeypatch.setattr(ReadinessHandler, "reason", "")
        assert unhealthy_programs(worker) == {"worker": "starting"}
        server.shutdown()
    log.write_text("waiting for Kafka\n")
    assert unhealthy_programs(worker) == {"worker": f"starting: waiting for Kafka (its log: {log})"}


def test_a_program_that_was_ready_once_and_cannot_work_now_is_shown(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    pages = {
        "metrics": answer % (b"200 OK", 18, b"roostream_ready 0\n"),
        "readyz": answer % (b"503 Busy", 18, b"it waits for Redis"),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(pages[self.path.strip("/")])

        def log_message(self, *args: object) -> None:
            """Do not log requests."""

    away = {"kafka": "127.0.0.1:1", "flink": "http://127.0.0.1:1", "controller": "127.0.0.1:1"}
    monitor = status.StackMonitor({**away, "prefix": ""})
    log = tmp_path / "features.log"
    entry = {"pid": 1, "log": str(log), "restarts": 2, "state": "ready", "said": "an earlier error"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}/metrics"
        found = monitor.sample({"features": {**entry, "metrics": at}, "redis": {**entry, "metrics": None}})
        server.shutdown()
    monitor.close()
    assert {name: each["state"] for name, each in found["programs"].items()} == {
        "features": "unready",
        "redis": "ready",
    }
    assert found["troubles"] == {"features": f"unready after 2 restarts: it waits for Redis (its log: {log})"}


@pytest.mark.parametrize(
    ("reported", "troubles"),
    [
        ({}, {}),
        ({"away": "", "abort_reason": ""}, {}),
        ({"away": "s3://b can't be read now"}, {"controller": "waits: s3://b can't be read now"}),
        ({"abort_reason": "read-only"}, {"controller": "the last commit was aborted: read-only"}),
        ({"topic_problems": {"samples": "has 5 partitions"}}, {"topic samples": "has 5 partitions"}),
    ],
)
def test_problems_that_a_controller_reports_are_shown(
    reported: dict[str, Any], troubles: dict[str, str]
) -> None:
    assert unhealthy_controller(reported) == troubles


def test_lost_records_are_shown_by_program() -> None:
    lost = scrape_targets.lost_records(
        {
            "worker": scrape.parse("roostream_worker_lost_records_total 12.0\n"),
            "joiner": scrape.parse("roostream_joiner_lost_records 0.0\n"),
            "auditor": scrape.parse("roostream_auditor_lost_records 3.0\n"),
        }
    )
    assert lost == {"worker": 12}
    assert table_rows(lost_records=lost)["LOST"].startswith("worker missed 12 records")


def test_markup_and_control_characters_from_outside_are_printed_as_text() -> None:
    found = make_status(troubles={"joiner": "failed: [/b] \x1b[31mred [red]x[/red]"})
    out = io.StringIO()
    Console(file=out, width=200).print(render_rows(table.rows(found), "home [/tmp]", ["curl '[/x]'"]))
    output = out.getvalue()
    assert "[/b] [31mred [red]x[/red]" in output and "home [/tmp]" in output and "curl '[/x]'" in output
    assert "\x1b" not in output and "\x1b" not in table.line(found, 1.0)


def test_a_hold_is_shown_first_and_device_time_is_shown_by_use() -> None:
    hold = {"kind": "permanent", "reason": "no memory", "member": "worker 0", "since_ms": 1_700_000_000_000}
    spent = {"training": 7200.0, "temporary": 72.0, "transient_hold": 0.0, "permanent_hold": 17_928.0}
    control = {**CONTROL, "holds": [hold], "device_s": spent, "device_ratio": ratios(spent)}
    (name, text), *_ = table.rows(make_status(control))
    assert name == "HELD" and text.startswith(
        "since 2023-11-14 22:13:20 UTC, permanent: worker 0: no memory;"
    )
    rows = table_rows(control)
    assert "`roostream trainer release`" in text and rows["trainer"].startswith("held")
    used = "temporary 0.01, transient hold 0.00, permanent hold 2.49"
    assert rows["devices"] == f"training 120.0 min; relative to training: {used}"
    spent = {"training": 0.0, "temporary": 72.0}
    rows = table_rows({**CONTROL, "device_s": spent, "device_ratio": ratios(spent)})
    assert rows["devices"] == "training 0 ms, temporary 72.0 s", "without training time there is no ratio"


def test_readers_are_shown_while_there_are_any() -> None:
    buffers = {"0": {"fullness": 0.25, "in_flight": 2, "stalled_s": 1.0, "stall_share": 0.125, "pieces": 4}}
    readers = {"a:1/x": {"requests": 2048, "silent_s": 0.25}, "b:1/y": {"silent_s": 1.0}}
    leases = [{"split": n, "worker": 0, "position": 0, "reader": "a:1/x", "for_s": 1.0} for n in (3, 5)]
    status_of_readers = {
        "there": 2,
        "wanted": 3,
        "least": 1,
        "most": 4,
        "splits_wanted": 3,
        "leases_expired": 1,
    }
    assert "readers" not in table_rows()
    status_of_readers |= {"buffers": buffers, "readers": readers, "leases": leases}
    assert table_rows(readers=status_of_readers)["readers"].split("\n") == [
        "2 of 3 wanted (1 to 4), 3 splits waited for, 1 leases expired",
        "worker 0: buffer 25 % full, 4 pieces; waited 1.0 s, 12.5 % of the time",
        "a:1/x: splits 3, 5; 2,048 requests read, last report 250 ms ago",
        "b:1/y: no lease; – requests read, last report 1.0 s ago",
    ]


@pytest.mark.parametrize("answer", [NOT_HTTP, b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nwaits"])
def test_a_readiness_probe_that_breaks_off_gives_no_reason(answer: bytes, tmp_path: Path) -> None:
    with raw_server(answer) as url:
        program = {
            "state": "starting",
            "restarts": 0,
            "metrics": f"{url}/metrics",
            "log": str(tmp_path / "a"),
        }
        assert unhealthy_programs({"a": program})["a"].startswith("starting")
