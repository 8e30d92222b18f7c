"""A savepoint of the joiner's state on a real cluster. The next job continues from it, nothing is joined
twice or lost, and every output is written exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import EVENTS, TopicSettings
from roostream.schema.registry import to_toml
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, record, view_of
from tests.joiner.joined_topics import SETTINGS, consume, distinct, produce, wait

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

RECORDS = generated.arrivals(12)
HALF = len(RECORDS) // 2


def message_of(value: bytes) -> pb.Sample:
    message = wire.decode(value)[1]
    assert isinstance(message, pb.Sample)
    return message


def expected(records: list[Record] = RECORDS) -> dict[object, bytes]:
    """Sample id → sample, as the local engine computes it."""
    engine = LocalEngine(JoinerConfig(**generated.SETTINGS), SCHEMA, SCHEMAS.get)  # type: ignore[arg-type]
    outputs = [o for r in generated.with_offsets(records) for o in engine.process(r)]
    return {view_of(o).message.sample_id: o.value for o in outputs if o.topic == "samples"}


def forgotten_impressions(reached_ms: int) -> list[Record]:
    """The impressions of requests that are forgotten once event time has reached `reached_ms`."""
    end_ms = generated.WINDOW_MS + 2 * generated.HORIZON_MS
    impressions = [m for m in generated.messages(12) if isinstance(m, pb.Impression)]
    return [record(m, partition=-1) for m in impressions if m.header.time_ms + end_ms <= reached_ms]


def test_a_job_continues_from_a_savepoint_with_requests_in_every_phase(tmp_path: Path) -> None:
    from infra.options import StackOptions
    from infra.stack import Stack
    from roostream.runtime.flink_rest import FlinkRest

    samples = expected()
    halfway = expected(RECORDS[:HALF])
    copies = forgotten_impressions(max(sample.close_ms for sample in map(message_of, halfway.values())))
    assert copies, "there must be impressions to send again"
    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    overrides = {"joiner": {**SETTINGS, "delivery": "exactly_once", "checkpoint_interval_ms": 1_000}}
    options = StackOptions(schema=tmp_path / "schema.toml", replay=True, overrides=overrides)
    with Stack(tmp_path / "stack", options) as stack:
        stack.start(["kafka", "joiner"])
        stack.wait_ready("kafka", timeout_s=60)
        kafka = stack.endpoints.kafka
        produce(kafka, "", RECORDS[:HALF])
        stack.wait_ready("joiner", timeout_s=90)
        wait("all samples so far", lambda: len(consume(kafka, "", "samples")) == len(halfway))
        flink = FlinkRest(stack.endpoints.flink)
        first = flink.live_job()
        assert first is not None
        savepoint = flink.stop_with_savepoint(
            first["jid"], (tmp_path / "stack" / "flink" / "savepoints").as_uri(), 60
        )
        produce(kafka, "", [*copies, *RECORDS[HALF:]])
        wait("the last sample", lambda: len(consume(kafka, "", "samples")) >= len(samples))
        second = flink.live_job()
        assert second is not None and second["jid"] != first["jid"]
        restored = flink.get(f"/jobs/{second['jid']}/checkpoints")
        assert restored is not None and restored["latest"]["restored"]["external_path"] in savepoint
        assert len(consume(kafka, "", "samples")) == len(samples), "each sample must be written once"
        assert {i: row[3] for i, row in distinct(kafka, "", "samples").items()} == samples
        refused = [wire.decode(m.value())[1] for m in consume(kafka, "", "dead_letters")]
        late = {m.raw for m in refused if isinstance(m, pb.DeadLetter) and m.reason == "too_late"}
        assert {r.value for r in copies} <= late, (
            "the watermark must be restored, so that no old event counts as new"
        )


def test_a_job_refuses_a_savepoint_of_topics_that_were_created_again(tmp_path: Path) -> None:
    from infra.options import StackOptions
    from infra.stack import Stack
    from roostream.runtime.flink_rest import FlinkRest

    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    options = StackOptions(schema=tmp_path / "schema.toml", replay=True, overrides={"joiner": SETTINGS})
    with Stack(tmp_path / "stack", options) as stack:
        stack.start(["kafka", "joiner"])
        stack.wait_ready("kafka", timeout_s=60)
        kafka = stack.endpoints.kafka
        produce(kafka, "", RECORDS)
        stack.wait_ready("joiner", timeout_s=90)
        wait("samples", lambda: consume(kafka, "", "samples"))
        flink = FlinkRest(stack.endpoints.flink)
        job = flink.live_job()
        assert job is not None
        stack.stop_program("joiner")
        flink.stop_with_savepoint(job["jid"], (tmp_path / "stack" / "flink" / "savepoints").as_uri(), 60)
        topics = TopicAdmin(clients.admin(Broker(kafka)), "", options.partitions, TopicSettings(), EVENTS)
        for deleted in topics.client.delete_topics(["impressions", "engagements"]).values():
            deleted.result(30)
        wait("both topics", lambda: sorted(topics.create()) == ["engagements", "impressions"])
        produce(kafka, "", RECORDS[:HALF])
        stack.start(["joiner"])

        wait("its reason", lambda: "created again" in stack.log_path("joiner").read_text(encoding="utf-8"))
        assert stack.state("joiner") != "ready"
