"""One request as an OpenTelemetry collector receives it: the span of serving and the spans of `roostream
trace`, sent by OpenTelemetry's own SDK and exporter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry import trace
from starlette.testclient import TestClient

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from roostream.cli.request_trace import RequestTrace
from roostream.cli.trace_command import export_spans
from roostream.runtime.kafka.topics import IMPRESSIONS, PREDICTIONS, ROWS, SAMPLES
from roostream.runtime.store_identity import init_store
from roostream.schema.registry import to_toml
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from serving.http.app import HttpInterface
from tests.contract.source_tree import ROOT
from tests.serving.serving_cases import BODY, NOW_MS, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEYS = frozenset({(1, 8)})


@pytest.fixture
def collector() -> Iterator[Any]:
    pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed; make setup")
    from tests.cli.otlp_collector import Collector

    with Collector() as running:
        yield running


def make_sdk(name: str, collector: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configure OpenTelemetry's SDK as a program does from its environment."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def logged_impression(serving: InProcessServing) -> Record:
    (found,) = serving.records()
    return Record(IMPRESSIONS, 0, 41, NOW_MS, found.key, found.value)


def joined(impression: Record) -> Record:
    engine = LocalEngine(JoinerConfig(engine="local", partitions=1), SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get)
    outputs = [*engine.process(impression), *engine.end_of_input()]
    (sample,) = [output for output in outputs if output.topic == SAMPLES]
    return Record(SAMPLES, 0, 42, NOW_MS, sample.key, sample.value)


def training_records(sample: Record) -> list[Record]:
    """Return the records that a worker and a shard write for this sample."""
    _, message = wire.decode(sample.value)
    assert isinstance(message, pb.Sample)
    (table, key), *_ = KEYS
    delta = pb.RowDelta(bucket=3, table_id=table, ids=[key], oldest_close_ms=message.close_ms)
    prediction = wire.encode(wire.PREDICTION, pb.Prediction(sample_id=message.sample_id, step=7))
    values = {PREDICTIONS: prediction, ROWS: wire.encode(wire.ROW_DELTA, delta)}
    return [
        Record(topic, 0, offset, NOW_MS, b"", value)
        for offset, (topic, value) in enumerate(values.items(), 43)
    ]


def test_a_collector_gets_one_request_as_one_trace(
    collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdks = {
        f"roostream.{name}": make_sdk(f"roostream-{name}", collector, monkeypatch)
        for name in ("serving", "trace")
    }
    monkeypatch.setattr(trace, "get_tracer", lambda name: sdks[name].get_tracer(name))
    serving = build_serving(tmp_path, FakeRows(SCHEMA), tracing=True)
    response = TestClient(HttpInterface(serving.context)).post(
        "/v1/rank", json=BODY, headers={"traceparent": f"00-{TRACE}-{CALLER}-01"}
    )
    impression = logged_impression(serving)
    serving.close()
    sample = joined(impression)
    request_trace = RequestTrace("r-1", lambda record: KEYS)
    for at_ms, record in enumerate((impression, sample, *training_records(sample)), NOW_MS):
        request_trace.add(record, at_ms)
    assert response.status_code == 200 and request_trace.is_complete
    assert export_spans(request_trace, request_trace.traceparent, NOW_MS - 5) == 4
    for sdk in sdks.values():
        sdk.shutdown()
    chain = collector.of(TRACE)
    assert len(chain) == len(collector.spans) == 5 and chain[0].parent == CALLER
    assert request_trace.traceparent == f"00-{TRACE}-{chain[0].span}-01", (
        "the records in Kafka carry serving's own span"
    )
    assert [(span.service, span.name, span.kind) for span in chain] == [
        ("roostream-serving", "POST /v1/rank", "server"),
        ("roostream-trace", "serving logged", "consumer"),
        ("roostream-trace", "joiner joined", "consumer"),
        ("roostream-trace", "worker trained", "consumer"),
        ("roostream-trace", "shard published", "consumer"),
    ]
    check_attributes([span.attributes for span in chain])
    ms = 1_000_000
    assert [(span.begin_ns, span.end_ns) for span in chain[1:]] == [
        ((NOW_MS - 5) * ms, NOW_MS * ms),
        (NOW_MS * ms, (NOW_MS + 1) * ms),
        ((NOW_MS + 1) * ms, (NOW_MS + 2) * ms),
        ((NOW_MS + 2) * ms, (NOW_MS + 3) * ms),
    ]


def check_attributes(attributes: list[dict[str, Any]]) -> None:
    """Assert that attributes have OpenTelemetry's standard names, or names that begin with `roostream.`."""
    request, logged, joined, trained, published = attributes
    assert request == {
        "http.request.method": "POST",
        "url.path": "/v1/rank",
        "http.response.status_code": 200,
    }
    topics = [(IMPRESSIONS, 41), (SAMPLES, 42), (PREDICTIONS, 43), (ROWS, 44)]
    for step, (topic, offset) in zip((logged, joined, trained, published), topics, strict=True):
        assert step["messaging.system"] == "kafka" and step["messaging.destination.name"] == topic
        assert step["messaging.kafka.offset"] == offset and step["messaging.destination.partition.id"] == "0"
        assert step["roostream.request_id"] == "r-1"
    assert logged["roostream.candidates"] == 3 and joined["roostream.closed_by"].startswith("CLOSE_")
    assert trained["roostream.step"] == 7 and published["roostream.bucket"] == 3
    assert logged["roostream.traceparent"] == joined["roostream.traceparent"]


