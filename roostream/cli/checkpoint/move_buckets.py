"""Buckets of rows move between shards: a commit over what the last one has, by another map. Of a stack that is stopped.

  1 everything is checked, and nothing is changed by what is refused
  2 an incarnation is claimed: whoever ran is fenced
  3 each shard that gets buckets writes them, whole, as a segment named after the commit; what it had itself that readers
    don't know yet is in it too, since marks are those of the newest segment
  4 the manifest is created under its name, exclusively: that is the move

Killed before 4, the last commit and its map hold, and what was written goes as any abandoned segment does; behind 4 the new map
does. There is no moment in which a bucket is nobody's or has two owners. Shards that lose buckets write nothing: the rows stay
in their segments, unread, until those go.
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
from roostream.schema.schema import Schema


class CommittedShards(NamedTuple):
    """What a commit's shards have on their disks."""

    manifest: Manifest
    schema: Schema
    blobs: Mapping[int, KeyValueStore]

    def segments(self, index: int, buckets: Sequence[int]) -> Segments:
        """Of a shard, as if these buckets were its own."""
        return Segments(self.blobs[index], shapes_of(self.schema), self.manifest.num_buckets, buckets=buckets)

    def state(self, index: int) -> tuple[Segment, ...]:
        """A shard that the commit doesn't have holds nothing."""
        return commit_of(self.manifest, index).segments if index in self.manifest.shards else ()


def newest_commit(store: CheckpointStore) -> Restorable:
    """Raises CheckpointError: there is none, or none that can be read."""
    found = manifests.newest(store)
    if found is None:
        raise CheckpointError("expected a commit in this store, got none; there are no rows to move yet")
    return found


def check_move(manifest: Manifest, after: BucketMap) -> np.ndarray:
    """The buckets that change their shard.

    Raises:
        ConfigError: the map is of other buckets, or a shard would have none.
    """
    changed = moved(manifest.owners, after)
    used = np.unique(after.owner_B)
    if len(used) < after.num_owners:
        empty = next((n for n, owner in enumerate(used.tolist()) if n != owner), len(used))
        raise ConfigError(
            f"expected a bucket or more for each of {after.num_owners} shards, got none for shard {empty}"
        )
    return changed


def move(
    store: CheckpointStore, after: BucketMap, blobs: Mapping[int, KeyValueStore], time_ms: int
) -> Manifest:
    """Make `after` the map of the newest commit, as a commit of its own; that commit. `blobs`: of every shard before and after.
    Where nothing moves, the newest commit as it is.

    Raises:
        ConfigError: the map can't be gone to, or a residency policy keeps state that isn't by bucket. Nothing was changed.
        CheckpointError: a part that would move is damaged. FencedError: a controller was started meanwhile.
        UnavailableError: store or disk can't be written.

    **If it fails** behind the claim: the last commit holds; call again.
    """
    last = newest_commit(store)
    before, changed = last.manifest.owners, check_move(last.manifest, after)  # 1
    if not len(changed) and before.num_owners == after.num_owners:
        return last.manifest
    its = CommittedShards(last.manifest, schema_of(store, last.manifest), blobs)
    if any(its.segments(index, ()).residency(its.state(index)) for index in last.manifest.shards):
        raise ConfigError(
            "expected rows without a residency policy that keeps state, got one: its state isn't cut by buckets"
        )
    incarnation = manifests.claim_incarnation(store, time_ms, manifests.kept_wish(store))  # 2
    seq = manifests.next_seq(store)
    shards = {}
    for index in range(after.num_owners):
        gained = [b for b in changed.tolist() if after.owner_B[b] == index]
        state = (
            _written(f"{seq}-{incarnation}", its, index, gained, after) if gained else its.state(index)
        )  # 3
        shards[index] = {
            **last.manifest.shards.get(index, {}),
            "segments": [segment._asdict() for segment in state],
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
        raise CheckpointError(f"{manifest.name} exists by now: a controller runs; stop it, and call again")
    return manifest


def _written(
    name: str, its: CommittedShards, index: int, gained: Sequence[int], after: BucketMap
) -> tuple[Segment, ...]:
    """The new state of a shard that gets buckets."""
    parts = itertools.chain(_of_others(its, gained), _unpublished(its, index, after))
    own = its.segments(index, after.buckets_of(index))
    return own.write_parts(name, parts, its.state(index), whole=frozenset(gained))


def _unpublished(its: CommittedShards, index: int, after: BucketMap) -> Iterator[SegmentBucket]:
    """What readers haven't got of the buckets that stay."""
    stay = [b for b in its.manifest.owners.buckets_of(index) if after.owner_B[b] == index]
    for part in its.segments(index, stay).read(its.state(index)[-1:]):
        block = part.blocks[0].take(part.blocks[0].unpublished_K != 0)
        if len(block.keys):
            yield part._replace(blocks=[block])


def _of_others(its: CommittedShards, gained: Sequence[int]) -> Iterator[SegmentBucket]:
    """Each of these buckets as its former shard has it, a block a stack."""
    owners = its.manifest.owners
    for source in its.manifest.shards:
        segments = its.segments(source, [b for b in gained if owners.owner_B[b] == source])
        for part in segments.read(its.state(source)) if segments.buckets else ():
            yield part._replace(blocks=[newest_of(part.blocks, segments.num_buckets)])


def bytes_by_bucket(its: CommittedShards) -> np.ndarray:
    """float64 [B]: what the commit's segments hold of each bucket. Raises CheckpointError: a segment is absent or damaged."""
    bytes_B = np.zeros(its.manifest.num_buckets)
    for index in its.manifest.shards:
        held = its.segments(index, its.manifest.owners.buckets_of(index)).bytes_by_bucket(its.state(index))
        bytes_B[list(held)] = list(held.values())
    return bytes_B
