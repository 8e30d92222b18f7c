"""Bringing a shard's tables to the state of a manifest: all of it, or exactly what has changed since; rows of a table that is
stored otherwise since they were committed, wider or with another update rule, come over (docs/decisions/0040).

Letters: K keys of a block, the first L of them live; D width, A numbers of state.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from param_server.config import ShardIdentity
from param_server.embedding_table import KeyIndex, Keys, join_keys, no_keys
from param_server.initial_rows import initial_rows
from param_server.row_block import RowBlock
from param_server.segment_parts import Segment
from param_server.segments import EMPTY_COMMIT, Commit, Segments, commit_of
from param_server.table import FrozenRows, StackTable
from roostream.errors import SchemaError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.ids import buckets_of
from roostream.schema.update_rules import RULES

log = logging.getLogger("roostream.shard")


@dataclasses.dataclass(kw_only=True)
class FrozenCommit:
    """A generation between `freeze` and `commit` or `abort`."""

    seq: int
    incarnation: int
    changes: dict[str, RowBlock]
    changed: dict[str, Keys]  # stack → those of the changes' keys that a rollback must undo
    whole: frozenset[int]  # buckets of which the changes have every row
    residency: dict[str, bytes]  # stack → its policy's state
    rows_end: dict[int, int]
    segments: tuple[Segment, ...] | None = None  # once written

    @property
    def name(self) -> str:
        """Of the segment that it becomes."""
        return f"{self.seq}-{self.incarnation}"


def frozen_of(
    seq: int,
    incarnation: int,
    generations: Mapping[str, FrozenRows],
    whole: frozenset[int],
    tables: Mapping[str, StackTable],
    rows_end: Mapping[int, int],
) -> FrozenCommit:
    """What `freeze` keeps of the tables' generations."""
    return FrozenCommit(
        seq=seq,
        incarnation=incarnation,
        changes={name: generation.block for name, generation in generations.items()},
        changed={name: generation.changed for name, generation in generations.items()},
        whole=whole,
        residency={name: table.residency.state() for name, table in tables.items()},
        rows_end=dict(rows_end),
    )


class RestoreTarget(NamedTuple):
    """What a restore goes to."""

    commit: Commit
    rows_end: Mapping[int, int]  # `rows` partition → first offset after the commit
    owners: BucketMap


def target_of(identity: ShardIdentity, store: CheckpointStore, name: str) -> RestoreTarget:
    """This shard's part of manifest `name`; "" is the beginning.

    Raises:
        CheckpointError: the manifest is absent or damaged, or has nothing of this shard.
        ConfigError: it was committed with other shards, buckets, partitions or another seed.
    """
    if not name:
        return RestoreTarget(EMPTY_COMMIT, {}, identity.first_owners)
    manifest = manifests.load(store, name).manifest
    manifests.check_shape(
        manifest,
        num_shards=identity.num_shards,
        num_buckets=identity.num_buckets,
        num_partitions=identity.num_partitions,
        seed=identity.seed,
    )
    return RestoreTarget(commit_of(manifest, identity.index), manifest.rows_end, manifest.owners)


def linked(store: CheckpointStore) -> set[int] | None:
    """Numbers of all manifests there are; None if nobody knows."""
    try:
        return {manifests.seq_of(name) for name in store.list(manifests.MANIFESTS)}
    except UnavailableError as error:
        log.warning("abandoned segments stay for now: %s", error)
        return None


def roll_back(
    tables: Mapping[str, StackTable], frozen: Mapping[str, Keys], segments: Segments, state: Sequence[Segment]
) -> None:
    """Re-read exactly what changed in either generation: in the open one, and the keys that were `frozen` (stack → keys). For
    tables that were at `state` before these changes.

    **If it fails** (CheckpointError): the tables are in no known state; `reload` helps.
    """
    changed = {
        name: join_keys(table.keys_changed(), frozen.get(name, no_keys())) for name, table in tables.items()
    }
    for name, table in tables.items():
        table.forget(changed[name])
    for stack, wanted in changed.items():
        asked = KeyIndex(segments.num_buckets)
        asked.add_new(wanted)
        buckets = set(buckets_of(wanted.id_U, wanted.table_U, segments.num_buckets).tolist())
        for part in segments.read(state, {stack: buckets}):
            for block in reversed(part.blocks):
                tables[stack].put(block.take(asked.find(block.keys) >= 0))
    _load_residency(tables, segments, state)
    for name, table in tables.items():
        table.mark_unpublished(changed[name])


