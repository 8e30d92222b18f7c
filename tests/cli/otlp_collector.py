"""A collector of OpenTelemetry's protocol (OTLP over HTTP, protobuf), which its own messages read; it keeps
all spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CONSUMER: "consumer"}


class Told(NamedTuple):
    service: str  # `service.name` of the program that told it
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
    """`with Collector() as collector:` — `url` is what OTEL_EXPORTER_OTLP_ENDPOINT is set to."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        kept = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                assert (self.path, self.headers["content-type"]) == (
                    "/v1/traces",
                    "application/x-protobuf",
                ), self.path
                kept.extend(_spans(service.ExportTraceServiceRequest.FromString(body)))
                answer = service.ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace: str) -> list[Told]:
        """Spans of a trace, each below the one before it: a chain that forks or lacks a span is told."""
        left = {span.parent: span for span in self.told if span.trace == trace}
        assert len(left) == sum(span.trace == trace for span in self.told), "two stand below the same span"
        (first,) = {span.parent for span in left.values()} - {span.span for span in left.values()}
        chain: list[Told] = []
        while (found := left.pop(chain[-1].span if chain else first, None)) is not None:
            chain.append(found)
        assert not left
        return chain


def _spans(request: service.ExportTraceServiceRequest) -> list[Told]:
    found = []
    for resource in request.resource_spans:
        about = _plain(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                named = (about["service.name"], scope.scope.name, span.name, KINDS[span.kind])
                found.append(Told(*named, *ids, *times, _plain(span.attributes)))
    return found


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
