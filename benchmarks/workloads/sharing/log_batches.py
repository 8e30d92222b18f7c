"""A producer's batches of what serving logs, compressed as Kafka does: whole batches of a partition, by how records are keyed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import zstandard

from benchmarks.question import Work
from benchmarks.workloads.sharing.logs import ebnerd_users
from roostream.replay.kafka_partitioner import partition_of
from roostream.schema.ids import hash64
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

_BATCH_BYTES = 1 << 20


def _by_request(record: Record) -> bytes:
    message = wire.decode(record.value)[1]
    assert isinstance(message, pb.Impression)
    return hash64(message.header.request_id).to_bytes(8, "little")


KEYS: dict[str, Callable[[Record], bytes]] = {
    "user": lambda record: record.key or b"",
    "request": _by_request,
}


def batches_of(records: list[Record], keyed_by: str, partitions: int) -> list[bytes]:
    """Each partition's records behind each other, cut at a producer's batch."""
    waiting: dict[int, list[bytes]] = {}
    out: list[bytes] = []
    for record in records:
        its = waiting.setdefault(partition_of(KEYS[keyed_by](record), partitions), [])
        its.append(record.value or b"")
        if sum(map(len, its)) >= _BATCH_BYTES:
            out.append(b"".join(its))
            its.clear()
    return [*out, *(b"".join(its) for its in waiting.values() if its)]


@functools.cache
def _logged(users: int, history: int) -> list[Record]:
    return ebnerd_users(users, history)[1]


@contextlib.contextmanager
def compressed(keyed_by: str, users: int, history: int, partitions: int) -> Iterator[Work]:
    """zstd 1; units are MB before it."""
    records = _logged(users, history)
    batches = batches_of(records, keyed_by, partitions)
    codec = zstandard.ZstdCompressor(level=1)
    before = sum(map(len, batches))
    after = sum(len(codec.compress(batch)) for batch in batches)

    def step() -> None:
        for batch in batches:
            codec.compress(batch)

    figures = {
        "compression ratio": before / after,
        "bytes a request": after / len(records),
        "requests a batch": len(records) / len(batches),
    }
    yield Work(step, before / 1e6, lambda: figures)
