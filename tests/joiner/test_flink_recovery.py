"""The joiner's job on a real cluster: more task managers than partitions, a checkpoint folder that can't be
written, a stop with `drain`, and events with wrong times right after a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from roostream.schema.ids import key_bytes
from roostream.schema.registry import to_toml
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, engagement, impression, record, view_of
from tests.joiner.joined_topics import SETTINGS, consume, produce, wait

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

RECORDS = [r._replace(partition=0) for r in generated.arrivals(12) if r.partition <= 0]
HALF = len(RECORDS) // 2
REACHED_MS = RECORDS[-1].timestamp_ms
HOUR_MS = 3_600_000


def on_every_partition(message: pb.Impression | pb.Engagement | pb.Heartbeat) -> list[Record]:
    """A copy of the message in the one partition of each event topic."""
    return [record(message)._replace(topic=topic, key=bytes(8)) for topic in ("impressions", "engagements")]


def expected_samples() -> int:
    engine = LocalEngine(JoinerConfig(**generated.SETTINGS, partitions=1), SCHEMA, SCHEMAS.get)  # type: ignore[arg-type]
    outputs = [o for n, r in enumerate(RECORDS) for o in engine.process(r._replace(offset=n))]
    return len({view_of(o).message.sample_id for o in outputs if o.topic == "samples"})


def request_ids(kafka: str, topic: str) -> set[str]:
    found: set[str] = set()
    for message in consume(kafka, "", topic, 1):
        value: Any = wire.decode(message.value())[1]
        found.add(value.header.request_id if topic == "samples" else value.request_id)
    return found


def test_a_job_survives_failed_checkpoints_a_drain_and_wrong_clocks(tmp_path: Path) -> None:
    from infra.options import StackOptions
    from infra.stack import Stack
    from roostream.runtime.flink_rest import FlinkRest

    home = tmp_path / "stack"
    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    settings = {**SETTINGS, "checkpoint_interval_ms": 1_000, "state_backend": "rocksdb"}
    options = StackOptions(
        schema=tmp_path / "schema.toml",
        replay=True,
        partitions=1,
        num_task_managers=2,
        overrides={"joiner": settings},
    )
    with Stack(home, options) as stack:
        stack.start(["kafka", "joiner"])
        stack.wait_ready("kafka", timeout_s=90)
        kafka, flink = stack.endpoints.kafka, FlinkRest(stack.endpoints.flink)
        produce(kafka, "", RECORDS[:HALF])
        stack.wait_ready("joiner", timeout_s=150)
        wait("samples, although one task manager has no partition", lambda: request_ids(kafka, "samples"))

        job = flink.live_job()
        assert job is not None
        folder = home / "flink" / "checkpoints" / job["jid"]
        moved_folder = folder.with_name("aside")
        wait("a checkpoint", lambda: folder.exists() and flink.gauges(job["jid"]).values["checkpoints"])
        folder.rename(moved_folder)
        folder.write_text("no checkpoint can be written here", encoding="utf-8")
        before = flink.gauges(job["jid"]).values["failed_checkpoints"]
        wait("failed checkpoints", lambda: flink.gauges(job["jid"]).values["failed_checkpoints"] > before + 2)
        produce(kafka, "", RECORDS[HALF:])
        num_samples = expected_samples()
        wait("all samples", lambda: len(request_ids(kafka, "samples")) == num_samples)
        assert flink.gauges(job["jid"]).values["restarts"] == 0
        folder.unlink()
        moved_folder.rename(folder)

        savepoints = (home / "flink" / "savepoints").as_uri()
        flink.post(f"/jobs/{job['jid']}/stop", {"targetDirectory": savepoints, "drain": True})
        # After the restore, the first event in every partition comes from a client with a wrong clock.
        wrong = [
            record(m)._replace(partition=0)
            for m in (
                impression(REACHED_MS + 9 * HOUR_MS, request="wrong"),
                engagement(REACHED_MS + 9 * HOUR_MS, event=1, request="wrong"),
            )
        ]
        beats = [pb.Heartbeat(time_ms=REACHED_MS + n * 10_000) for n in range(1, 5)]
        new = record(impression(REACHED_MS + 5_000, request="new"))._replace(partition=0)
        assert new.key == key_bytes(17, 4, "new")
        produce(kafka, "", [*wrong, *on_every_partition(beats[0]), new])
        produce(kafka, "", [r for beat in beats[1:] for r in on_every_partition(beat)])
        wait("a sample of the next job", lambda: "new" in request_ids(kafka, "samples"))
        assert not {"new", "wrong"} & request_ids(kafka, "dead_letters")
