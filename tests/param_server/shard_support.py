"""What the tests of rows share: a small schema, shards over memory, manifests, and the whole state of a shard
as a dict."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from param_server.config import ShardIdentity
from param_server.embedding_table import Keys
from param_server.eviction import EvictionPolicyFactory, ExpiryPolicy
from param_server.key_value_store import KeyValueStore, MemoryKeyValueStore
from param_server.segment_copies import SegmentCopies
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.errors import CheckpointError
from roostream.runtime.clock import Clock, FakeClock
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup
from tests.runtime.manifest_cases import a_manifest

ADAGRAD, ROWWISE = "d4-adagrad", "d3-rowwise_adagrad"
PIECE_BYTES = 150
ITEM, USER, TOPIC = "item", "user", "topic"


@functools.lru_cache
def small_schema(expire_after_ms: int = 0) -> Schema:
    """Two tables in one stack (`item` expires if asked), one in another."""
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
    """Table → ids, as a batch's lookup; stacks in the schema's order."""
    stacks = {}
    for stack, tables in small_schema().stacks.items():
        found = [(t.id, i) for t in tables for i in rows.get(t.name, ())]
        stacks[stack] = StackLookup(
            np.array([t for t, _ in found], np.uint32), np.array([i for _, i in found], np.int64), {}
        )
    return Lookup(stacks)


def gradients_of(lookup: Lookup, value: float) -> dict[str, np.ndarray]:
    """Different numbers in each element, a function of `value` and its place."""
    width = {name: tables[0].dim for name, tables in small_schema().stacks.items()}
    out = {}
    for stack, found in lookup.stacks.items():
        size = (len(found.id_U), width[stack])
        out[stack] = (value + np.arange(size[0] * size[1], dtype=np.float32).reshape(size) / 7).astype(
            np.float32
        )
    return out


class MemoryStore:
    """A CheckpointStore in a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        data = b"".join(chunks)
        assert len(data) == size
        self.objects[name] = data

    def get(self, name: str) -> bytes:
        if name not in self.objects:
            raise CheckpointError(f"{name} is absent")
        return self.objects[name]

    def get_range(self, name: str, start: int, size: int) -> bytes:
        return self.get(name)[start : start + size]

    def list(self, prefix: str) -> list[str]:
        return sorted(n for n in self.objects if n.startswith(prefix + "/"))

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def sweep(self) -> None:
        """Nothing is ever unfinished."""


def make_shard(
    blobs: KeyValueStore | None = None,
    store: MemoryStore | None = None,
    clock: Clock | None = None,
    eviction: EvictionPolicyFactory = ExpiryPolicy,
    uploads: bool = False,
    **identity: Any,
) -> Shard:
    """A shard process at its start: nothing restored yet. Copies of segments are sent in small pieces."""
    who = ShardIdentity(**{"schema": small_schema(), **identity})
    store = store or MemoryStore()
    return Shard(
        who,
        Segments(blobs or MemoryKeyValueStore(), shapes_of(who.schema), who.num_buckets),
        store,
        clock or FakeClock(),
        eviction,
        copies=SegmentCopies(store, who.index, reads_at_once=1, piece_bytes=PIECE_BYTES),
        uploads=uploads,
    )


def begun(**kwargs: Any) -> Shard:
    """A shard that has been told to begin, as incarnation 1."""
    shard = make_shard(**kwargs)
    shard.restore(1, "")
    return shard


def transport_to(shard: Shard) -> InMemoryTransport:
    return InMemoryTransport(ShardRpcHandler(shard).handle)


def link_manifest(
    store: MemoryStore, seq: int, incarnation: int, written: Sequence[Mapping[str, Any]], **changes: Any
) -> str:
    """What the controller does at step 6, for shards 0..N-1 whose `write` gave `written`; the manifest's
    name."""
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
    """A whole commit of one shard; the manifest's name."""
    shard.freeze(seq, watermark_ms)
    name = link_manifest(store, seq, shard.incarnation, [shard.write(seq)])
    shard.commit(seq)
    return name


def state_of(shard: Shard) -> dict[tuple[str, int, int], bytes]:
    """Every row, its state and time of last push, to the bit."""
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
    asked = keys(table, *ids)
    gradient_UD = header.pop("gradient_UD", np.full((len(ids), width), 0.5 + sequence, np.float32))
    full = {
        "incarnation": shard.incarnation,
        "worker": 0,
        "sequence": sequence,
        "step": sequence,
        "time_ms": 1000 * sequence,
    }
    full |= {"oldest_engagement_ms": 5, "oldest_close_ms": 6, "stacks": [stack]} | header
    answer, _ = ShardRpcHandler(shard).handle("push", full, [asked.table_U, asked.id_U, gradient_UD])
    return bool(answer["applied"])


def pull_from(shard: Shard, table: str, *ids: int, incarnation: int | None = None) -> np.ndarray:
    stack, asked = small_schema().table_by_name[table].stack, keys(table, *ids)
    header = {"incarnation": shard.incarnation if incarnation is None else incarnation, "stacks": [stack]}
    (rows_UD,) = ShardRpcHandler(shard).handle("pull", header, [asked.table_U, asked.id_U])[1]
    return rows_UD
