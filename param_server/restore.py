"""Restoring a shard's tables to the state of a manifest: all rows, or exactly the rows that have changed
since.

Rows of a table that was stored otherwise when they were committed, narrower or with another update rule, are
converted (docs/decisions/0040).

Letters: K keys of a block, the first L of them live; D width, A numbers of state.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from param_server.config import ShardIdentity
from param_server.embedding_table import KeyIndex, Keys, join_keys, no_keys
from param_server.initial_rows import initial_rows
from param_server.row_block import RowBlock
from param_server.segment_parts import Segment
from param_server.segments import EMPTY_COMMIT, Commit, Segments, commit_of
from param_server.table import FrozenRows, StackTable
from roostream.errors import CheckpointError, ConfigError, SchemaError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.ids import buckets_of
from roostream.schema.update_rules import RULES

log = logging.getLogger("roostream.shard")


@dataclasses.dataclass(kw_only=True)
class FrozenCommit:
    """The changed rows of a commit that is being made: from `freeze` to `commit` or `abort`."""

    seq: int
    incarnation: int
    rows: dict[str, FrozenRows]  # by stack
    complete: frozenset[int]  # buckets of which `rows` has every row
    policy_states: dict[str, bytes]  # stack → state of its eviction policy
    rows_end: dict[int, int]
    segments: tuple[Segment, ...] | None = None  # once written

    @property
    def name(self) -> str:
        """Name of the segment that it becomes."""
        return f"{self.seq}-{self.incarnation}"


class RestoreTarget(NamedTuple):
    """The state that a restore leads to."""

    commit: Commit
    rows_end: Mapping[int, int]  # `rows` partition → first offset after the commit
    owners: BucketMap


def restore_target(identity: ShardIdentity, store: CheckpointStore, name: str) -> RestoreTarget:
    """This shard's part of manifest `name`; "" is the beginning.

    Raises:
        CheckpointError: the manifest is damaged, or has nothing of this shard.
        UnavailableError: the manifest is not there.
        ConfigError: it was committed with another number of shards, buckets or partitions, or another seed.
    """
    if not name:
        return RestoreTarget(EMPTY_COMMIT, {}, identity.first_owners)
    manifest = manifests.load_chosen(store, name).manifest
    manifests.check_shape(
        manifest,
        num_shards=identity.num_shards,
        num_buckets=identity.num_buckets,
        num_partitions=identity.num_partitions,
        seed=identity.seed,
    )
    return RestoreTarget(commit_of(manifest, identity.index), manifest.rows_end, manifest.owners)


def check_home(
    segments: Segments, store: CheckpointStore, store_id: str, target: Commit, index: int, incarnation: int
) -> None:
    """Check that `store`, whose identity is `store_id`, may decide about the rows in this shard's home.
    `target`: this shard's part of the manifest that is restored in `incarnation`.

    A home from before stores had identities remembers none. It accepts a store with a commit that names its
    segments, and a home without commits accepts any store. Nothing is checked if neither the home nor the
    caller knows an identity (`store_id` = "").

    Raises:
        ConfigError: the rows belong to another store, to a newer copy of it, or the store has lost them.
            Nothing was changed.
    """
    remembered = segments.remembered_store()
    if not store_id and not remembered:
        return
    change = f"nothing in the home of shard {index} was changed"
    if remembered and remembered != store_id:
        raise ConfigError(
            f"the rows of shard {index} belong to the checkpoint store {remembered}, but the setting `store` "
            f"leads to store {store_id}; {change}: set `store` to the first one, or "
            "give every shard an empty home to start over"
        )
    try:
        history = segments.history()
    except CheckpointError as error:  # then the checksums of the segments must suffice
        log.warning("%s", error)
        history = [EMPTY_COMMIT]
    if not history:
        return
    newest, store_name = history[-1], f"store {store_id}"
    if not target.seq:
        raise ConfigError(
            f"shard {index} has committed rows up to commit {newest.seq}, but {store_name} has no commit; "
            f"{change}: bring the store's manifests back, set `store` to the store of these rows, or give "
            "every shard an empty home to start over"
        )
    held = {(segment.name, segment.checksum) for commit in history for segment in commit.segments}
    if held and not remembered and not _is_named(held, store, target, index):
        raise ConfigError(
            f"shard {index} has committed rows up to commit {newest.seq}, but no commit of {store_name} "
            f"names them; {change}: set `store` to the store of these rows, or give every shard an empty "
            "home to start over"
        )
    # A damaged manifest, and one that was rolled back, is not lost: then the target is older on purpose.
    if incarnation <= newest.incarnation or (
        newest.seq > target.seq and manifests.has_lost(store, newest.seq, newest.incarnation)
    ):
        raise ConfigError(
            f"shard {index} has commit {newest.seq} of incarnation {newest.incarnation}, but {store_name} "
            f"ends with commit {target.seq} of incarnation {target.incarnation}, so it is an older copy; "
            f"{change}: bring the newest copy back, or continue from the older one with `roostream "
            f"checkpoint rollback {target.seq} --incarnation {newest.incarnation}`"
        )


def _is_named(held: set[tuple[str, str]], store: CheckpointStore, target: Commit, index: int) -> bool:
    """Whether a commit names one of these segments: (name, checksum)."""
    if any((segment.name, segment.checksum) in held for segment in target.segments):
        return True
    for number in reversed(manifests.numbers(store)):
        try:
            commit = commit_of(manifests.load(store, manifests.manifest_name(number)).manifest, index)
        except CheckpointError:
            continue
        if any((segment.name, segment.checksum) in held for segment in commit.segments):
            return True
    return False


def manifest_numbers(store: CheckpointStore) -> set[int] | None:
    """Sequence numbers of all manifests; None if the store cannot be read."""
    try:
        return {manifests.seq_of(name) for name in store.list(manifests.MANIFESTS)}
    except UnavailableError as error:
        log.warning("abandoned segments are kept for now: %s", error)
        return None


def roll_back(
    tables: Mapping[str, StackTable],
    frozen: Mapping[str, FrozenRows],
    segments: Segments,
    state: Sequence[Segment],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Read again exactly what changed in either generation: in the open one, and what is `frozen` (by stack).
    `on_progress` is called after each part.

    The tables must have been at `state` before these changes.

    **If it fails** (CheckpointError): the tables are in no known state; `reload` helps.
    """
    changed = {
        name: join_keys(
            table.changed_keys(), frozen[name].changed_keys(table.index) if name in frozen else no_keys()
        )
        for name, table in tables.items()
    }
    for name, table in tables.items():
        table.index.remove(changed[name])
    for stack, wanted in changed.items():
        wanted_keys = KeyIndex(segments.num_buckets)
        wanted_keys.add_new(wanted)
        buckets = set(buckets_of(wanted.id_U, wanted.table_U, segments.num_buckets).tolist())
        for part in segments.read(state, {stack: buckets}):
            for block in reversed(part.blocks):
                tables[stack].put(block.take(wanted_keys.find(block.keys) >= 0))
            on_progress()
    _load_policy_states(tables, segments, state)
    for name, table in tables.items():
        table.mark_unpublished(changed[name])


