from __future__ import annotations

import dataclasses
import io
import threading
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
# TYPE roostream_simulator_requests counter
roostream_simulator_requests_total 1200.0
"""
CONTROL = {
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
AWAY = sums.of_programs({})
PROGRAMS = {
    "worker": {"state": "ready", "pid": 1, "restarts": 2},
    "shard-0": {"state": "failed", "pid": None, "restarts": 12},
}


def whole(worker: ScrapedMetrics, simulate: ScrapedMetrics, control: dict[str, object]) -> dict[str, object]:
    scraped = {
        "worker": worker,
        "simulate": simulate,
        "shard-0": scrape.parse('roostream_shard_rows{stack="d16"} 7\n'),
    }
    return {
        "programs": PROGRAMS,
        "troubles": {"shard-0": "failed: no disk (its log: s.log)"},
        "lost_records": {},
        "rates": {"impressions": 25.04, "samples": None},
        "joiner": status.joiner_state(None, ScrapedMetrics()),
        "trainer": status.trainer_state(control),
        "workers": status.workers_state(control),
        "rows": scrape_targets.rows_by_stack(scraped),
        "commit": status.commit_state(control),
        "freshness": status.freshness_state(control),
        "metrics": status.quality(control),
        "click_rate": scrape_targets.click_rate(simulate),
        "guarantees": {"g1": AWAY},
    }


def test_scraped_text_is_found_by_name_and_labels() -> None:
    worker = scrape.parse(WORKER)
    assert (
        worker.value("roostream_worker_lag_seconds") == 1.5
        and worker.ms("roostream_worker_lag_seconds") == 1500.0
    )
    assert worker.value("roostream_worker_eta_seconds") is None, "not a number is as good as absent"
    assert worker.state("roostream_worker_state", "state") == "caught_up"
    assert worker.by("roostream_worker_state", "state") == {"initial": 0.0, "caught_up": 1.0}


def test_a_program_that_does_not_answer_or_talks_nonsense_is_an_empty_scrape() -> None:
    assert not scrape.fetch("http://127.0.0.1:1/metrics")
    assert not scrape.parse('x{a="1} nonsense')
    assert scrape.fetch_all({"a": None}) == {}


def test_the_table_shows_a_dash_for_what_is_not_known_yet() -> None:
    rows = dict(table.rows(whole(ScrapedMetrics(), ScrapedMetrics(), {})))
    assert rows["trainer"].startswith("–, watermark –")
    assert rows["accounted"] == "unknown, because not every auditor answers"
    assert rows["click rate"] == "served –, random –, best –; served / random is – now, – since the start"


def several(number: int, wanted: int) -> dict[str, object]:
    """What a controller tells of three workers."""
    reports = {
        f"worker {n}": {"step": 9, "requests": 100 + n, "broken": "shard 0 is away" if n == 1 else ""}
        for n in (2, 0, 1)
    }
    members = {name: {"incarnation": 3, "silent_ms": 200.0} for name in reports}
    return {**CONTROL, "workers": number, "wanted_workers": wanted, "reports": reports, "members": members}


def test_trained_is_the_count_of_the_model_and_the_others_say_whose_they_are() -> None:
    """A restarted worker counts from 0 again; the model does not."""
    restarted = several(2, 2)
    for name in ("worker 0", "worker 1"):
        restarted["reports"][name] = {"step": 90, "requests": 0, "duplicates": 0}  # type: ignore[index]
    row = dict(table.rows(whole(ScrapedMetrics(), ScrapedMetrics(), restarted)))["trainer"]
    assert "trained 5,432 as of the last commit" in row
    assert "since the workers started: trained 0, skipped 0" in row


def test_partitions_that_nobody_reads_are_a_problem_of_the_stack() -> None:
    control = {**CONTROL, "topic_problems": {"samples": "topic samples has 5 partitions"}}
    assert unhealthy_controller(control) == {"topic samples": "topic samples has 5 partitions"}


def test_workers_are_shown_one_by_one_and_summed() -> None:
    found = whole(ScrapedMetrics(), ScrapedMetrics(), several(2, 3))
    assert found["trainer"]["requests"] == 201  # type: ignore[index]
    assert dict(table.rows(found))["workers"].split("\n") == [
        "2 training, 3 requested",
        "worker 0: trained 100 since its start, step 9, last report 200 ms ago",
        "worker 1: shard 0 is away, step 9, last report 200 ms ago",
        "worker 2: standing by, step 9, last report 200 ms ago",
    ]


def test_history_is_shown_as_far_as_it_is_committed() -> None:
    initial = {"epoch": 2, "epochs": 3, "records": 90_000, "left": 40_000}

    def shown(**more: object) -> str:
        return dict(
            table.rows(whole(ScrapedMetrics(), ScrapedMetrics(), {**CONTROL, "initial": {**initial, **more}}))
        )["trainer"]

    of = "caught_up (history: 50,000 of 90,000 samples committed, epoch 2 of 3"
    assert shown().startswith(f"{of}, time left unknown), watermark")
    assert shown(eta_s=[None, None, None]).startswith(f"{of}, time left unknown), watermark")
    assert shown(eta_s=[600.0, 500.0, 700.0], last_close_ms=1_700_000_000_000).startswith(
        f"{of}, up to 2023-11-14 22:13:20, time left 10.0 min), watermark"
    )


def test_the_table_names_stopped_programs_and_holds() -> None:
    found = whole(scrape.parse(WORKER), scrape.parse(SIMULATE), CONTROL)
    found["guarantees"] = {"g1": books(folded=3, engagements=5, dead_engagements=1, pending=1)}
    lines = table.rows(found)
    rows = dict(lines)
    assert lines[0] == ("NOT READY", "shard-0: failed: no disk (its log: s.log)"), (
        "what is wrong stands first"
    )
    assert rows["programs"] == "1 ready, shard-0 failed, 14 restarts"
    assert rows["trainer"].startswith("caught_up, watermark 2023-11-14 22:13:20, behind 1.5 s")
    assert rows["click rate"].endswith("served / random is 1.50 now, 1.25 since the start")
    assert rows["accounted"].startswith("yes: 5 engagements = 3 folded + 0 corrected + 1 dead + 1 pending; ")
    assert "not ready: shard-0" in table.line(found, 12.0) and "accounted yes" in table.line(found, 12.0)


def books(*, is_current: bool = True, behind: int | None = 0, **changed: Any) -> dict[str, Any]:
    """Sums as they come through /metrics."""
    told = dataclasses.replace(Accounts().sums(), **changed)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: sums.metrics_of(told, is_current, behind), sums.METRICS))
    return sums.of_programs({"auditor": scrape.parse(generate_latest(registry).decode())})


def test_the_status_says_what_closed_the_requests() -> None:
    found = whole(ScrapedMetrics(), ScrapedMetrics(), {})
    assert "closed by" not in dict(table.rows(found))
    found["guarantees"] = {"g1": books(closed_by={"window": 30, "engaged": 69, "next_request": 1})}
    assert dict(table.rows(found))["closed by"] == "engaged 69%, window 30%, next_request 1%"


def test_sums_are_the_same_behind_the_metrics() -> None:
    told = dataclasses.replace(
        Accounts().sums(), requests=1 << 40, dead_letters={"too_late": 2}, actions={'a"b\n[/c]': 1}
    )
    found = books(requests=1 << 40, dead_letters={"too_late": 2}, actions={'a"b\n[/c]': 1})
    assert {k: v for k, v in found.items() if k not in ("state", "behind")} == dataclasses.asdict(told)
    assert found["state"] == "yes" and found["behind"] == 0


@pytest.mark.parametrize(
    ("is_current", "behind", "accounted", "state", "said"),
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
    is_current: bool, behind: int | None, accounted: bool, state: str, said: str
) -> None:
    found = books(
        is_current=is_current,
        behind=behind,
        accounted=accounted,
        overdue=7,
        late=3 if state == "waiting" else 0,
    )
    assert found["state"] == state and found["accounted"] == {"yes": True, "no": False}.get(state)
    assert table.book_rows(found)[0][1].startswith(said)


def test_values_missing_from_a_sum_are_named() -> None:
    rows = dict(
        table.book_rows(
            books(
                only_repeated=2,
                dead_letters={"too_late": 3},
                untrained_by={"non_finite": 1},
                unreadable={"rows": 4},
                since_ms=1_700_000_000_000,
                lost_records=5,
            )
        )
    )
    assert "2 only in a repeated sample" in rows["accounted"]
    assert rows["dead letters"] == "too_late 3" and rows["untrained"] == "non_finite 1"
    assert rows["audited"].startswith("events since 2023-11-14 22:13:20") and rows["not counted"].startswith(
        "5 records"
    )


@pytest.mark.parametrize(("missing", "said"), [(0, ""), (3, "; ERROR: 3 are missing")])
def test_skipped_requests_are_shown_and_add_up(missing: int, said: str) -> None:
    of = {
        "taken": 10 + missing,
        "trained": 6,
        "frozen": 0,
        "negative": 3,
        "random": 0,
        "stale": 0,
        "non_finite": 1,
    }
    reports = {"worker 0": {"step": 4, "outcomes": of}}
    rows = dict(table.rows(whole(scrape.parse(WORKER), ScrapedMetrics(), {**CONTROL, "reports": reports})))  # type: ignore[arg-type]
    assert (
        rows["selection"]
        == f"{10 + missing} requests since the workers started = 6 trained + 3 negative + 1 non_finite{said}"
    )


def test_skips_of_slipstream_are_shown_with_their_control() -> None:
    of = {"taken": 200, "trained": 150, "negative": 0, "random": 0, "stale": 50, "non_finite": 0}
    reports = {"worker 0": {"step": 4, "outcomes": of}}
    rows = dict(table.rows(whole(scrape.parse(WORKER), ScrapedMetrics(), {**CONTROL, "reports": reports})))  # type: ignore[arg-type]
    assert rows["selection"].endswith("50 stale") and 'policy = "random", keep = 0.750' in str(
        rows["control"]
    )
    reports["worker 0"]["outcomes"] = {**of, "random": 50, "stale": 0}
    rows = dict(table.rows(whole(scrape.parse(WORKER), ScrapedMetrics(), {**CONTROL, "reports": reports})))  # type: ignore[arg-type]
    assert "its control" not in rows


def test_selection_is_hidden_if_everything_is_trained() -> None:
    reports = {"worker 0": {"step": 4, "outcomes": {"taken": 5, "trained": 5}}}
    assert "selection" not in dict(
        table.rows(whole(scrape.parse(WORKER), ScrapedMetrics(), {**CONTROL, "reports": reports}))
    )  # type: ignore[arg-type]
    assert (
        dict(table.book_rows(books(predicted_by={"trained": 5, "negative": 2})))["predicted"]
        == "negative 2, trained 5"
    )


@pytest.mark.parametrize("watch", [{}, {"watch": {"state": "unknown"}}])
def test_a_trainer_without_a_reading_is_unknown(watch: dict[str, Any]) -> None:
    found = whole(
        scrape.parse(WORKER), ScrapedMetrics(), {**CONTROL, "reports": {"worker 0": {"step": 40, **watch}}}
    )
    assert found["trainer"]["state"] == "unknown"  # type: ignore[index]
    assert dict(table.rows(found))["trainer"].startswith(
        "unknown, because Kafka does not report the end of the samples, watermark –, behind – / – samples"
    )


def test_troubles_carry_the_last_words_of_a_program(tmp_path: Path) -> None:
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


class Probe(BaseHTTPRequestHandler):
    missing = "it waits for the controller to restore it"

    def do_GET(self) -> None:
        self.send_response(503 if self.path == "/readyz" and self.missing else 200)
        self.end_headers()
        self.wfile.write(f"{self.missing or 'ok'}\n".encode())

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


def test_a_start_timeout_shows_what_each_program_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker.log"
    with ThreadingHTTPServer(("127.0.0.1", 0), Probe) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        entry = {
            "pid": 1,
            "log": str(log),
            "restarts": 0,
            "metrics": f"http://127.0.0.1:{server.server_port}/metrics",
        }
        its = {"worker": {**entry, "state": "starting"}}
        assert unhealthy_programs(its) == {
            "worker": f"starting: it waits for the controller to restore it (its log: {log})"
        }
        monkeypatch.setattr(Probe, "missing", "")
        assert unhealthy_programs(its) == {"worker": "starting"}
        server.shutdown()
    log.write_text("waiting for Kafka\n")
    assert unhealthy_programs(its) == {"worker": f"starting: waiting for Kafka (its log: {log})"}, (
        "where it doesn't answer its log does"
    )


def test_a_controller_that_waits_for_its_store_is_not_healthy() -> None:
    assert unhealthy_controller({"away": "s3://b can't be read now"}) == {
        "controller": "waits: s3://b can't be read now"
    }
    assert unhealthy_controller({"away": ""}) == unhealthy_controller({}) == {}


def test_a_controller_whose_commits_are_aborted_is_not_healthy() -> None:
    assert unhealthy_controller({"away": "", "abort_reason": "worker 0 refused write: Read-only"}) == {
        "controller": "the last commit was aborted: worker 0 refused write: Read-only"
    }


def test_lost_records_are_shown_by_program() -> None:
    lost = scrape_targets.lost_records(
        {
            "worker": scrape.parse("roostream_worker_lost_records_total 12.0\n"),
            "joiner": scrape.parse("roostream_joiner_lost_records 0.0\n"),
            "auditor": scrape.parse("roostream_auditor_lost_records 3.0\n"),
        }
    )
    assert lost == {"worker": 12}
    found = {**whole(ScrapedMetrics(), ScrapedMetrics(), {}), "lost_records": lost}
    assert dict(table.rows(found))["LOST"].startswith("worker missed 12 records")


def test_text_from_outside_is_no_markup_and_moves_no_cursor() -> None:
    found = whole(ScrapedMetrics(), ScrapedMetrics(), {})
    found["troubles"] = {"joiner": "failed: [/b] \x1b[31mred [red]x[/red]"}
    out = io.StringIO()
    Console(file=out, width=200).print(render_rows(table.rows(found), "home [/tmp]", ["curl '[/x]'"]))
    said = out.getvalue()
    assert "[/b] [31mred [red]x[/red]" in said and "home [/tmp]" in said and "curl '[/x]'" in said
    assert "\x1b" not in said
    assert "\x1b" not in table.line(found, 1.0)


def test_a_hold_comes_first_with_what_ends_it() -> None:
    hold = {
        "kind": "permanent",
        "reason": "out of memory",
        "member": "worker 0",
        "since_ms": 1_700_000_000_000,
    }
    spent = {"training": 7200.0, "temporary": 72.0, "transient_hold": 0.0, "permanent_hold": 17_928.0}
    control = {**CONTROL, "holds": [hold], "device_s": spent, "device_ratio": ratios(spent)}
    lines = table.rows(whole(ScrapedMetrics(), ScrapedMetrics(), control))
    said = (
        "since 2023-11-14 22:13:20 UTC, permanent: worker 0: out of memory; `roostream trainer release` "
        "ends the hold"
    )
    assert lines[0] == ("HELD", said) and dict(lines)["trainer"].startswith("held")
    ratios_text = "temporary 0.01, transient hold 0.00, permanent hold 2.49"
    assert dict(lines)["devices"] == f"training 120.0 min; relative to training: {ratios_text}"


def test_devices_that_never_trained_have_no_ratio() -> None:
    spent = {"training": 0.0, "temporary": 72.0}
    lines = table.rows(
        whole(
            ScrapedMetrics(), ScrapedMetrics(), {**CONTROL, "device_s": spent, "device_ratio": ratios(spent)}
        )
    )
    assert dict(lines)["devices"] == "training 0 ms, temporary 72.0 s"
    assert dict(table.rows(whole(ScrapedMetrics(), ScrapedMetrics(), CONTROL)))["devices"] == "–", (
        "no controller, or an older one"
    )


def test_readers_are_shown_while_there_are_any() -> None:
    none = whole(ScrapedMetrics(), ScrapedMetrics(), CONTROL)
    buffers = {"0": {"fullness": 0.25, "in_flight": 2, "stalled_s": 1.0, "stall_share": 0.125, "pieces": 4}}
    there = {
        "there": 2,
        "wanted": 3,
        "least": 1,
        "most": 4,
        "splits_wanted": 3,
        "leases_expired": 1,
        "buffers": buffers,
    }
    there["readers"] = {"a:1/x": {"requests": 2048, "silent_s": 0.25}, "b:1/y": {"silent_s": 1.0}}
    there["leases"] = [
        {"split": n, "worker": 0, "position": 0, "reader": "a:1/x", "for_s": 1.0} for n in (3, 5)
    ]
    assert "readers" not in dict(table.rows(none))
    assert dict(table.rows({**none, "readers": there}))["readers"].split("\n") == [
        "2 of 3 wanted (1 to 4), 3 splits waited for, 1 leases expired",
        "worker 0: buffer 25 % full, 4 pieces; waited 1.0 s, 12.5 % of the time",
        "a:1/x: splits 3, 5; 2,048 requests read, last report 250 ms ago",
        "b:1/y: no lease; – requests read, last report 1.0 s ago",
    ]
