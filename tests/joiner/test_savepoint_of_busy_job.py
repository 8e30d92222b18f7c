"""A savepoint on a real cluster while one source is busy and another one is idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roostream.runtime.flink_rest import FlinkRest
from roostream.schema.registry import to_toml
from roostream.wire import roo_pb2 as pb
from tests.joiner.cases import SCHEMA, impression, record
from tests.joiner.joined_topics import SETTINGS, produce, wait

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 60_000
TIME_MS = 1_000_000


def waiting_sources(flink: FlinkRest) -> list[bool]:
    """For each subtask that reads impressions, whether it waits for the join most of the time. Empty while no
    job runs."""
    job = flink.live_job()
    described: dict[str, Any] = (job and flink.get(f"/jobs/{job['jid']}")) or {}
    for vertex in described.get("vertices", []):
        if "impressions" in vertex["name"]:
            names = ",".join(f"{n}.backPressuredTimeMsPerSecond" for n in range(2))
            found = flink.get(f"/jobs/{described['jid']}/vertices/{vertex['id']}/metrics?get={names}") or {}
            return [
                float(m.get("value", 0)) > 500 for m in sorted(found.get("list", []), key=lambda m: m["id"])
            ]
    return []


def test_a_job_stops_with_a_savepoint_while_one_of_two_partitions_has_a_backlog(tmp_path: Path) -> None:
    from infra.options import StackOptions
    from infra.stack import Stack

    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    settings = {**SETTINGS, "checkpoint_interval_ms": 60_000}
    options = StackOptions(
        schema=tmp_path / "schema.toml",
        replay=True,
        partitions=2,
        num_task_managers=2,
        overrides={"joiner": settings},
    )
    with Stack(tmp_path / "stack", options) as stack:
        stack.start(["kafka", "joiner"])
        stack.wait_ready("kafka", timeout_s=300)
        kafka, flink = stack.endpoints.kafka, FlinkRest(stack.endpoints.flink)
        backlog = [
            record(impression(TIME_MS + n // 10, request=f"r{n}", user=n % 1_000 + 1))._replace(partition=0)
            for n in range(NUM_REQUESTS)
        ]
        end_ms = TIME_MS + NUM_REQUESTS // 10
        heartbeats = [
            record(pb.Heartbeat(time_ms=end_ms))._replace(topic=topic, partition=partition, key=bytes(8))
            for topic, partition in (("impressions", 1), ("engagements", 0), ("engagements", 1))
        ]
        produce(kafka, "", [*heartbeats, *backlog])
        wait("one busy source and one idle source", lambda: waiting_sources(flink) == [True, False], 300)
        job = flink.live_job()
        assert job is not None
        savepoints = tmp_path / "stack" / "flink" / "savepoints"
        written = flink.stop_with_savepoint(job["jid"], savepoints.as_uri(), 240)
        assert Path(written.removeprefix("file:")).is_relative_to(savepoints)
