"""A fake OpenTelemetry collector (OTLP over HTTP, protobuf). It parses requests with OpenTelemetry's own
messages and keeps all spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CONSUMER: "consumer"}


class ReceivedSpan(NamedTuple):
    service: str  # `service.name` of the program that sent it
    scope: str  # the tracer's name
    name: str
    kind: str
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Collector:
    """The collector, a context manager. Set OTEL_EXPORTER_OTLP_ENDPOINT to its `url`."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        received = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                assert (self.path, self.headers["content-type"]) == (
                    "/v1/traces",
                    "application/x-protobuf",
                ), self.path
                received.extend(_spans(service.ExportTraceServiceRequest.FromString(body)))
                answer = service.ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                """Do not log requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace: str) -> list[ReceivedSpan]:
        """Return the spans of a trace, each the parent of the next. Fails if they are not such a chain."""
        span_by_parent = {span.parent: span for span in self.spans if span.trace == trace}
        spans = list(span_by_parent.values())
        num_spans = sum(span.trace == trace for span in self.spans)
        assert len(spans) == num_spans, "two spans have the same parent"
        (first,) = {span.parent for span in spans} - {span.span for span in spans}
        chain: list[ReceivedSpan] = []
        while (found := span_by_parent.pop(chain[-1].span if chain else first, None)) is not None:
            chain.append(found)
        assert not span_by_parent
        return chain


def _spans(request: service.ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for resource in request.resource_spans:
        about = _plain(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                named = (about["service.name"], scope.scope.name, span.name, KINDS[span.kind])
                found.append(ReceivedSpan(*named, *ids, *times, _plain(span.attributes)))
    return found


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
