"""Turning a log into Kafka records: their order, heartbeats, end markers and pace, and the example in the
documentation."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from roostream.replay import jsonl_log as jsonl
from roostream.replay.config import ReplayConfig
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Request, in_time_order
from roostream.replay.log_lines import LogError
from roostream.replay.replay_log import open_log, paced, records, settle_ms
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.topics import EVENTS
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "price"}],
        "label": [{"name": "click", "action": "click"}],
    }
)


def request(number: int, seconds: float, **fields: object) -> Request:
    return Request(f"r{number}", number, 0, T0 + round(seconds * 1000), np.array([1, 2]), **fields)  # type: ignore[arg-type]


def click(number: int, seconds: float) -> Action:
    return Action(f"r{number}", number, 0, T0 + round(seconds * 1000), number, 1, "click")


def kinds(stream: list[Record]) -> Counter[tuple[str, int]]:
    return Counter((r.topic, wire.kind_of(r.value)) for r in stream)


def test_actions_are_merged_between_requests_by_time() -> None:
    groups = [
        (request(1, 0), [click(1, 9), click(1, 2)]),
        (request(2, 2), [click(2, 3)]),
        (request(3, 10), []),
    ]
    merged = [(type(e).__name__, (e.time_ms - T0) // 1000) for e in in_time_order(groups)]
    assert merged == [
        ("Request", 0),
        ("Request", 2),
        ("Action", 2),
        ("Action", 3),
        ("Action", 9),
        ("Request", 10),
    ]


def test_every_event_is_a_record_and_every_partition_gets_an_end_marker() -> None:
    stream = list(records([request(1, 0), click(1, 1)], ReplayEncoder(SCHEMA), settle_ms=5000))
    assert kinds(stream) == {
        ("impressions", 1): 1,
        ("engagements", 2): 1,
        ("impressions", 7): 4,
        ("engagements", 7): 4,
    }
    ends = [r for r in stream if wire.kind_of(r.value) == wire.END_MARKER]
    assert {(r.topic, r.partition) for r in ends} == {(t, p) for t in EVENTS for p in range(4)}
    assert {r.timestamp_ms for r in ends} == {T0 + 6000}


def test_every_partition_gets_heartbeats() -> None:
    events = [request(n, 100 * n) for n in range(10)]
    stream = list(records(events, ReplayEncoder(SCHEMA), settle_ms=0, heartbeat_ms=300_000))
    beats = [r for r in stream if wire.kind_of(r.value) == wire.HEARTBEAT]
    assert len(beats) == 3 * 8
    last: dict[tuple[str, int], int] = {}
    for r in stream:
        assert r.timestamp_ms >= last.get((r.topic, r.partition), 0), (
            "no record may be older than an earlier heartbeat of its partition"
        )
        last[r.topic, r.partition] = r.timestamp_ms


def test_records_are_paced_by_event_time_and_end_markers_are_not_delayed() -> None:
    clock = FakeClock()
    stream = records(
        [request(1, 0), request(2, 600)], ReplayEncoder(SCHEMA), settle_ms=10**9, heartbeat_ms=10**9
    )
    assert len(list(paced(stream, 60.0, clock))) == 10
    assert clock.monotonic_s() == pytest.approx(10.0)
    unpaced_clock = FakeClock()
    list(
        paced(
            records([request(1, 0), request(2, 600)], ReplayEncoder(SCHEMA), settle_ms=0), 0.0, unpaced_clock
        )
    )
    assert unpaced_clock.monotonic_s() == 0


def test_a_stopped_replay_ends_immediately() -> None:
    stop = threading.Event()
    stream = paced(
        records([request(n, n) for n in range(9)], ReplayEncoder(SCHEMA), settle_ms=0), 0.0, FakeClock(), stop
    )
    next(stream)
    stop.set()
    assert list(stream) == []


def example(tmp_path: Path) -> tuple[str, str]:
    """Write the log and the schema of docs/bring-your-own-data.md to files; return their paths."""
    page = (Path(__file__).parents[2] / "docs" / "bring-your-own-data.md").read_text()
    files = []
    for language in ("jsonl", "toml"):
        files.append(tmp_path / f"shop.{language}")
        files[-1].write_text(page.split(f"```{language}\n")[1].split("```")[0])
    return str(files[0]), str(files[1])


def test_the_example_of_the_documentation_is_replayed(tmp_path: Path) -> None:
    from roostream.schema.schema_file import load_schema
    from roostream.wire.block import decode_block

    log, toml = example(tmp_path)
    config = ReplayConfig(dataset="jsonl", options=jsonl.Options(log=(log,)), schema=toml)
    schema = load_schema(toml)
    stream = list(open_log(config, schema).records)
    assert kinds(stream)["impressions", wire.IMPRESSION] == 3
    assert kinds(stream)["engagements", wire.ENGAGEMENT] == 3
    shown = [wire.decode(r.value)[1] for r in stream if wire.kind_of(r.value) == wire.IMPRESSION]
    first = shown[0]
    assert isinstance(first, pb.Impression)
    nro = decode_block(schema, "nro", first.nro, 3)
    assert nro["price"][:2].tolist() == [80.0, 5.0] and np.isnan(nro["price"][2])
    assert [np.array(ids, np.int64).view(np.uint64).tolist() for ids in nro["article"]] == [
        [i] for i in first.item_ids
    ]


def test_lines_with_features_that_do_not_fit_are_reported_or_skipped(tmp_path: Path) -> None:
    log, toml = example(tmp_path)
    line = {
        "type": "impression",
        "request_id": "x",
        "time": T0,
        "candidates": [{"item_id": 1, "price": "dear"}],
    }
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(line) + "\n")
    from roostream.schema.schema_file import load_schema

    schema = load_schema(toml)

    def config(skip_bad: bool = False) -> ReplayConfig:
        options = jsonl.Options(log=(str(bad), log), skip_bad=skip_bad)
        return ReplayConfig(dataset="jsonl", options=options, schema=toml)

    with pytest.raises(LogError, match=r"bad.jsonl:1: feature 'price': expected a number, got 'dear'"):
        list(open_log(config(), schema).records)
    skipping_log = open_log(config(skip_bad=True), schema)
    assert kinds(list(skipping_log.records))["impressions", wire.IMPRESSION] == 3
    assert skipping_log.skipped()[0] == 1 and "bad.jsonl:1" in skipping_log.skipped().first[0]


def test_the_end_marker_is_later_than_any_late_event() -> None:
    config = ReplayConfig(
        dataset="jsonl",
        options=jsonl.Options(log=(__file__,)),
        schema=__file__,
        window_ms=60_000,
        lateness_ms=2000,
    )
    assert settle_ms(config) > 10 * 60_000 + 2000
