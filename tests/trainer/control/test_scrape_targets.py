"""The controller scrapes the metrics of other programs for its status page."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Mapping

import pytest

from roostream.errors import ConfigError
from roostream.runtime import scrape
from roostream.runtime.clock import FakeClock
from roostream.runtime.scrape import ScrapedMetrics
from trainer.config import ControllerConfig
from trainer.control.scrape_targets import SCRAPE_S, STALE_S, ScrapeTargets, read_figures, with_workers

URLS = {"worker": "http://w", "shard-0": "http://s"}
SHARD = """roostream_shard_rows{stack="d16"} 7
roostream_shard_rows{stack="d8"} 3
roostream_shard_pulls_total 12
"""


def fetched(urls: Mapping[str, str | None]) -> dict[str, ScrapedMetrics]:
    return {"worker": ScrapedMetrics(), "shard-0": scrape.parse(SHARD)}


def test_values_of_a_program_that_does_not_answer_are_unknown() -> None:
    targets = ScrapeTargets(URLS, FakeClock(), fetched)
    targets.scrape()
    figures = targets.figures()
    assert figures["programs"] == {"worker": False, "shard-0": True}
    assert figures["shards"] == {
        "shard-0": {"rows": {"d16": 7, "d8": 3}, "pulls": 12.0, "bytes": None, "damaged": None}
    }
    assert figures["freshness"]["close_to_readable"] == {"p50_ms": None, "p99_ms": None}
    assert figures["accounted"] is None


def test_the_audit_is_unknown_without_all_of_its_parts() -> None:
    line = 'roostream_auditor_accounted{{state="{}"}} 1\nroostream_auditor_index {}\n'
    line += "roostream_auditor_auditors 2\n"
    parts = {"auditor": scrape.parse(line.format("yes", 0)), "auditor-1": scrape.parse(line.format("no", 1))}
    assert read_figures({}, parts)["accounted"] == "no"
    assert read_figures({}, {**parts, "auditor": ScrapedMetrics()})["accounted"] is None
    assert read_figures({}, {**parts, "auditor-1": scrape.parse(line.format("unknown", 1))})["accounted"] == (
        "unknown"
    )


def test_a_scrape_target_with_a_count_names_that_many_programs() -> None:
    targets = ("auditor*2=http://a-{index}.a:9090/metrics", "joiner=http://j:9090/metrics")
    common = {"bootstrap": "127.0.0.1:1", "store": "s", "schema": "s.toml", "listen": "127.0.0.1:0"}
    assert ControllerConfig(scrape_targets=targets, num_shards=1, **common).scrape_urls == {  # type: ignore[arg-type]
        "auditor": "http://a-0.a:9090/metrics",
        "auditor-1": "http://a-1.a:9090/metrics",
        "joiner": "http://j:9090/metrics",
    }
    for wrong in ("auditor*2=http://a:9090", "auditor=http://a-{index}:9090", "auditor*=http://a-{index}:90"):
        with pytest.raises(ConfigError, match="NAME\\*NUMBER=URL"):
            ControllerConfig(scrape_targets=(wrong,), num_shards=1, **common)  # type: ignore[arg-type]


def measured(counts: Mapping[str, int]) -> ScrapedMetrics:
    """Metrics with a freshness histogram: upper bound in seconds → cumulative count."""
    line = 'roostream_freshness_seconds_bucket{{stage="close_to_readable",le="{}"}} {}\n'
    return scrape.parse("".join(line.format(*item) for item in counts.items()))


def test_freshness_is_that_of_the_slowest_program() -> None:
    scraped = {
        "worker": measured({"0.1": 10, "1.0": 10, "+Inf": 10}),
        "worker-1": measured({"0.1": 0, "1.0": 100, "+Inf": 100}),
    }
    targets = ScrapeTargets(URLS, FakeClock(), lambda urls: scraped)
    assert targets.freshness()["close_to_readable"] == {"p50_ms": None, "p99_ms": None}
    targets.scrape()
    expected = {"p50_ms": pytest.approx(550), "p99_ms": pytest.approx(991)}
    assert targets.freshness()["close_to_readable"] == expected
    assert targets.figures()["freshness"] == targets.freshness()


def test_freshness_covers_the_last_minutes_of_programs_that_answer() -> None:
    scraped, clock = {"worker": measured({"0.1": 0, "1.0": 1000, "+Inf": 1000})}, FakeClock()
    targets = ScrapeTargets(URLS, clock, lambda urls: scraped)
    for count in range(40):
        targets.scrape()
        clock.advance(SCRAPE_S)
        scraped["worker"] = measured({"0.1": count, "1.0": 1000 + count, "+Inf": 1000 + count})
    assert targets.freshness()["close_to_readable"]["p50_ms"] == pytest.approx(50)
    scraped["worker"] = ScrapedMetrics()
    targets.scrape()
    assert targets.freshness()["close_to_readable"]["p50_ms"] is None
    scraped["worker"] = measured({"0.1": 60, "1.0": 1060, "+Inf": 1060})
    targets.scrape()
    assert targets.freshness()["close_to_readable"]["p50_ms"] == pytest.approx(50), (
        "the difference to the last answer before the silence counts"
    )
    clock.advance(STALE_S + 1)
    assert targets.freshness()["close_to_readable"]["p50_ms"] is None, "the answer is too old"


def test_stale_answers_are_ignored() -> None:
    clock = FakeClock()
    targets = ScrapeTargets(URLS, clock, fetched)
    assert targets.figures()["programs"] == {"worker": None, "shard-0": None}, "nothing was scraped yet"
    targets.scrape()
    clock.advance(STALE_S)
    assert targets.figures()["shards"]
    clock.advance(1)
    assert targets.figures() == read_figures(URLS, {}) | {"freshness": targets.freshness()}


@pytest.mark.parametrize(
    ("settings", "workers", "expected", "why"),
    [
        (
            {"worker": "http://a"},
            {0: "h:1", 1: "h:2", 2: ""},
            {"worker", "worker-1"},
            "workers without a setting",
        ),
        (
            {"worker": "u", "worker-1": "v", "shard-1": "w"},
            {0: ""},
            {"worker", "shard-1"},
            "a worker that left",
        ),
        (
            {"worker-0": "u", "worker-1": "v"},
            {0: "h:1", 1: "h:2"},
            {"worker-0", "worker-1"},
            "names set by the user",
        ),
        ({"worker": "http://a"}, {}, {"worker": "http://a"}, "no workers are known yet"),
        ({}, {0: "https://h:1"}, {"worker": "https://h:1/metrics"}, "a worker with TLS"),
        ({}, {0: "https://h:1/x:1", 1: "file://h:1"}, {}, "invalid addresses"),
        ({}, {0: "[::1]:1"}, {"worker": "http://[::1]:1/metrics"}, "nothing is set"),
    ],
)
def test_addresses_reported_by_workers_complete_the_settings(
    settings: dict[str, str], workers: dict[int, str], expected: Collection[str], why: str
) -> None:
    found = with_workers(settings, workers)
    assert (found if isinstance(expected, dict) else found.keys()) == expected, why


def test_a_worker_that_joins_later_is_scraped() -> None:
    workers, scraped_urls = {0: ""}, []

    def fetch(urls: Mapping[str, str | None]) -> dict[str, ScrapedMetrics]:
        scraped_urls.append(dict(urls))
        return {name: scrape.parse(SHARD) for name in urls}

    targets = ScrapeTargets({"worker": "http://w"}, FakeClock(), fetch, lambda: workers)
    targets.scrape()
    workers[1] = "127.0.0.1:9"
    assert targets.figures()["programs"] == {"worker": True, "worker-1": False}, (
        "the new worker was not scraped yet"
    )
    targets.scrape()
    assert scraped_urls[1] == {"worker": "http://w", "worker-1": "http://127.0.0.1:9/metrics"}
    assert targets.figures()["programs"] == {"worker": True, "worker-1": True}
    del workers[1]
    assert targets.figures()["programs"] == {"worker": True}


@pytest.mark.parametrize(
    "url", ["http://[::1:9100/metrics", "http://a..b:9100/metrics", "http://a:99999/metrics", "http://:1/"]
)
def test_an_address_that_is_none_is_a_wrong_setting_and_ends_no_scrape(url: str) -> None:
    """A scrape that raised would end the controller, again and again."""
    common = {"bootstrap": "127.0.0.1:1", "store": "s", "schema": "s.toml", "listen": "127.0.0.1:0"}
    with pytest.raises(ConfigError, match=r"scrape_targets': expected NAME=URL, .*, got 'a=http"):
        ControllerConfig(scrape_targets=(f"a={url}",), num_shards=1, **common)  # type: ignore[arg-type]
    assert not scrape.fetch(url), "a program may report such an address, too"


@pytest.mark.parametrize(
    "page",
    [
        'a{le="0.5", ="y"} 1\n',
        'a{le="0.5",',
        '<html>{"json": 1}</html>',
        'roostream_freshness_seconds_bucket{le="x",stage="engagement_to_close"} 1\n',
    ],
)
def test_a_page_that_has_no_valid_metrics_ends_no_scrape(page: str) -> None:
    targets = ScrapeTargets({"joiner": "http://j"}, FakeClock(), lambda urls: {"joiner": scrape.parse(page)})
    targets.scrape()
    assert targets.figures()["freshness"]["engagement_to_close"] == {"p50_ms": None, "p99_ms": None}


@pytest.mark.parametrize(("sent_bytes", "rows"), [(len(SHARD), 7.0), (len(SHARD) - 2, None)])
def test_an_answer_that_is_cut_off_counts_as_none(sent_bytes: int, rows: float | None) -> None:
    """The 12 pulls at its end would be read as 1."""
    head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(SHARD)}\r\n\r\n"

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(head.encode() + SHARD.encode()[:sent_bytes])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        scraped = scrape.fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", timeout_s=10)
        thread.join()
    assert scraped.value("roostream_shard_rows", stack="d16") == rows
    assert bool(scraped) == (rows is not None)
