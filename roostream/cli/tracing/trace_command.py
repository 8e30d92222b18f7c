"""`roostream trace`: follow one request from its impression to the rows that readers get."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import click

from infra.home import Home
from roostream.cli.tracing.followed_request import STEPS, FollowedRequest, RowKeys
from roostream.errors import RoostreamError, printable
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.topics import IMPRESSIONS, PREDICTIONS, ROWS, SAMPLES
from roostream.wire.records import Record

TOPICS = (IMPRESSIONS, SAMPLES, PREDICTIONS, ROWS)
_AT_ONCE, _POLL_S = 2000, 0.2


def run(home: Path, request_id: str, traceparent: str, wait_s: float, as_json: bool) -> int:
    """0 once it is published, 1 if the wait ended before.

    Raises:
        SetupError: nothing runs in `home`. UnavailableError: Kafka does not answer.
    """
    clock, place = SystemClock(), Home(home)
    followed = FollowedRequest(request_id, row_keys(place))
    with contextlib.closing(_reader(place)) as reader:
        began_ms = clock.now_ms()
        click.echo(f"follows {printable(request_id)} from now on; ask", err=True)
        follow(
            followed,
            reader,
            clock,
            wait_s,
            lambda name: click.echo(line(followed, name, began_ms), err=as_json),
        )
    _tell(followed, traceparent, began_ms)
    if as_json:
        told = {name: step._asdict() for name, step in followed.steps.items()}
        found = {
            "request_id": request_id,
            "began_ms": began_ms,
            "traceparent": traceparent or followed.traceparent,
        }
        click.echo(json.dumps({**found, "steps": told}, indent=2))
    if not followed.is_done:
        missing = next(name for name in STEPS if name not in followed.steps)
        click.echo(f"within {wait_s:g} s it was not {missing}", err=True)
    return 0 if followed.is_done else 1


def _tell(followed: FollowedRequest, traceparent: str, began_ms: int) -> None:
    """Spans below the one that is named, else below that of serving where the request was traced there."""
    from roostream.cli.tracing.request_spans import tell

    if traceparent:
        tell(followed, traceparent, began_ms)
    elif followed.traceparent:
        try:
            tell(followed, followed.traceparent, began_ms)
        except RoostreamError as error:
            click.echo(
                f"it is traced as {printable(followed.traceparent)}, and no span is told: {error}", err=True
            )


def follow(
    followed: FollowedRequest,
    reader: RecordConsumer,
    clock: Clock,
    wait_s: float,
    told: Callable[[str], None],
) -> None:
    """Read until it is through, or for `wait_s`; each step is `told` by its name as it is reached."""
    until_s = clock.monotonic_s() + wait_s
    said: set[str] = set()
    while not followed.is_done and clock.monotonic_s() < until_s:
        for record in reader.poll(_AT_ONCE, _POLL_S):
            followed.add(record, clock.now_ms())
        for name in [name for name in followed.steps if name not in said]:
            said.add(name)
            told(name)


def line(followed: FollowedRequest, name: str, began_ms: int) -> str:
    """A step as people read it."""
    step = followed.steps[name]
    about = ", ".join(f"{key} {value}" for key, value in step.details.items())
    return f"{name:<10} {(step.reached_ms - began_ms) / 1000:+8.3f} s  {step.topic}-{step.partition} at {step.offset}  {about}"


def row_keys(place: Home) -> Callable[[Record], RowKeys]:
    """A sample's record → the rows that training on it changes, by the schema that wrote it."""
    from roostream.runtime.checkpoint_store import open_store
    from roostream.schema.registry import open_registry
    from roostream.schema.schema_file import load_schema
    from roostream.wire.decode import Decoder
    from roostream.wire.lookup import build_lookup

    decoder = Decoder(load_schema(place.running_stack()["schema"]), open_registry(open_store(place.store)))

    def keys_of(record: Record) -> RowKeys:
        batch, _ = decoder.decode([record])
        if not batch.num_requests:
            return frozenset()
        stacks = build_lookup(batch).stacks.values()
        return frozenset(
            (table, key)
            for stack in stacks
            for table, key in zip(stack.table_U.tolist(), stack.id_U.tolist(), strict=True)
        )

    return keys_of


def _reader(place: Home) -> RecordConsumer:
    """Of the four topics, from their ends on."""
    from roostream.runtime.kafka.broker import Broker
    from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
    from roostream.runtime.kafka.topics import all_partitions

    stack = place.running_stack()
    partitions = all_partitions(TOPICS, int(stack["partitions"]))
    reader = KafkaConsumer.open(
        Broker(stack["kafka"]), "trace", ConsumerOptions(partitions=partitions, prefix=stack["prefix"])
    )
    reader.seek({partition: end for partition, (_, end) in reader.bounds(*partitions).items()})
    return reader
