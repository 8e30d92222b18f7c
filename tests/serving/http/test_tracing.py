"""Request ids and trace contexts: in answers, in log lines, in records and in exported spans."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from roostream.errors import SetupError
from roostream.runtime.program import CURRENT_CALL, CallContext, JsonFormatter
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.http.tracing import no_span, open_tracing, parse_call_names
from tests.serving.serving_cases import BODY, SCHEMA, InProcessServing, build_serving, make_http_client
from tests.serving.serving_fakes import FakeRows

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("given", ["c-1", "6f1c", "Root=1-67891233-abcdef012345678912345678", "a" * 128])
def test_a_clients_request_id_is_used(given: str) -> None:
    assert parse_call_names([(b"host", b"x"), (b"x-request-id", given.encode())]) == CallContext(given)


@pytest.mark.parametrize("given", ["", " ", "a" * 129, "a b", "-a", "é", 'a"b', "a\tb", "<script>", "a\n"])
def test_an_invalid_request_id_is_replaced(given: str) -> None:
    first, second = (parse_call_names([(b"x-request-id", given.encode())]).call_id for _ in range(2))
    assert first != second and re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]+", first)


@pytest.mark.parametrize(
    ("given", "is_valid"),
    [
        (PARENT, True),
        (f"01-{TRACE}-{SPAN}-00", True),
        (f"01-{TRACE}-{SPAN}-00-what-later-versions-add", True),
        (f"00-{TRACE}-{SPAN}-00-more", False),
        (f"01-{TRACE}-{SPAN}-00more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
    ],
)
def test_traceparent_is_parsed_by_the_standard(given: str, is_valid: bool) -> None:
    names = parse_call_names([(b"x-request-id", b"c-1"), (b"traceparent", given.encode())])
    assert names == (CallContext("c-1", TRACE, SPAN) if is_valid else CallContext("c-1"))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/rank", 200),
        ("POST", "/v1/engagements", 400),
        ("GET", "/v1/rank", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/readyz", 200),
        ("GET", "/", 200),
    ],
)
def test_every_answer_has_a_request_id(
    serving: InProcessServing, method: str, path: str, status: int
) -> None:
    answer = make_http_client(serving).request(method, path, json=BODY, headers={"x-request-id": "c-1"})
    assert answer.status_code == status and answer.headers.get_list("x-request-id") == ["c-1"]
    assert make_http_client(serving).request(method, path, json=BODY).headers["x-request-id"] != "c-1"


def test_log_lines_contain_request_and_trace_id(tmp_path: Path) -> None:
    class Broken(FakeRows):
        def gather(self, lookup: Any) -> Any:
            raise ZeroDivisionError

    lines: list[str] = []

    class ListHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter().format(record))

    serving, handler = build_serving(tmp_path, Broken(SCHEMA)), ListHandler()
    logging.getLogger("roostream.serving").addHandler(handler)
    try:
        headers = {"x-request-id": "c-7", "traceparent": PARENT}
        assert make_http_client(serving).post("/v1/rank", json=BODY, headers=headers).status_code == 500
    finally:
        logging.getLogger("roostream.serving").removeHandler(handler)
        serving.close()
    line = json.loads(lines[0])
    assert (line["call_id"], line["trace_id"], line["span_id"]) == (
        "c-7",
        TRACE,
        SPAN,
    ) and "ZeroDivisionError" in line["error"]
    assert CURRENT_CALL.get() is None


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Return an in-memory exporter of OpenTelemetry's SDK."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_spans_continue_the_trace_of_the_caller(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), tracing=True)
    http = make_http_client(serving)
    http.post("/v1/rank", json=BODY, headers={"traceparent": PARENT})
    http.get("/v1/users/17")
    serving.waiting_for.append("rows")
    http.get("/readyz")
    serving.close()
    rank, unknown, ready = spans.get_finished_spans()
    assert rank.name == "POST /v1/rank" and dict(rank.attributes or {})["http.response.status_code"] == 200
    assert rank.parent is not None and (rank.parent.trace_id, rank.parent.span_id) == (
        int(TRACE, 16),
        int(SPAN, 16),
    )
    assert unknown.name == "GET" and dict(unknown.attributes or {})["url.path"] == "", (
        "the number of span names is bounded"
    )
    assert dict(ready.attributes or {})["http.response.status_code"] == 503
    assert ready.status.status_code is trace.StatusCode.ERROR and unknown.status.is_unset


@pytest.mark.parametrize(
    ("tracing", "traceparent", "is_logged", "why"),
    [
        (True, PARENT, True, "records carry the span of this call"),
        (True, PARENT[:-1] + "0", False, "the caller does not sample"),
        (False, PARENT, False, "tracing is off"),
    ],
)
def test_records_of_a_traced_call_contain_its_span(
    tracing: bool, traceparent: str, is_logged: bool, why: str, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), tracing=tracing)
    answer = make_http_client(serving).post("/v1/rank", json=BODY, headers={"traceparent": traceparent})
    (impression,) = [wire.decode(record.value)[1] for record in serving.records()]
    serving.close()
    exported = [f"00-{TRACE}-{span.context.span_id:016x}-01" for span in spans.get_finished_spans()]
    assert answer.status_code == 200 and isinstance(impression, pb.Impression)
    assert ([impression.header.traceparent] if is_logged else []) == exported, why
    assert is_logged or not impression.header.traceparent
    assert CURRENT_CALL.get() is None


def test_tracing_is_not_imported_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    assert open_tracing(False, frozenset()) is no_span
    with pytest.raises(SetupError, match=r"roostream\[opentelemetry\]"):
        open_tracing(True, frozenset())