def reload(tables: Mapping[str, StackTable], segments: Segments, state: Sequence[Segment]) -> None:
    """Read everything, also rows of a table that was in another stack then: `segments.moved` says whether there were any.

    Raises:
        SchemaError: a table has become narrower.

    **If it fails** (CheckpointError too): as `roll_back`.
    """
    segments.moved = False
    unpublished: dict[str, list[Keys]] = {name: [] for name in tables}
    for table in tables.values():
        table.clear()
    for part in segments.read(state):
        for block in reversed(part.blocks):
            own = tables.get(part.stack)
            if own is None or not (own_K := _of(block.keys, own)).all():
                segments.moved = True
                _put_moved(tables, part.stack, block)
                if own is None:
                    continue
                block = block.take(own_K)
            own.put(block)
            unpublished[part.stack].append(block.keys.take(block.unpublished_K != 0))
    _load_residency(tables, segments, state)
    for name, keys in unpublished.items():
        tables[name].mark_unpublished(join_keys(no_keys(), *keys))


def _put_moved(tables: Mapping[str, StackTable], stack: str, block: RowBlock) -> None:
    """Those of `stack`'s rows that are of another stack's tables now; of tables that the schema has no more, none."""
    left_K = np.ones(len(block.keys), np.bool_)
    for name, table in tables.items():
        its_K = _of(block.keys, table)
        left_K &= ~its_K
        if name != stack and its_K.any():
            table.put(as_stored_now(block.take(its_K), stack, table))
    if left_K.any():
        log.warning(
            "%d rows of stack %s are left out: the schema has no such tables any more", left_K.sum(), stack
        )


def _of(keys: Keys, table: StackTable) -> np.ndarray:
    """bool [K]: which keys are of this stack's tables."""
    belonging_K: np.ndarray = np.isin(keys.table_U, table.embeddings.table_K)
    return belonging_K


def as_stored_now(block: RowBlock, stack: str, table: StackTable) -> RowBlock:
    """A block that was committed in `stack`, all of whose keys are `table`'s now. Columns that were there stay, new ones are
    those of the keys' initial rows; the state of the same rule goes on, another rule's begins.

    Raises:
        SchemaError: the rows were wider.
    """
    width = block.rows_LD.shape[1]
    if width > table.width:
        name = table.names[int(block.keys.table_U[0])]
        raise SchemaError(
            f"table {name!r}: expected dim {width} or more, as committed, got {table.width}; give the narrower table a new name"
        )
    live = block.live
    which_L = np.searchsorted(np.sort(table.embeddings.table_K), live.table_U)
    order_K = np.argsort(table.embeddings.table_K)[which_L]
    rows_LD = initial_rows(
        int(table.embeddings.seed), live.table_U, live.id_U, table.width, table.embeddings.scale_K[order_K]
    )
    rows_LD[:, :width] = block.rows_LD
    state_LA = np.repeat(table.first_state_K[order_K][:, None], table.state_width, axis=1)
    if stack.partition("-")[2] == table.rule:
        for now, then in RULES[table.rule].kept_state(width, table.width):
            state_LA[:, now] = block.state_LA[:, then]
    return RowBlock(
        keys=block.keys,
        unpublished_K=block.unpublished_K,
        stamp_ms_L=block.stamp_ms_L,
        rows_LD=rows_LD,
        state_LA=state_LA,
    )


def _load_residency(tables: Mapping[str, StackTable], segments: Segments, state: Sequence[Segment]) -> None:
    states = segments.residency(state)
    for stack, table in tables.items():
        table.residency.load(states.get(stack, b""))
