"""An empty parameter server shard in this process."""

from __future__ import annotations

from param_server.config import ShardIdentity
from param_server.key_value_store import KeyValueStore, MemoryKeyValueStore
from param_server.segments import Segments
from param_server.server import Shard
from param_server.table import shapes_of
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import SystemClock
from roostream.schema.schema import Schema


def empty_shard(
    schema: Schema,
    folder: str,
    *,
    publishing: bool = True,
    index: int = 0,
    num_shards: int = 1,
    blobs: KeyValueStore | None = None,
) -> Shard:
    """A shard, the only one unless told otherwise, in incarnation 1. `folder` is its checkpoint store;
    segments go to `blobs`, or stay in memory."""
    identity = ShardIdentity(schema=schema, publishing=publishing, index=index, num_shards=num_shards)
    segments = Segments(blobs or MemoryKeyValueStore(), shapes_of(schema), identity.num_buckets)
    shard = Shard(identity, segments, FileStore(folder), SystemClock())
    shard.restore(1, "")
    return shard
