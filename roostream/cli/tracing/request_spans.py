"""A followed request as spans of OpenTelemetry, below the span of whoever asked: one a step, from the step before to its own."""

from __future__ import annotations

from roostream.cli.tracing.followed_request import STEPS, FollowedRequest
from roostream.errors import ConfigError, SetupError

PROGRAMS = {"logged": "serving", "joined": "joiner", "trained": "worker", "published": "shard"}


def tell(followed: FollowedRequest, traceparent: str, began_ms: int) -> int:
    """Give the spans to OpenTelemetry, whose SDK and variables say where they go; how many.

    Raises:
        SetupError: the package isn't here. ConfigError: `traceparent` names no span.
    """
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        raise SetupError(
            "traces need opentelemetry-api: pip install 'roostream[opentelemetry]', or leave --traceparent out"
        ) from None
    parent = propagate.extract({"traceparent": traceparent})
    if not trace.get_current_span(parent).get_span_context().is_valid:
        raise ConfigError(
            f"expected --traceparent as W3C Trace Context has it, such as 00-<32 hex>-<16 hex>-01, got {traceparent!r}"
        )
    tracer = trace.get_tracer("roostream.trace")
    from_ms = began_ms
    for name in STEPS:
        step = followed.steps.get(name)
        if step is None:
            break
        about = {f"roostream.{key}": value for key, value in step.details.items()}
        about |= {
            "messaging.system": "kafka",
            "messaging.destination.name": step.topic,
            "messaging.destination.partition.id": str(step.partition),
            "messaging.kafka.offset": step.offset,
            "roostream.request_id": followed.request_id,
        }
        title = f"{PROGRAMS[name]} {name}"
        span = tracer.start_span(
            title, parent, trace.SpanKind.CONSUMER, about, start_time=from_ms * 1_000_000
        )
        span.end(end_time=max(step.reached_ms, from_ms) * 1_000_000)
        parent, from_ms = trace.set_span_in_context(span, parent), step.reached_ms
    return len(followed.steps)