def reload(
    tables: Mapping[str, StackTable],
    segments: Segments,
    state: Sequence[Segment],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Read all rows, also those of tables that belonged to another stack then; `segments.needs_rewrite` tells
    whether there were any. `on_progress` is called after each part.

    Raises:
        SchemaError: a table has become narrower.

    **If it fails** (CheckpointError too): as `roll_back`.
    """
    segments.needs_rewrite = False
    unpublished: dict[str, list[Keys]] = {name: [] for name in tables}
    for table in tables.values():
        table.clear()
    for part in segments.read(state):
        on_progress()
        for block in reversed(part.blocks):
            stack_table = tables.get(part.stack)
            if stack_table is None or not (own_K := _belongs_to(block.keys, stack_table)).all():
                segments.needs_rewrite = True
                _put_moved(tables, part.stack, block)
                if stack_table is None:
                    continue
                block = block.take(own_K)
            stack_table.put(block)
            unpublished[part.stack].append(block.keys.take(block.unpublished_K != 0))
    _load_policy_states(tables, segments, state)
    for name, keys in unpublished.items():
        tables[name].mark_unpublished(join_keys(*keys))


def _put_moved(tables: Mapping[str, StackTable], stack: str, block: RowBlock) -> None:
    """Insert those of `stack`'s rows that belong to another stack now; drop those of tables that the schema
    does not have."""
    left_K = np.ones(len(block.keys), np.bool_)
    for name, table in tables.items():
        own_K = _belongs_to(block.keys, table)
        left_K &= ~own_K
        if name != stack and own_K.any():
            table.put(converted(block.take(own_K), stack, table))
    if left_K.any():
        log.warning(
            "%d rows of stack %s are dropped: the schema does not have their tables any more",
            left_K.sum(),
            stack,
        )


def _belongs_to(keys: Keys, table: StackTable) -> np.ndarray:
    """bool [K]: which keys belong to this stack's tables."""
    own_K: np.ndarray = np.isin(keys.table_U, table.embeddings.table_K)
    return own_K


def converted(block: RowBlock, stack: str, table: StackTable) -> RowBlock:
    """Convert a block that was committed in `stack` to `table`, which owns all its keys now.

    Old columns stay; new columns get the keys' initial values. State is kept for the same rule and reset for
    another one.

    Raises:
        SchemaError: the rows were wider.
    """
    width = block.rows_LD.shape[1]
    if width > table.width:
        name = table.names[int(block.keys.table_U[0])]
        raise SchemaError(
            f"table {name!r}: expected dim {width} or more, as committed, got {table.width}; give the "
            "narrower table another name"
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


def _load_policy_states(
    tables: Mapping[str, StackTable], segments: Segments, state: Sequence[Segment]
) -> None:
    """Give each eviction policy the state that it had at the commit."""
    states = segments.policy_states(state)
    for stack, table in tables.items():
        table.eviction.load(states.get(stack, b""))
