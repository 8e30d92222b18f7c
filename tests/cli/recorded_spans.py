"""What `roostream trace` would send to OpenTelemetry, kept."""

from __future__ import annotations

import itertools

import pytest
from opentelemetry import trace


class KeptSpans:
    """`told`: (name, "trace/parent", begin ns, end ns) of each span that ended; their own ids are 1, 2, …"""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int, int]] = []
        self._numbers = itertools.count(1)

    @classmethod
    def instead(cls, monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
        """In the place of whatever tracer there is."""
        kept = cls()
        monkeypatch.setattr(trace, "get_tracer", lambda *names: _Tracer(kept))
        return kept

    def begun(self, name: str, parent: trace.SpanContext, begin: int) -> trace.Span:
        own = trace.SpanContext(parent.trace_id, next(self._numbers), False, trace.TraceFlags(1))
        return _Span(self, own, (name, f"{parent.trace_id:032x}/{parent.span_id:x}", begin))


class _Span(trace.NonRecordingSpan):
    def __init__(self, kept: KeptSpans, own: trace.SpanContext, about: tuple[str, str, int]) -> None:
        super().__init__(own)
        self.kept, self.about = kept, about

    def end(self, end_time: int | None = None) -> None:
        self.kept.told.append((*self.about, end_time or 0))


class _Tracer(trace.NoOpTracer):
    def __init__(self, kept: KeptSpans) -> None:
        self.kept = kept

    def start_span(self, name: str, context: object = None, *rest: object, **more: object) -> trace.Span:  # type: ignore[override]
        parent = trace.get_current_span(context).get_span_context()  # type: ignore[arg-type]
        return self.kept.begun(name, parent, int(str(more["start_time"])))