def test_a_caller_without_sampling_exports_no_span(
    collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = make_sdk("roostream-serving", collector, monkeypatch)
    monkeypatch.setattr(trace, "get_tracer", sdk.get_tracer)
    serving = build_serving(tmp_path, FakeRows(SCHEMA), tracing=True)
    TestClient(HttpInterface(serving.context)).post(
        "/v1/rank", json=BODY, headers={"traceparent": f"00-{TRACE}-{CALLER}-00"}
    )
    _, impression = wire.decode(logged_impression(serving).value)
    serving.close()
    sdk.shutdown()
    assert (
        collector.spans == []
        and isinstance(impression, pb.Impression)
        and impression.header.traceparent == ""
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_serving_started_as_documented_sends_its_span_to_a_collector(collector: Any, tmp_path: Path) -> None:
    """Run the command and the environment variables that docs/http.md prints. Kafka, Redis and the shards are
    unreachable.
    """
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    (variables,) = re.findall(r"^export OTEL_EXPORTER.*$", page, re.MULTILINE)
    (describe_step,) = re.findall(r"^OTEL_SERVICE.* serving .*$", page, re.MULTILINE)
    documented_variables = dict(
        word.split("=", 1) for word in (*variables.split()[1:], *describe_step.split()) if "=" in word
    )
    assert (
        documented_variables["OTEL_SERVICE_NAME"] == "roostream-serving"
        and " opentelemetry-instrument -- roostream serving --config" in describe_step
    )
    (tmp_path / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    init_store(tmp_path / "store")
    settings = {
        "listen": "127.0.0.1:0",
        "schema": "schema.toml",
        "store": "store",
        "home": "home",
        "bootstrap": "127.0.0.1:1",
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (tmp_path / "serving.toml").write_text(
        f'{text}shards = ["127.0.0.1:1"]\nredis = "redis://127.0.0.1:1/0"\ntracing = true\n'
    )
    command = (
        Path(sys.executable).with_name("opentelemetry-instrument"),
        "--",
        sys.executable,
        "-m",
        "roostream.cli.main",
        "serving",
    )
    environ = {
        **os.environ,
        **documented_variables,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "PYTHONPATH": str(ROOT),
    }
    environ |= {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    log = tmp_path / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            (*command, "--config", "serving.toml"), env=environ, cwd=tmp_path, stderr=out
        ) as serving,
    ):
        try:
            end_s = time.monotonic() + 600  # its imports are slow on a busy machine
            while (
                not (found := re.search(r"serving on (http://[^,\s]+)", log.read_text()))
                and time.monotonic() < end_s
            ):
                time.sleep(0.2)
            assert found, log.read_text()[-2000:]
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            answer = httpx2.post(f"{found[1]}/v1/rank", json={**BODY, "ro": {}}, headers=headers, timeout=300)
            serving.terminate()
            assert answer.status_code == 200 and serving.wait(300) == 0, log.read_text()[-2000:]
        finally:
            serving.kill()
    (span,) = collector.of(TRACE)
    assert (span.service, span.name, span.parent) == ("roostream-serving", "POST /v1/rank", CALLER)
    assert span.attributes["http.response.status_code"] == 200
