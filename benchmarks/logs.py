"""How well do logged impressions compress, keyed by user or by request?

Compresses a producer's batches of logged impressions as Kafka does, for two choices of the record key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import zstandard

from benchmarks.common.dataset_paths import EBNERD, absent
from benchmarks.common.public_logs import ebnerd_users
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from roostream.runtime.kafka.partitioner import partition_of
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
    """The producer's batches of each partition."""
    waiting: dict[int, list[bytes]] = {}
    out: list[bytes] = []
    for record in records:
        part = waiting.setdefault(partition_of(KEYS[keyed_by](record), partitions), [])
        part.append(record.value or b"")
        if sum(map(len, part)) >= _BATCH_BYTES:
            out.append(b"".join(part))
            part.clear()
    return [*out, *(b"".join(part) for part in waiting.values() if part)]


@functools.cache
def _logged(users: int, history: int) -> list[Record]:
    return ebnerd_users(users, history)[1]


@contextlib.contextmanager
def compressed(keyed_by: str, users: int, history: int, partitions: int) -> Iterator[Work]:
    """Compress with zstd 1; units are uncompressed MB."""
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


_COMPRESSED = "benchmarks.logs:compressed"
_USERS = 400


def _row(history: int, partitions: int) -> Row:
    return Row(
        name=f"histories of {history}, {partitions} partitions",
        unit="MB",
        clock="cpu",
        subjects=(
            Subject("by user", _COMPRESSED, ("user", _USERS, history, partitions)),
            Subject("by request", _COMPRESSED, ("request", _USERS, history, partitions), "peer"),
        ),
        skipped=absent(EBNERD),
    )


BENCHMARK = Benchmark(
    name="logs",
    summary="How well do logged impressions compress, keyed by user or by request?",
    rows=(_row(50, 4), _row(50, 64), _row(500, 64)),
    slice_s=0.05,
    rounds=3,
    interpretation="""\
The logged impressions of 400 of EB-NeRD's users in time order, in producer batches of 1 MB a partition,
compressed with zstd 1 as by Kafka's clients. Keyed by user, the requests of a user share a partition and
its batches repeat their histories; keyed by request, they are spread. Full batches of 1 MB mean a busy
producer; with smaller batches the difference is smaller. RecD's paper reports 1.50 to 2.25 for this step.""",
)
