"""How fast does a poll become a batch?

Decodes the messages of a Kafka poll: our decoder, and protobuf message by message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.codec import plain_decode
from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from roostream.schema.schema import Schema
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.record_source import build_chunk


class Message(NamedTuple):
    """What a Kafka client gives, as far as a reader looks at it."""

    partition: int
    offset: int
    time_ms: int
    key: bytes
    value: bytes


def _messages(requests: int, candidates: int) -> tuple[Schema, list[Message]]:
    schema = data.demo_schema()
    records = data.sample_records(schema, requests, candidates=candidates)
    return schema, [
        Message(r.partition, r.offset, r.timestamp_ms, r.key or b"", r.value or b"") for r in records
    ]


def _records(messages: list[Message]) -> list[Record]:
    return [Record("samples", m.partition, m.offset, m.time_ms, m.key, m.value) for m in messages]


@contextlib.contextmanager
def ours(requests: int, candidates: int) -> Iterator[Work]:
    """Messages → records → chunk: batch, rejects and progress, as the worker's source makes it."""
    schema, messages = _messages(requests, candidates)
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    yield Work(lambda: build_chunk(_records(messages), decoder, 0), requests)


@contextlib.contextmanager
def protobuf(requests: int, candidates: int) -> Iterator[Work]:
    """Messages → parsed one by one → the same columns by numpy; nothing is checked."""
    schema, messages = _messages(requests, candidates)
    yield Work(lambda: plain_decode(schema, _records(messages)), requests)


@contextlib.contextmanager
def memcpy(requests: int, candidates: int) -> Iterator[Work]:
    _, messages = _messages(requests, candidates)

    def step() -> None:
        np.frombuffer(b"".join(m.value for m in messages), np.uint8).copy()

    yield Work(step, requests)


_HERE = "benchmarks.decode"


def _decode(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"a poll of {requests} samples of {candidates} candidates",
        unit="samples",
        clock="cpu",
        subjects=(
            Subject("chunk", f"{_HERE}:ours", size),
            Subject("protobuf-python + numpy", f"{_HERE}:protobuf", size, "peer"),
            Subject("memcpy of the bytes", f"{_HERE}:memcpy", size, "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="decode",
    summary="How fast does a poll become a batch?",
    rows=(_decode(64, 11), _decode(512, 5), _decode(64, 200)),
    interpretation="""\
From a poll's messages to the batch that is trained on, with rejects and progress; the other way parses message by message with
protobuf-python (upb) and puts the same columns together with numpy, without checking anything. The codec's page has the decoder
alone, and what encoding costs.

The demo schema, histories of 30.""",
)
