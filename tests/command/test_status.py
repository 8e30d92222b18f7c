from __future__ import annotations

from command import scrape, status
from command import status_table as table
from command.scrape import Scraped

WORKER = """# TYPE roostream_worker_state gauge
roostream_worker_state{state="initial"} 0.0
roostream_worker_state{state="caught_up"} 1.0
# TYPE roostream_worker_lag_ms gauge
roostream_worker_lag_ms 1500.0
roostream_worker_eta_s NaN
# TYPE roostream_freshness_ms gauge
roostream_freshness_ms{stage="close_to_readable",quantile="0.5"} 131.0
roostream_freshness_ms{stage="close_to_readable",quantile="0.99"} 206.0
"""
SIMULATE = """# TYPE roostream_traffic_click_rate gauge
roostream_traffic_click_rate{order="served",window="recent"} 0.3
roostream_traffic_click_rate{order="random",window="recent"} 0.2
roostream_traffic_click_rate{order="best",window="recent"} 0.5
roostream_traffic_click_rate{order="served",window="total"} 0.25
roostream_traffic_click_rate{order="random",window="total"} 0.2
# TYPE roostream_traffic_requests counter
roostream_traffic_requests_total 1200.0
"""
CONTROL = {
    "state": "committed",
    "seq": 12,
    "incarnation": 2,
    "commit_age_ms": 4000.0,
    "reports": {
        "worker 0": {"step": 40, "requests": 1000, "watermark_ms": 1_700_000_000_000, "metrics": {"ne": 0.9, "auc": 0.7}}
    },
}
PROGRAMS = {"worker": {"state": "ready", "pid": 1, "restarts": 2}, "shard-0": {"state": "failed", "pid": None, "restarts": 12}}


def whole(worker: Scraped, simulate: Scraped, control: dict[str, object]) -> dict[str, object]:
    scraped = {"worker": worker, "simulate": simulate, "shard-0": scrape.parse('roostream_shard_rows{stack="d16"} 7\n')}
    return {
        "programs": PROGRAMS,
        "rates": {"impressions": 25.04, "samples": None},
        "joiner": status.joiner_state(None, Scraped()),
        "trainer": status.trainer_state(worker, control),
        "rows": status.rows_by_stack(scraped),
        "commit": status.commit_state(control),
        "freshness": status.freshness(scraped),
        "metrics": status.quality(worker, control),
        "click_rate": status.click_rate(simulate),
        "guarantees": {"g1": None},
    }


def test_scraped_text_is_found_by_name_and_labels() -> None:
    worker = scrape.parse(WORKER)
    assert worker.value("roostream_worker_lag_ms") == 1500.0
    assert worker.value("roostream_worker_eta_s") is None, "not a number is as good as absent"
    assert worker.state("roostream_worker_state", "state") == "caught_up"
    assert worker.by("roostream_worker_state", "state") == {"initial": 0.0, "caught_up": 1.0}


def test_a_program_that_does_not_answer_or_talks_nonsense_is_an_empty_scrape() -> None:
    assert not scrape.fetch("http://127.0.0.1:1/metrics")
    assert not scrape.parse('x{a="1} nonsense')
    assert scrape.fetch_all({"a": None}) == {}


def test_figures_are_gathered_from_whoever_measures_them() -> None:
    found = whole(scrape.parse(WORKER), scrape.parse(SIMULATE), CONTROL)
    assert found["trainer"]["state"] == "caught_up"  # type: ignore[index]
    assert found["trainer"]["requests"] == 1000  # type: ignore[index]
    assert found["rows"] == {"d16": 7}
    assert found["click_rate"]["served_to_random"] == 0.3 / 0.2  # type: ignore[index]
    assert found["freshness"]["close_to_readable"] == {"p50_ms": 131.0, "p99_ms": 206.0}  # type: ignore[index]
    assert found["metrics"]["ne"] == 0.9  # type: ignore[index]


def test_the_table_shows_a_dash_for_what_is_not_known_yet() -> None:
    rows = dict(table.rows(whole(Scraped(), Scraped(), {})))
    assert rows["trainer"].startswith("–, watermark –")
    assert rows["accounted"] == "–"
    assert rows["click rate"] == "served –, random –, best –; served is – × random now, – × since the start"


def test_the_table_names_what_is_down_and_what_holds() -> None:
    found = whole(scrape.parse(WORKER), scrape.parse(SIMULATE), CONTROL)
    sums = dict.fromkeys(
        ("folded", "corrected", "dead_engagements", "pending", "engagements", "requests", "samples", "pending_requests"), 3
    )
    found["guarantees"] = {"g1": {**sums, "accounted": True}}
    rows = dict(table.rows(found))
    assert rows["programs"] == "1 ready, shard-0 failed, 14 restarts"
    assert rows["trainer"].startswith("caught_up, watermark 2023-11-14 22:13:20, behind 1.5 s")
    assert rows["click rate"].endswith("served is 1.50 × random now, 1.25 × since the start")
    assert rows["accounted"].startswith("yes: 3 engagements = 3 folded + 3 corrected + 3 dead + 3 pending")
    assert "not ready: shard-0" in table.line(found, 12.0)
