"""Move buckets of rows between the shards of a stopped stack, by a commit with another bucket map.

  1 check everything; a rejected move changes nothing
  2 claim an incarnation, which fences any running controller
  3 write the buckets that each shard gains into a segment named after the commit, together with the shard's
    unpublished rows, because only the newest segment has the publication marks
  4 create the manifest exclusively under its name; this completes the move

If the process is killed before step 4, the old map remains valid and the new segments are deleted later like
any abandoned segment. A bucket always has exactly one owner. Shards that lose buckets write nothing; the rows
stay unread in their segments until those are deleted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from param_server.key_value_store import KeyValueStore
from param_server.row_block import newest_of
from param_server.segment_parts import Segment, SegmentBucket
from param_server.segments import Segments, commit_of
from param_server.table import shapes_of
from roostream.cli.checkpoint.checkpoints import schema_of
from roostream.errors import CheckpointError, ConfigError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap, moved
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.manifest import Manifest, Restorable
from roostream.runtime.store_identity import ensure_identity
from roostream.schema.schema import Schema


class CommittedShards(NamedTuple):
    """The key-value stores with the segments of a commit."""

    manifest: Manifest
    schema: Schema
    stores: Mapping[int, KeyValueStore]
    store_id: str = ""  # identity of the checkpoint store; "" = the shards keep the one that they remember

    def segments(self, index: int, buckets: Sequence[int]) -> Segments:
        """The segments of a shard, limited to these buckets."""
        return Segments(
            self.stores[index],
            shapes_of(self.schema),
            self.manifest.num_buckets,
            buckets=buckets,
            store_id=self.store_id,
        )

    def state(self, index: int) -> tuple[Segment, ...]:
        """The committed segments of a shard; empty for a shard that is not in the commit."""
        return commit_of(self.manifest, index).segments if index in self.manifest.shards else ()


def newest_commit(store: CheckpointStore) -> Restorable:
    """Load the newest commit. Raises CheckpointError: there is none, or it cannot be read."""
    found = manifests.newest(store)
    if found is None:
        raise CheckpointError("expected a commit in this store, got none; there are no rows to move yet")
    return found


def check_move(manifest: Manifest, after: BucketMap) -> np.ndarray:
    """The buckets that would move.

    Raises:
        ConfigError: the map has another number of buckets, or leaves a shard without buckets.
    """
    changed = moved(manifest.owners, after)
    used = np.unique(after.owner_B)
    if len(used) < after.num_owners:
        empty = next((n for n, owner in enumerate(used.tolist()) if n != owner), len(used))
        raise ConfigError(
            f"expected at least one bucket for each of {after.num_owners} shards, got none for shard {empty}"
        )
    return changed


def move(
    store: CheckpointStore, after: BucketMap, stores: Mapping[int, KeyValueStore], time_ms: int
) -> Manifest:
    """Commit the rows of the newest commit with the map `after`; returns the manifest. Without moves, the
    newest commit.

    `stores` has the segments of every shard before and after. After a failure the last commit is valid; call
    again.

    Raises:
        ConfigError: the map is not valid, the rows belong to another store, or an eviction policy keeps state
            that is not divided by bucket. Nothing was changed.
        CheckpointError: rows to move are damaged.
        FencedError: a controller was started meanwhile.
        UnavailableError: the store or a disk cannot be written.
    """
    last = newest_commit(store)
    before, changed = last.manifest.owners, check_move(last.manifest, after)  # 1
    if not len(changed) and before.num_owners == after.num_owners:
        return last.manifest
    store_id = ensure_identity(store)
    shards_of_commit = CommittedShards(last.manifest, schema_of(store, last.manifest), stores, store_id)
    for index in stores:
        if shards_of_commit.segments(index, ()).remembered_store() not in ("", store_id):
            raise ConfigError(
                f"expected a home whose rows belong to store {store_id}, got another store's rows in "
                f"shard-{index}; give the --home and --store of one deployment"
            )
    if any(
        shards_of_commit.segments(index, ()).policy_states(shards_of_commit.state(index))
        for index in last.manifest.shards
    ):
        raise ConfigError(
            "expected no eviction policy with state, got one, whose state cannot be divided by bucket"
        )
    incarnation = manifests.claim_incarnation(store, time_ms, manifests.newest_purpose(store))  # 2
    seq = manifests.next_seq(store)
    shards = {}
    for index in range(after.num_owners):
        gained = [b for b in changed.tolist() if after.owner_B[b] == index]
        state = shards_of_commit.state(index)
        if gained:  # 3
            parts = itertools.chain(
                _gained_buckets(shards_of_commit, gained), _unpublished(shards_of_commit, index, after)
            )
            segments = shards_of_commit.segments(index, after.buckets_of(index))
            state = segments.write_parts(f"{seq}-{incarnation}", parts, state, complete=frozenset(gained))
        shards[index] = {
            **last.manifest.shards.get(index, {}),
            "segments": [segment.plain() for segment in state],
        }
    manifest = dataclasses.replace(
        last.manifest,
        seq=seq,
        incarnation=incarnation,
        previous={"seq": last.manifest.seq, "checksum": last.checksum},
        num_shards=after.num_owners,
        shards=shards,
        bucket_map=None
        if after.is_modulo
        else BucketMap(after.owner_B, after.num_owners, before.version + 1),
        time_ms=time_ms,
    )
    if not store.create(manifest.name, manifest.encode()):  # 4
        raise CheckpointError(f"{manifest.name} was just created: a controller runs; stop it and call again")
    return manifest


def _unpublished(shards_of_commit: CommittedShards, index: int, after: BucketMap) -> Iterator[SegmentBucket]:
    """Unpublished rows in the buckets that stay."""
    stay = [b for b in shards_of_commit.manifest.owners.buckets_of(index) if after.owner_B[b] == index]
    for part in shards_of_commit.segments(index, stay).read(shards_of_commit.state(index)[-1:]):
        block = part.blocks[0].take(part.blocks[0].unpublished_K != 0)
        if len(block.keys):
            yield part._replace(blocks=[block])


def _gained_buckets(shards_of_commit: CommittedShards, gained: Sequence[int]) -> Iterator[SegmentBucket]:
    """These buckets from their former shards, one block per stack."""
    owners = shards_of_commit.manifest.owners
    for source in shards_of_commit.manifest.shards:
        segments = shards_of_commit.segments(source, [b for b in gained if owners.owner_B[b] == source])
        for part in segments.read(shards_of_commit.state(source)) if segments.buckets else ():
            yield part._replace(blocks=[newest_of(part.blocks, segments.num_buckets)])


def bytes_by_bucket(shards_of_commit: CommittedShards) -> np.ndarray:
    """float64 [B]: bytes of each bucket in the committed segments. Raises CheckpointError: a segment is
    missing or damaged."""
    bytes_B = np.zeros(shards_of_commit.manifest.num_buckets)
    for index in shards_of_commit.manifest.shards:
        held = shards_of_commit.segments(
            index, shards_of_commit.manifest.owners.buckets_of(index)
        ).bytes_by_bucket(shards_of_commit.state(index))
        bytes_B[list(held)] = list(held.values())
    return bytes_B
