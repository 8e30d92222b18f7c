"""Names of calls, in answers, in the log and in traces."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import propagate, trace
from serving_cases import BODY, SCHEMA, Built, build, client_of
from serving_fakes import FakeRows

from roostream.errors import SetupError
from roostream.runtime.program import CURRENT_CALL, CallContext, JsonFormatter
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.http.tracing import no_span, open_tracing, parse_call_names

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
    ("given", "taken"),
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
def test_traceparent_is_parsed_by_the_standard(given: str, taken: bool) -> None:
    names = parse_call_names([(b"x-request-id", b"c-1"), (b"traceparent", given.encode())])
    assert names == (CallContext("c-1", TRACE, SPAN) if taken else CallContext("c-1"))


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
def test_every_answer_has_a_request_id(built: Built, method: str, path: str, status: int) -> None:
    answer = client_of(built).request(method, path, json=BODY, headers={"x-request-id": "c-1"})
    assert answer.status_code == status and answer.headers.get_list("x-request-id") == ["c-1"]
    assert client_of(built).request(method, path, json=BODY).headers["x-request-id"] != "c-1"


def test_log_lines_contain_request_and_trace_id(tmp_path: Path) -> None:
    class Broken(FakeRows):
        def gather(self, lookup: Any) -> Any:
            raise ZeroDivisionError

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter().format(record))

    built, handler = build(tmp_path, Broken(SCHEMA)), Kept()
    logging.getLogger("roostream.serving").addHandler(handler)
    try:
        headers = {"x-request-id": "c-7", "traceparent": PARENT}
        assert client_of(built).post("/v1/rank", json=BODY, headers=headers).status_code == 500
    finally:
        logging.getLogger("roostream.serving").removeHandler(handler)
        built.close()
    told = json.loads(lines[0])
    assert (told["call_id"], told["trace_id"], told["span_id"]) == (
        "c-7",
        TRACE,
        SPAN,
    ) and "ZeroDivisionError" in told["error"]
    assert CURRENT_CALL.get() is None


class Spans(trace.TracerProvider):
    """Keeps what a real SDK would send."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def get_tracer(self, *names: Any, **more: Any) -> Any:
        provider = self

        class ParsedEngagements(trace.NonRecordingSpan):
            def __init__(self, name: str, parent: Any, attributes: dict[str, Any]) -> None:
                super().__init__(trace.INVALID_SPAN_CONTEXT)
                self.found = {"name": name, "parent": parent, "status": None, **attributes}
                provider.told.append(self.found)

            def set_attribute(self, key: str, value: Any) -> None:
                self.found[key] = value

            def set_status(self, status: Any, description: str | None = None) -> None:
                self.found["status"] = status

        class Tracer(trace.NoOpTracer):
            def start_as_current_span(self, name: str, context: Any = None, **more: Any) -> Any:  # type: ignore[override]
                parent = trace.get_current_span(context).get_span_context()
                return trace.use_span(
                    ParsedEngagements(
                        name, f"{parent.trace_id:032x}/{parent.span_id:016x}", more["attributes"]
                    )
                )

        return Tracer()


def test_spans_continue_the_trace_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    monkeypatch.setattr(trace, "get_tracer", spans.get_tracer)
    assert propagate.get_global_textmap() is not None
    built = build(tmp_path, FakeRows(SCHEMA), tracing=True)
    http = client_of(built)
    http.post("/v1/rank", json=BODY, headers={"traceparent": PARENT})
    http.get("/v1/users/17")
    built.waiting_for.append("rows")
    http.get("/readyz")
    built.close()
    rank, unknown, ready = spans.told
    assert (rank["name"], rank["parent"], rank["http.response.status_code"]) == (
        "POST /v1/rank",
        f"{TRACE}/{SPAN}",
        200,
    )
    assert (unknown["name"], unknown["url.path"], unknown["status"]) == ("GET", "", None), (
        "names don't grow with what is asked"
    )
    assert (ready["http.response.status_code"], ready["status"]) == (503, trace.StatusCode.ERROR)


OWN = "aaaaaaaaaaaaaaaa"


@pytest.mark.parametrize(
    ("tracing", "asked", "logged", "why"),
    [
        (True, PARENT, f"00-{TRACE}-{OWN}-01", "below the span of this call"),
        (True, PARENT[:-1] + "0", "", "a caller who doesn't sample"),
        (True, "", "", "nobody traces"),
        (False, PARENT, "", "no spans are wanted"),
    ],
)
def test_records_of_a_traced_call_contain_its_span(
    tracing: bool, asked: str, logged: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracer(trace.NoOpTracer):
        def start_as_current_span(self, name: str, context: Any = None, **more: Any) -> Any:  # type: ignore[override]
            at = trace.get_current_span(context).get_span_context()
            own = trace.SpanContext(at.trace_id, int(OWN, 16), False, at.trace_flags)
            return trace.use_span(trace.NonRecordingSpan(own if at.is_valid else trace.INVALID_SPAN_CONTEXT))

    monkeypatch.setattr(trace, "get_tracer", lambda *names: Tracer())
    built = build(tmp_path, FakeRows(SCHEMA), tracing=tracing)
    answer = client_of(built).post("/v1/rank", json=BODY, headers={"traceparent": asked} if asked else {})
    (impression,) = [wire.decode(record.value)[1] for record in built.records()]
    built.close()
    assert answer.status_code == 200
    assert isinstance(impression, pb.Impression) and impression.header.traceparent == logged, why
    assert CURRENT_CALL.get() is None


def test_tracing_is_not_imported_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    assert open_tracing(False, frozenset()) is no_span
    with pytest.raises(SetupError, match=r"roostream\[opentelemetry\]"):
        open_tracing(True, frozenset())
