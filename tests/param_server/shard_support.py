"""Support for tests of shards: a small schema, shards over memory, manifests, and the whole state of a shard
as a dict."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.embedding_table import Keys
from param_server.eviction import EvictionPolicyFactory, ExpiryPolicy
from param_server.key_value_store import KeyValueStore, MemoryKeyValueStore
from param_server.publish import Publisher
from param_server.replica.replica import Replica
from param_server.segment_copies import SegmentCopies
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.runtime.clock import Clock, FakeClock
from roostream.runtime.rpc.transport import Answer, Arrays, Header, InMemoryTransport
from roostream.schema.schema import Schema, Table
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup, StackLookup
from tests.param_server.memory_rows import InMemoryRows
from tests.runtime.manifest_cases import a_manifest
from tests.trainer.memory_store import MemoryStore

ADAGRAD, ROWWISE = "d4-adagrad", "d3-rowwise_adagrad"
PIECE_BYTES = 150
ITEM, USER, TOPIC = "item", "user", "topic"


@functools.lru_cache
def small_schema(expire_after_ms: int = 0) -> Schema:
    """Two tables share a stack, the third has its own. Rows of `item` expire after `expire_after_ms`; 0 means
    never."""
    return schema_from_dict(
        {
            "tables": {
                ITEM: {"dim": 4, "expire_after_ms": expire_after_ms},
                USER: {"dim": 4, "init_scale": 0.5},
                TOPIC: {"dim": 3, "rule": "rowwise_adagrad"},
            },
            "label": [{"name": "click", "action": "click"}],
        }
    )


def table_id(name: str, schema: Schema | None = None) -> int:
    return (schema or small_schema()).table_by_name[name].id


def keys(table: str, *ids: int) -> Keys:
    return Keys(np.full(len(ids), table_id(table), np.uint32), np.array(ids, np.int64))


def lookup_of(rows: Mapping[str, Sequence[int]]) -> Lookup:
    """A lookup of these ids by table. Stacks have the schema's order."""
    stacks = {}
    for stack, tables in small_schema().stacks.items():
        found = [(t.id, i) for t in tables for i in rows.get(t.name, ())]
        stacks[stack] = StackLookup(
            np.array([t for t, _ in found], np.uint32), np.array([i for _, i in found], np.int64), {}
        )
    return Lookup(stacks)


def gradients_of(lookup: Lookup, value: float) -> dict[str, np.ndarray]:
    """Gradients in which each element differs. They are a function of `value` and the position."""
    width = {name: tables[0].dim for name, tables in small_schema().stacks.items()}
    out = {}
    for stack, found in lookup.stacks.items():
        size = (len(found.id_U), width[stack])
        out[stack] = (value + np.arange(size[0] * size[1], dtype=np.float32).reshape(size) / 7).astype(
            np.float32
        )
    return out


def make_shard(
    blobs: KeyValueStore | None = None,
    store: MemoryStore | None = None,
    clock: Clock | None = None,
    eviction: EvictionPolicyFactory = ExpiryPolicy,
    uploads: bool = False,
    **identity: Any,
) -> Shard:
    """A shard process at its start, before any restore. Copies of segments are sent in small pieces."""
    identity_ = ShardIdentity(**{"schema": small_schema(), **identity})
    store = store or MemoryStore()
    return Shard(
        identity_,
        Segments(blobs or MemoryKeyValueStore(), shapes_of(identity_.schema), identity_.num_buckets),
        store,
        clock or FakeClock(),
        eviction,
        copies=SegmentCopies(store, identity_.index, piece_bytes=PIECE_BYTES),
        uploads=uploads,
    )


def started_shard(**kwargs: Any) -> Shard:
    """A shard that the controller has started as incarnation 1, without a manifest."""
    shard = make_shard(**kwargs)
    shard.restore(1, "")
    return shard


def transport_to(shard: Shard) -> InMemoryTransport:
    return InMemoryTransport(ShardRpcHandler(shard).handle)


class RecordingTransport:
    """A transport that records its calls."""

    def __init__(self, inner: InMemoryTransport) -> None:
        self.inner, self.calls = inner, list[tuple[str, Header]]()

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        self.calls.append((method, header))
        return self.inner.call(method, header, arrays, timeout_s=timeout_s)

    def close(self) -> None:
        self.inner.close()


def link_manifest(
    store: MemoryStore, seq: int, incarnation: int, written: Sequence[Mapping[str, Any]], **changes: Any
) -> str:
    """Write the manifest of a commit as the controller does, for shards 0..N-1 whose `write` returned
    `written`. Returns the manifest's name."""
    rows_end: dict[int, int] = {}
    for result in written:
        for partition, offset in result["rows_end"].items():
            rows_end[int(partition)] = min(offset, rows_end.get(int(partition), offset))
    shards = {i: {"segments": result["segments"]} for i, result in enumerate(written)}
    shape = {"num_shards": len(written), "rows_end": rows_end, "shards": shards}
    manifest = a_manifest(seq, **{"incarnation": incarnation, **shape, **changes})
    store.put(manifest.name, manifest.encode())
    return manifest.name


def commit(shard: Shard, store: MemoryStore, seq: int, watermark_ms: int = 0) -> str:
    """Make a complete commit of one shard and return the manifest's name."""
    shard.freeze(seq, watermark_ms)
    name = link_manifest(store, seq, shard.incarnation, [shard.write(seq)])
    shard.commit(seq)
    return name


