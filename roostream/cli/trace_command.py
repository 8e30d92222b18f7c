"""`roostream trace`: follow one request from its impression to the rows that replicas receive."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import click

from infra.home import Home
from roostream.cli.options import home_option, json_option, wait_option
from roostream.cli.output import print_json
from roostream.cli.request_trace import STEPS, RequestTrace, RowKeys
from roostream.errors import ConfigError, RoostreamError, SetupError, printable
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import IMPRESSIONS, PREDICTIONS, ROWS, SAMPLES, all_partitions
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.schema.registry import open_registry
from roostream.schema.schema_file import load_schema
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from roostream.wire.records import Record

TOPICS = (IMPRESSIONS, SAMPLES, PREDICTIONS, ROWS)
PROGRAMS = {"logged": "serving", "joined": "joiner", "trained": "worker", "published": "shard"}
_MAX_RECORDS, _POLL_S = 2000, 0.2


@click.command("trace")
@click.argument("request_id", metavar="REQUEST_ID")
@home_option
@click.option(
    "--traceparent",
    default="",
    metavar="TEXT",
    help="W3C Trace Context of the parent span; default: the one that serving logged",
)
@wait_option("give up after this many seconds; must exceed the join window")
@json_option
def trace_command(request_id: str, home: Path, traceparent: str, wait_s: float, as_json: bool) -> None:
    """Follow one request through a running stack: logged, joined, trained, rows published.

    Start this command before you send the request. Exit code 1: the rows were not published within --wait.

    \b
    Example:
      roostream trace my-request-1 --wait 900
    """
    clock, place = SystemClock(), Home(home)
    trace = RequestTrace(request_id, row_keys_of(place))
    with contextlib.closing(_consumer(place)) as consumer:
        began_ms = clock.now_ms()
        click.echo(
            f"waiting for request {printable(request_id)} to be sent from now on; earlier ones are not found",
            err=True,
        )
        follow(
            trace,
            consumer,
            clock,
            wait_s,
            lambda name: click.echo(describe_step(trace, name, began_ms), err=as_json),
        )
    export(trace, traceparent, began_ms)
    if as_json:
        report = {
            "request_id": request_id,
            "began_ms": began_ms,
            "traceparent": traceparent or trace.traceparent,
            "steps": {name: step._asdict() for name, step in trace.steps.items()},
        }
        print_json(report)
    if not trace.is_complete:
        missing = next(name for name in STEPS if name not in trace.steps)
        hint = ""
        if missing == STEPS[0]:
            hint = "; a request from before this command is not found: send it again with another request_id"
        click.echo(f"the request was not {missing} within {wait_s:g} s{hint}", err=True)
    sys.exit(0 if trace.is_complete else 1)


def follow(
    trace: RequestTrace, consumer: RecordConsumer, clock: Clock, wait_s: float, on_step: Callable[[str], None]
) -> None:
    """Read records until the trace is complete or `wait_s` is over. Calls `on_step` with the name of each new
    step."""
    until_s = clock.monotonic_s() + wait_s
    reported: set[str] = set()
    while not trace.is_complete and clock.monotonic_s() < until_s:
        for record in consumer.poll(_MAX_RECORDS, _POLL_S):
            trace.add(record, clock.now_ms())
        for name in [name for name in trace.steps if name not in reported]:
            reported.add(name)
            on_step(name)


def describe_step(trace: RequestTrace, name: str, began_ms: int) -> str:
    """One line of text for the terminal."""
    step = trace.steps[name]
    details = ", ".join(f"{key} {value}" for key, value in step.details.items())
    elapsed_s = (step.reached_ms - began_ms) / 1000
    return f"{name:<10} {elapsed_s:+8.3f} s  {step.topic}-{step.partition} at {step.offset}  {details}"


def row_keys_of(place: Home) -> Callable[[Record], RowKeys]:
    """A function from the record of a sample to the rows that training on it changes, by the schema that
    wrote it."""

    decoder = Decoder(
        load_schema(place.running_stack()["schema"]), open_registry(open_checkpoint_store(place.store))
    )

    def row_keys(record: Record) -> RowKeys:
        batch, _ = decoder.decode([record])
        if not batch.num_requests:
            return frozenset()
        stacks = build_lookup(batch).stacks.values()
        return frozenset(
            (table, key)
            for stack in stacks
            for table, key in zip(stack.table_U.tolist(), stack.id_U.tolist(), strict=True)
        )

    return row_keys


def _consumer(place: Home) -> RecordConsumer:
    """A consumer of the four topics that starts at their ends."""
    stack = place.running_stack()
    partitions = all_partitions(TOPICS, int(stack["partitions"]))
    consumer = KafkaConsumer.open(
        Broker(stack["kafka"]), "trace", ConsumerOptions(partitions=partitions, prefix=stack["prefix"])
    )
    consumer.seek({partition: end for partition, (_, end) in consumer.bounds(*partitions).items()})
    return consumer


def export(trace: RequestTrace, traceparent: str, began_ms: int) -> None:
    """Export spans below `traceparent`, or below the span that serving logged if there is one."""
    if traceparent:
        export_spans(trace, traceparent, began_ms)
    elif trace.traceparent:
        try:
            export_spans(trace, trace.traceparent, began_ms)
        except RoostreamError as error:
            click.echo(
                f"serving traced this request as {printable(trace.traceparent)}, but no span was "
                f"exported: {error}",
                err=True,
            )


def export_spans(trace: RequestTrace, traceparent: str, began_ms: int) -> int:
    """Export one OpenTelemetry span for each step, from the step before to its own; returns their number.

    The SDK and its environment variables say where spans go.

    Raises:
        SetupError: opentelemetry-api is not installed.
        ConfigError: `traceparent` is not valid.
    """
    try:
        from opentelemetry import propagate
        from opentelemetry import trace as otel
    except ImportError:
        raise SetupError(
            "traces need opentelemetry-api: pip install 'roostream[opentelemetry]', or leave "
            "--traceparent out"
        ) from None
    parent = propagate.extract({"traceparent": traceparent})
    if not otel.get_current_span(parent).get_span_context().is_valid:
        raise ConfigError(
            f"--traceparent: expected W3C Trace Context such as 00-<32 hex>-<16 hex>-01, got {traceparent!r}"
        )
    tracer = otel.get_tracer("roostream.trace")
    from_ms = began_ms
    for name in STEPS:
        step = trace.steps.get(name)
        if step is None:
            break
        attributes = {f"roostream.{key}": value for key, value in step.details.items()}
        attributes |= {
            "messaging.system": "kafka",
            "messaging.destination.name": step.topic,
            "messaging.destination.partition.id": str(step.partition),
            "messaging.kafka.offset": step.offset,
            "roostream.request_id": trace.request_id,
        }
        span = tracer.start_span(
            f"{PROGRAMS[name]} {name}",
            parent,
            otel.SpanKind.CONSUMER,
            attributes,
            start_time=from_ms * 1_000_000,
        )
        span.end(end_time=max(step.reached_ms, from_ms) * 1_000_000)
        parent, from_ms = otel.set_span_in_context(span, parent), step.reached_ms
    return len(trace.steps)
