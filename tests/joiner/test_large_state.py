"""State of ten times the task manager's heap, in RocksDB on a real cluster: the job continues, is restored
from an incremental checkpoint, and joins all of it."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from roostream.schema.ids import key_bytes
from roostream.schema.registry import to_toml
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro
from roostream.wire.records import Record
from tests.joiner.joined_topics import count, produce, wait

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2_000)]

HEAP_MB = 128
WINDOW_MS = 600_000
START_MS = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "name": "wide",
        "tables": {"item": {"dim": 4}},
        "nro": [{"name": "similar", "kind": "ids", "table": "item"}],
        "label": [{"name": "click", "action": "click"}],
    }
)
CANDIDATES = list(range(1, 61))
NUM_SIMILAR = 1_900
NUM_REQUESTS = 10 * (HEAP_MB << 20) // (len(CANDIDATES) * NUM_SIMILAR * 8) + 1


@functools.cache
def block(n: int) -> bytes:
    """Small ids keep the topics small. Random ids keep a fetch of compressed records small."""
    similar = np.random.default_rng(n).integers(1, 4097, (len(CANDIDATES), NUM_SIMILAR))
    return encode_nro(SCHEMA, {"similar": similar.tolist()}, len(CANDIDATES))


def impression_record(n: int) -> Record:
    """An impression of almost a megabyte."""
    header = pb.Header(
        request_id=f"r{n}", user_id=n, session_id=1, time_ms=START_MS + 100 * n, schema=SCHEMA.fingerprint
    )
    value = wire.encode(wire.IMPRESSION, pb.Impression(header=header, item_ids=CANDIDATES, nro=block(n % 16)))
    return Record("impressions", 0, 0, header.time_ms, key_bytes(n, 1, header.request_id), value)


def heartbeats(time_ms: int) -> list[Record]:
    value = wire.encode(wire.HEARTBEAT, pb.Heartbeat(time_ms=time_ms))
    return [Record(topic, 0, 0, time_ms, bytes(8), value) for topic in ("impressions", "engagements")]


def test_a_job_with_state_of_ten_times_its_heap_continues(tmp_path: Path) -> None:
    from infra.options import StackOptions
    from infra.stack import Stack
    from roostream.runtime.flink_rest import FlinkRest

    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    options = StackOptions(
        schema=tmp_path / "schema.toml",
        replay=True,
        partitions=1,
        flink={
            "taskmanager.memory.task.heap.size": f"{HEAP_MB // 2}m",
            "taskmanager.memory.framework.heap.size": f"{HEAP_MB // 2}m",
        },
        overrides={"joiner": {"window_ms": WINDOW_MS, "state_backend": "rocksdb"}},
    )
    with Stack(tmp_path / "stack", options) as stack:
        stack.start(["kafka", "joiner"])
        stack.wait_ready("kafka", timeout_s=90)
        kafka, flink = stack.endpoints.kafka, FlinkRest(stack.endpoints.flink)
        for begin in range(0, NUM_REQUESTS, 50):
            produce(kafka, "", [impression_record(n) for n in range(begin, min(begin + 50, NUM_REQUESTS))])
        last_ms = START_MS + 100 * NUM_REQUESTS
        produce(kafka, "", heartbeats(last_ms))
        stack.wait_ready("joiner", timeout_s=150)
        job = flink.live_job()
        assert job is not None

        def value(name: str) -> float:
            return flink.gauges(job["jid"]).values.get(name, 0.0)

        wait("all requests in the state", lambda: value("requests_open") == NUM_REQUESTS, 900)
        assert value("restarts") == 0
        assert NUM_REQUESTS * len(impression_record(0).value) >= 10 * HEAP_MB << 20
        checkpoints = value("checkpoints")
        wait("a checkpoint of all requests", lambda: value("checkpoints") > checkpoints + 1)
        stack.kill("flink-tm-0")
        produce(kafka, "", heartbeats(last_ms + WINDOW_MS + 10_000))
        wait("a sample of each request", lambda: count(kafka, "", "samples", 1) >= NUM_REQUESTS, 900)
