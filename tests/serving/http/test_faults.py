"""Faults of what serving depends on (Redis, disk, store, shards, Kafka, clock): requests over a real socket
are still answered."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from param_server.replica.replica import Replica
from param_server.replica.row_cache import CachePolicy, RowCache
from param_server.replica.shard_reads import ShardReads
from roostream.models.build import build_model
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.runtime.manifest import dense_name, store_file
from roostream.runtime.rpc.transport import Answer, InMemoryTransport
from roostream.wire import records as wire
from serving import heartbeat
from serving.feature_log.format import LogRecord
from serving.feature_log.sender import LogSender
from serving.online_features.hydration import Hydrator
from serving.rows.row_follower import RowFollower
from serving.rows.served_rows import CachedRows
from serving.versions.version_follower import VersionFollower
from tests.runtime.manifest_cases import a_manifest
from tests.serving.live_serving import LiveServing, run_live_serving
from tests.serving.rows.test_row_follower import FakeShard
from tests.serving.serving_cases import BODY, MODEL, NOW_MS, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeRows, FakeRowTopic, FakeSink


def rank(live: LiveServing, **changes: Any) -> httpx2.Response:
    return httpx2.post(f"{live.url}/v1/rank", json={**BODY, **changes}, timeout=60)


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening


def test_a_silent_redis_costs_one_timeout(tmp_path: Path, silent_server: socket.socket) -> None:
    clock = FakeClock(NOW_MS)
    hydrator = Hydrator(f"redis://127.0.0.1:{silent_server.getsockname()[1]}/0", "", SCHEMA, clock=clock)
    with run_live_serving(build_serving(tmp_path, FakeRows(SCHEMA), hydrator)) as live:
        answers = [rank(live, ro={}).json() for _ in range(5)]
    assert all(answer["degraded"] for answer in answers)
    silent_server.setblocking(False)
    num_connections = 0
    with pytest.raises(BlockingIOError):
        while True:
            silent_server.accept()[0].close()
            num_connections += 1
    assert 1 <= num_connections <= 4, "after a timeout, the next requests do not try Redis again for a while"


def test_a_full_disk_refuses_requests_and_loses_no_answered_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    serving = build_serving(tmp_path, FakeRows(SCHEMA), max_log_bytes=8 << 20, log_segment_bytes=1 << 20)
    for _ in range(130):  # a segment of 1 MiB has room for 131
        serving.context.log.append(LogRecord("engagements", 0, NOW_MS, b"", bytes(8000)))
    click = {"request_id": "r-0", "item_id": 8, "action": "click"}
    with run_live_serving(serving) as live:
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", no_space)
            num_accepted = 0
            while (answer := rank(live, request_id=f"r-{num_accepted}")).status_code == 200:
                num_accepted += 1
                assert num_accepted < 1000, "the log did not become full"
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert (
                answer.json()["error"]["code"] == "unavailable"
                and "grow" in answer.json()["error"]["message"]
            )
            statuses = {
                httpx2.post(f"{live.url}/v1/engagements", json=click, timeout=60).status_code
                for _ in range(20)
            }
            assert statuses <= {200, 503} and 503 in statuses, (
                "engagements are smaller than the refused request, so some may still fit"
            )
            assert httpx2.get(f"{live.url}/healthz", timeout=60).status_code == 200
        assert rank(live, request_id="after").status_code == 200, (
            "requests are accepted as soon as there is space again"
        )
        logged = [r.value for r in serving.records() if r.topic == "impressions"]
    assert [wire.decode(value)[1].header.request_id for value in logged] == [
        *(f"r-{n}" for n in range(num_accepted)),
        "after",
    ]
    assert num_accepted > 0


def commit(store: FileStore, seq: int, damage: bool = False) -> None:
    weights = {
        f"model.{n}": np.full(t.shape, 0.1 * seq, np.float32)
        for n, t in build_model(SCHEMA, MODEL, 0).state_dict().items()
    }
    file = store_file(store, dense_name(seq, 1), tensor_file.encode(weights, {"seq": str(seq)}))
    if damage:
        path = Path(store.root) / dense_name(seq, 1)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(bytes(data))
    manifest = a_manifest(
        seq, incarnation=1, schema=f"{SCHEMA.fingerprint:016x}", dense=file, model=dataclasses.asdict(MODEL)
    )
    assert store.create(manifest.name, manifest.encode())


def test_a_corrupt_version_is_skipped_and_the_next_valid_one_is_served(tmp_path: Path) -> None:
    serving, store = build_serving(tmp_path, FakeRows(SCHEMA)), FileStore(tmp_path / "commits")
    follower = VersionFollower(store, SCHEMA, serving.service.versions, 0)
    with run_live_serving(serving) as live:
        served = []
        for seq, damage in ((1, False), (2, True), (3, False)):
            commit(store, seq, damage)
            follower.poll()
            served.append(rank(live, ro={}).json()["model_version"])
    assert served == ["1-1", "1-1", "1-3"]


def test_an_unavailable_shard_leaves_the_cache_answering_degraded(tmp_path: Path) -> None:
    def shard(method: str, header: dict[str, Any], arrays: Any) -> Answer:
        if method == "owners":
            return {"incarnation": 1}, []
        dims = [SCHEMA.stacks[stack][0].dim for stack in header["stacks"]]
        rows = [
            np.full((len(ids), dim), 0.5, np.float32) for dim, ids in zip(dims, arrays[1::2], strict=True)
        ]
        found = [(each, np.ones(len(each), np.uint8), np.ones(len(each), np.uint64)) for each in rows]
        return {"incarnation": 1}, [array for parts in found for array in parts]

    clock, transport = FakeClock(NOW_MS), InMemoryTransport(shard)
    cache = RowCache(SCHEMA, 0, ShardReads([transport], 64, 0.05, clock), CachePolicy(max_bytes=1 << 20))
    rows = CachedRows(RowFollower(cache, FakeRowTopic(), [transport], lambda stage, ms: None, clock), cache)
    rows.follower.bootstrap()
    serving = build_serving(tmp_path, rows)
    serving.service.rows_ready, serving.service.rows_complete = (lambda: rows.ready), (lambda: rows.complete)
    uncached = {"candidates": [{"item_id": 77}]}
    with run_live_serving(serving) as live:
        degraded = [rank(live, request_id="r-0").json()["degraded"]]
        transport.down = True
        degraded += [
            rank(live, request_id=f"r-{n}", **more).json()["degraded"] for n, more in ((1, {}), (2, uncached))
        ]
        transport.down = False
        clock.advance(60)
        degraded += [rank(live, request_id="r-3", **uncached).json()["degraded"]]
    assert degraded == [False, False, True, False], (
        "cached rows are served; a missing row makes the answer degraded until its shard is back"
    )


def test_a_replica_with_a_stalled_topic_answers_and_reports_row_age(tmp_path: Path) -> None:
    topic, clock, stop, stalled, resume = (
        FakeRowTopic(),
        FakeClock(NOW_MS),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    follower = RowFollower(
        Replica(SCHEMA, 0), topic, [InMemoryTransport(FakeShard({8: 0.5}))], lambda stage, ms: None, clock
    )
    follower.bootstrap()
    follower.step()
    assert follower.age_s() is not None

    def stall() -> None:
        stalled.set()
        resume.wait(60)

    topic.on_poll = stall
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        assert stalled.wait(60)
        before_s = follower.age_s() or 0.0
        clock.advance(30.0)
        with run_live_serving(build_serving(tmp_path, follower.replica)) as live:
            assert rank(live).status_code == 200
        assert (follower.age_s() or 0.0) >= before_s + 30.0
    finally:
        stop.set()
        resume.set()
        thread.join(60)


@pytest.mark.parametrize("jump_ms", [-86_400_000, 86_400_000], ids=["back by a day", "ahead by a day"])
def test_a_clock_jump_fails_no_request_and_times_never_go_back(tmp_path: Path, jump_ms: int) -> None:
    clock = FakeClock(NOW_MS)
    serving = build_serving(tmp_path, FakeRows(SCHEMA), clock=clock)
    with run_live_serving(serving) as live:
        for n, jump in enumerate((0, jump_ms, 0, -jump_ms, 0)):
            clock.jump(jump)
            clock.advance(1.0)
            assert rank(live, request_id=f"r-{n}").status_code == 200
            heartbeat.beat(serving.context.log, serving.context.watermark, "producer", 1)
        times = [wire.decode(record.value)[1] for record in serving.records()]
    times_ms = [m.header.time_ms if isinstance(m, wire.TYPES[wire.IMPRESSION]) else m.time_ms for m in times]
    assert times_ms == sorted(times_ms) and len(times_ms) >= 10


def test_a_silent_kafka_costs_no_request_and_gets_all_records_in_order_later(tmp_path: Path) -> None:
    serving, delivered = build_serving(tmp_path, FakeRows(SCHEMA)), list[LogRecord]()
    recovered, stop = threading.Event(), threading.Event()

    class UnavailableSink(FakeSink):
        def poll(self, timeout_s: float) -> None:
            if recovered.wait(timeout_s):
                super().poll(timeout_s)

    sender = LogSender(serving.context.log, lambda: UnavailableSink(delivered))
    thread = threading.Thread(target=sender.run, args=(stop,))
    thread.start()
    try:
        with run_live_serving(serving) as live:
            assert all(rank(live, request_id=f"r-{n}").status_code == 200 for n in range(10))
            assert delivered == []
            recovered.set()
            while len(delivered) < 10 and thread.is_alive():
                stop.wait(0.02)
            stop.set()
            thread.join(60)
    finally:
        stop.set()
        thread.join(60)
    assert [wire.decode(record.value)[1].header.request_id for record in delivered] == [
        f"r-{n}" for n in range(10)
    ]
