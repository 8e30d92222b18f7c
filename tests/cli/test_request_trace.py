"""`roostream trace` follows one request through the Kafka topics. These tests make the records themselves."""

from __future__ import annotations

import itertools

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from roostream.cli.request_trace import STEPS, RequestTrace
from roostream.cli.trace_command import TOPICS, describe_step, export, export_spans, follow
from roostream.errors import ConfigError, SetupError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import IMPRESSIONS, PREDICTIONS, ROWS, SAMPLES
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

KEYS = frozenset({(3, 17), (3, 18)})
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
offsets = itertools.count()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return an in-memory exporter that receives all spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry.trace, "get_tracer", provider.get_tracer)
    return exporter


def record(topic: str, kind: int, message: object) -> Record:
    return Record(topic, 0, next(offsets), 1000, b"", wire.encode(kind, message))  # type: ignore[arg-type]


def impression(request_id: str = "r-1", traceparent: str = "") -> Record:
    header = pb.Header(request_id=request_id, model_version="1-2", traceparent=traceparent)
    return record(IMPRESSIONS, wire.IMPRESSION, pb.Impression(header=header, item_ids=[1, 2]))


def sample(request_id: str = "r-1", sample_id: int = 9, traceparent: str = "") -> Record:
    header = pb.Header(request_id=request_id, traceparent=traceparent)
    message = pb.Sample(header=header, sample_id=sample_id, close_ms=500, close_reason=pb.CLOSE_WINDOW)
    return record(SAMPLES, wire.SAMPLE, message)


def prediction(sample_id: int = 9) -> Record:
    return record(PREDICTIONS, wire.PREDICTION, pb.Prediction(sample_id=sample_id, step=7))


def delta(key: int = 17, oldest_close_ms: int = 500, num_tombstones: int = 0) -> Record:
    message = pb.RowDelta(
        bucket=4, table_id=3, ids=[key], oldest_close_ms=oldest_close_ms, num_tombstones=num_tombstones
    )
    return record(ROWS, wire.ROW_DELTA, message)


def trace_of(*records: Record) -> RequestTrace:
    trace = RequestTrace("r-1", lambda record: KEYS)
    for at_ms, one in enumerate(records, 100):
        trace.add(one, at_ms)
    return trace


def test_a_request_is_traced_through_four_steps() -> None:
    trace = trace_of(impression(), sample(), prediction(), delta())
    assert trace.is_complete and list(trace.steps) == list(STEPS)
    assert [step.reached_ms for step in trace.steps.values()] == [100, 101, 102, 103]
    assert trace.steps["joined"].details == {"closed_by": "CLOSE_WINDOW", "engagements": 0}
    assert trace.steps["trained"].details == {"step": 7, "became": "DISPOSITION_TRAINED"}


def test_rows_published_before_the_workers_prediction_are_not_missed() -> None:
    trace = trace_of(impression(), sample(), delta(), prediction())
    assert trace.is_complete and trace.steps["published"].reached_ms == 102


@pytest.mark.parametrize(
    "other",
    [
        impression("r-2"),
        sample("r-2"),
        prediction(8),
        delta(key=99),
        delta(oldest_close_ms=501),  # only requests that closed later have changed the row
        delta(oldest_close_ms=0),
        delta(num_tombstones=1),
        Record(ROWS, 0, 0, 0, b"", b"\x08no record"),
    ],
)
def test_records_of_other_requests_are_ignored(other: Record) -> None:
    trace = trace_of(other, impression(), other, sample(), other, prediction(), other)
    assert list(trace.steps) == list(STEPS[:3])


def test_rows_published_before_the_join_are_ignored() -> None:
    assert list(trace_of(impression(), delta(), sample(), prediction()).steps) == list(STEPS[:3])


def test_repeated_records_count_once() -> None:
    trace = trace_of(
        impression(), impression(), sample(), sample(), prediction(), prediction(), delta(), delta()
    )
    assert [step.reached_ms for step in trace.steps.values()] == [100, 102, 104, 106]


def test_a_trace_ends_when_complete_or_at_the_timeout() -> None:
    partitions = tuple((topic, 0) for topic in TOPICS)
    printed: list[str] = []
    clock = FakeClock()
    trace = trace_of()
    records = [r._replace(offset=0) for r in (impression(), sample(), prediction(), delta())]
    follow(trace, MemoryConsumer(partitions, records), clock, 5.0, printed.append)
    assert (
        sorted(printed) == sorted(STEPS)
        and describe_step(trace, "logged", clock.now_ms()).split()[0] == "logged"
    )


def test_without_a_valid_parent_span_nothing_is_exported() -> None:
    with pytest.raises(ConfigError, match="W3C Trace Context"):
        export_spans(trace_of(impression()), "nonsense", 90)


def test_a_missing_opentelemetry_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    with pytest.raises(SetupError, match=r"roostream\[opentelemetry\]"):
        export_spans(trace_of(impression()), PARENT, 90)


def test_steps_are_exported_as_nested_spans_in_the_callers_trace(exported: InMemorySpanExporter) -> None:
    assert export_spans(trace_of(impression(), sample(), prediction(), delta()), PARENT, 90) == 4
    spans, ms = exported.get_finished_spans(), 1_000_000
    assert [(span.name, span.start_time, span.end_time) for span in spans] == [
        ("serving logged", 90 * ms, 100 * ms),
        ("joiner joined", 100 * ms, 101 * ms),
        ("worker trained", 101 * ms, 102 * ms),
        ("shard published", 102 * ms, 103 * ms),
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    parents = [span.parent.span_id if span.parent else 0 for span in spans]
    assert parents == [int(SPAN, 16), *(span.context.span_id for span in spans[:-1])]


def test_a_traced_request_contains_its_parent_span() -> None:
    trace = trace_of(impression(traceparent=PARENT), sample(traceparent=PARENT))
    assert trace.traceparent == PARENT
    assert [step.details["traceparent"] for step in trace.steps.values()] == [PARENT, PARENT]
    assert trace_of(impression()).traceparent == ""


@pytest.mark.parametrize(
    ("given", "logged", "trace_id"),
    [("", PARENT, TRACE), (f"00-{'c' * 32}-{SPAN}-01", PARENT, "c" * 32), ("", "", "")],
)
def test_the_parent_span_is_the_given_one_or_else_servings(
    given: str, logged: str, trace_id: str, exported: InMemorySpanExporter
) -> None:
    export(trace_of(impression(traceparent=logged)), given, 90)
    traces = [f"{span.context.trace_id:032x}" for span in exported.get_finished_spans()]
    assert traces == ([trace_id] if trace_id else [])


@pytest.mark.parametrize("logged", [PARENT, "00-nonsense"])
def test_a_request_without_a_span_is_followed(
    logged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    export(trace_of(impression(traceparent=logged)), "", 90)
    assert logged in capsys.readouterr().err
