"""A savepoint of the joiner's state, on a real cluster: the next job goes on from it, and nothing is joined twice or lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from roo.schema_registry import to_toml
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, seen
from tests.joiner.joined_topics import SETTINGS, count, distinct, produce, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RECORDS = generated.arrivals(12)
HALF = len(RECORDS) // 2


def expected() -> dict[object, bytes]:
    """Sample id → sample, as the same join gives it in this process."""
    engine = LocalEngine(JoinerConfig(**generated.SETTINGS), SCHEMA, SCHEMAS.get)  # type: ignore[arg-type]
    outputs = [o for r in generated.placed(RECORDS) for o in engine.process(r)]
    return {seen(o).message.sample_id: o.value for o in outputs if o.topic == "samples"}


def test_a_job_goes_on_from_a_savepoint_with_requests_in_every_phase(tmp_path: Path) -> None:
    from infra.options import StackOptions
    from infra.stack import Stack
    from runtime.flink_rest import FlinkRest

    samples = expected()
    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    options = StackOptions(schema=tmp_path / "schema.toml", replay=True, overrides={"joiner": SETTINGS})
    with Stack(tmp_path / "stack", options) as stack:
        stack.start(["kafka", "joiner"])
        stack.wait_ready("kafka", timeout_s=60)
        kafka = stack.endpoints.kafka
        produce(kafka, "", RECORDS[:HALF])
        stack.wait_ready("joiner", timeout_s=90)
        wait("a first sample and correction", lambda: count(kafka, "", "samples") > 20 and count(kafka, "", "corrections") > 0)
        flink = FlinkRest(stack.endpoints.flink)
        first = flink.live_job()
        assert first is not None
        savepoint = flink.stop_with_savepoint(first["jid"], (tmp_path / "stack" / "flink" / "savepoints").as_uri(), 60)
        produce(kafka, "", RECORDS[HALF:])
        wait("the last sample", lambda: count(kafka, "", "samples") >= len(samples))
        second = flink.live_job()
        assert second is not None and second["jid"] != first["jid"]
        restored = flink.get(f"/jobs/{second['jid']}/checkpoints")
        assert restored is not None and restored["latest"]["restored"]["external_path"] in savepoint
        assert count(kafka, "", "samples") == len(samples), "each was written once"
        assert {i: row[3] for i, row in distinct(kafka, "", "samples").items()} == samples