def state_of(shard: Shard) -> dict[tuple[str, int, int], bytes]:
    """Every row with its optimizer state and the time of its last push, as bytes."""
    out = {}
    for stack, table in shard.tables.items():
        index = table.index
        for n in index.flagged(1).tolist():
            bits = (
                table.embeddings.rows_ND[n].tobytes()
                + table.state_NA[n].tobytes()
                + table.stamp_ms_N[n].tobytes()
            )
            out[stack, int(index.table_N[n]), int(index.id_N[n])] = bits
    return out


def push_to(
    shard: Shard, sequence: int, table: str = ITEM, ids: tuple[int, ...] = (1, 2), **header: Any
) -> bool:
    stack = small_schema().table_by_name[table].stack
    width = small_schema().table_by_name[table].dim
    requested = keys(table, *ids)
    gradient_UD = header.pop("gradient_UD", np.full((len(ids), width), 0.5 + sequence, np.float32))
    complete_header = {
        "incarnation": shard.incarnation,
        "worker": 0,
        "sequence": sequence,
        "step": sequence,
        "time_ms": 1000 * sequence,
    }
    complete_header |= {"oldest_engagement_ms": 5, "oldest_close_ms": 6, "stacks": [stack]} | header
    answer, _ = ShardRpcHandler(shard).handle(
        "push", complete_header, [requested.table_U, requested.id_U, gradient_UD]
    )
    return bool(answer["applied"])


def pull_from(shard: Shard, table: str, *ids: int, incarnation: int | None = None) -> np.ndarray:
    stack, requested = small_schema().table_by_name[table].stack, keys(table, *ids)
    header = {"incarnation": shard.incarnation if incarnation is None else incarnation, "stacks": [stack]}
    (rows_UD,) = ShardRpcHandler(shard).handle("pull", header, [requested.table_U, requested.id_U])[1]
    return rows_UD


# A follower of the in-memory `rows` topic. Serving follows Kafka's topic in the same way.


NEVER_STOP = threading.Event()  # never set


class Follower:
    """A replica and the offset that it has reached in each partition."""

    def __init__(self, topic: InMemoryRows) -> None:
        self.replica, self.topic = Replica(small_schema(), 0), topic
        self.offsets = [0] * len(topic.values)
        self.num_bootstraps = 0

    def bootstrap(self, *shards: Shard) -> None:
        self.offsets = [len(values) for values in self.topic.values]
        self.replica.bootstrap([transport_to(shard) for shard in shards])
        self.num_bootstraps += 1

    def read(self, partition: int, max_records: int = 1 << 30) -> bool:
        """Apply up to `max_records` records. Returns False if the next record was deleted, so that only a
        bootstrap helps."""
        if self.offsets[partition] < self.topic.first[partition]:
            return False
        for value in self.topic.values[partition][
            self.offsets[partition] : self.offsets[partition] + max_records
        ]:
            self.replica.apply(wire.decode(value)[1])  # type: ignore[arg-type]
            self.offsets[partition] += 1
        return True

    def catch_up(self, *shards: Shard) -> None:
        """Read to the end of the topic; bootstrap first if records are missing."""
        complete = all([self.read(p) for p in range(len(self.offsets))])
        if not complete or self.replica.needs_bootstrap:
            self.bootstrap(*shards)

    def rows(self, table: str, *ids: int) -> np.ndarray:
        stack = small_schema().table_by_name[table].stack
        return self.replica.gather(lookup_of({table: ids}))[stack]


class PublishLoop:
    """A shard with its publisher, its topic and a client that trains it."""

    def __init__(self, shard: Shard, topic: InMemoryRows | None = None) -> None:
        self.shard, self.topic, self.clock = shard, topic or InMemoryRows(), FakeClock()
        self.publisher = Publisher(shard, self.topic, self.clock)
        self.client = Client(small_schema(), [transport_to(shard)], worker=0)
        self.client.set_incarnation(shard.incarnation)

    def push(self, *ids: int, table: str = ITEM, value: float = 1.0, time_ms: int = 0, **times: int) -> None:
        lookup = lookup_of({table: ids})
        self.client.push(lookup, gradients_of(lookup, value), step=0, time_ms=time_ms, **times)

    def turn(self) -> None:
        self.publisher.turn(NEVER_STOP)

    def rows(self, *ids: int, table: str = ITEM) -> np.ndarray:
        return self.client.pull(lookup_of({table: ids}))[small_schema().table_by_name[table].stack]


def messages(topic: InMemoryRows, kind: int) -> list[tuple[int, int, object]]:
    """(partition, offset, message) of all messages of one kind."""
    found = []
    for partition, values in enumerate(topic.values):
        found += [
            (partition, at, wire.decode(v)[1]) for at, v in enumerate(values) if wire.kind_of(v) == kind
        ]
    return found


def deltas(topic: InMemoryRows) -> list[pb.RowDelta]:
    return [m for _, _, m in messages(topic, wire.ROW_DELTA)]  # type: ignore[misc]


# An eviction policy with a state: it admits a key at the second push. Rows expire as usual.


class AdmitAtSecondPush(ExpiryPolicy):
    """Admits a key at its second push."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__(tables)
        self.seen: Counter[tuple[int, int]] = Counter()

    def admit(self, keys: Keys) -> np.ndarray:
        pairs = list(zip(keys.table_U.tolist(), keys.id_U.tolist(), strict=True))
        self.seen.update(pairs)
        return np.array([self.seen[pair] >= 2 for pair in pairs], np.bool_)

    def state(self) -> bytes:
        return (
            msgspec.json.encode(sorted((*pair, count) for pair, count in self.seen.items()))
            if self.seen
            else b""
        )

    def load(self, state: bytes) -> None:
        counts = msgspec.json.decode(state, type=list[tuple[int, int, int]]) if state else []
        self.seen = Counter({(table, id_): count for table, id_, count in counts})
