"""The rows of one stack: tables of equal width and update rule, stored together in growing arrays; what a rule's parameters
are is each table's own.

Letters: U keys asked for, N places, M chosen rows, D width, A state width, K tables of the stack, P parameters, B buckets.

Two generations of changes can be open. `freeze` copies what changed since the last freeze and starts the next generation;
until the copy is committed (the caller keeps it), `keys_changed` and the copy's keys together are what a rollback must undo.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from param_server import kernels
from param_server.config import ShardIdentity
from param_server.embedding_table import EmbeddingTable, KeyIndex, Keys, grown, join_keys, no_keys
from param_server.eviction import NEVER, EvictionPolicyFactory
from param_server.kernels import DIRTY, DISOWNED, IN_FLIGHT, UNPUBLISHED
from param_server.outbox import Outbox
from param_server.row_block import RowBlock
from param_server.rules import KERNELS, MAX_GRADIENT, accumulators
from roostream.errors import FencedError, SchemaError, WireError
from roostream.runtime.bucket_map import BucketMap
from roostream.schema.ids import bucket_of
from roostream.schema.schema import Schema, Table


class FrozenRows(NamedTuple):
    """What a freeze gives."""

    block: RowBlock
    changed: (
        Keys  # of the block's keys, those that a rollback must undo: the others are as they were committed
    )


class PublishableRows(NamedTuple):
    """What a reader gets of keys that it asks for."""

    rows_UD: np.ndarray  # float32; the initial value where there is none
    there_U: np.ndarray  # uint8: 1 = there is a row, and it may be published
    sequence_U: (
        np.ndarray
    )  # uint64: of the last delta of the key's bucket; the row is as new as that or newer


class StackTable:
    """Not thread-safe; the shard's lock makes every method one step. Equal pushes in equal order give equal bits."""

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
        *,
        seed: int,
        num_buckets: int,
        residency: EvictionPolicyFactory,
        publishing: bool = True,
    ) -> None:
        self.name, self.width, self.rule = name, tables[0].dim, tables[0].rule.name
        self.kernel = KERNELS[self.rule]
        self.state_width = tables[0].rule.state_width(self.width)
        self.parameters_KP = np.array([t.rule.parameters for t in tables], np.float64)
        self.first_state_K = np.array([t.rule.first_state for t in tables], np.float32)
        self.names = {t.id: t.name for t in tables}
        self.num_buckets, self.publishing = num_buckets, publishing
        self.num_limited = 0  # rows of gradients that were beyond MAX_GRADIENT
        self.largest_accumulator = 0.0  # of the rows written or read back since the start
        self.embeddings = EmbeddingTable(tables, seed=seed, num_buckets=num_buckets)
        self.residency = residency(tables)
        self.clear()

    def clear(self) -> None:
        """No rows, no changes. The outbox's sequences begin again too."""
        self.embeddings.clear()
        self.outbox = Outbox(self.name, self.embeddings)
        self.state_NA = np.zeros((self.index.capacity, self.state_width), np.float32)
        self.stamp_ms_N = np.zeros(self.index.capacity, np.int64)
        self._gone = no_keys()

    @property
    def index(self) -> KeyIndex:
        return self.embeddings.index

    @property
    def num_rows(self) -> int:
        return self.index.num_live

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays that grow with the rows."""
        return self.index.capacity * (4 * self.width + 4 * self.state_width + 61)

    def check_keys(self, keys: Keys) -> None:
        """Raises SchemaError: a key's table is not one of this stack."""
        at = kernels.unknown_table(keys.table_U, self.embeddings.table_K)
        if at >= 0:
            raise SchemaError(
                f"stack {self.name}: expected one of tables {', '.join(self.names.values())}, got table id "
                f"{int(keys.table_U[at])}; use the same schema as the shards"
            )

    def check_gradient(self, keys: Keys, gradient_UD: np.ndarray) -> None:
        """Raises WireError: another shape than the keys', or a number that is not finite."""
        if gradient_UD.shape != (len(keys), self.width) or gradient_UD.dtype != np.float32:
            raise WireError(
                "bad_shape",
                f"stack {self.name}: expected float32 gradients of shape {(len(keys), self.width)}, "
                f"got {gradient_UD.dtype} {gradient_UD.shape}",
            )
        at = kernels.first_non_finite(gradient_UD)
        if at >= 0:
            table = self.names.get(int(keys.table_U[at]), "?")
            raise WireError(
                "non_finite",
                f"expected finite gradients, got a NaN or infinity for id {int(keys.id_U[at]) & (1 << 64) - 1} of table "
                f"{table!r}; nothing was applied: lower the learning rate or clip",
            )

    def pull(self, keys: Keys) -> np.ndarray:
        """float32 [U, D]; a key without a row reads as its initial value, and still has none."""
        return self.embeddings.gather(keys)

    def read(self, keys: Keys, max_norm: float) -> PublishableRows:
        """What readers may have of these keys; makes nothing."""
        row_U = self.index.find(keys)
        there_U = (row_U >= 0) & kernels.publishable(self.embeddings.gather_at(keys, row_U), max_norm)
        rows_UD = self.embeddings.gather_at(keys, np.where(there_U, row_U, -1))
        bucket_U = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        return PublishableRows(
            rows_UD, there_U.astype(np.uint8), self.outbox.sequence_B[bucket_U].astype(np.uint64)
        )

    def push(self, keys: Keys, gradient_UD: np.ndarray, time_ms: int) -> np.ndarray:
        """Apply checked gradients (float32 [U, D]) at event time `time_ms`, making the rows that don't exist and are admitted;
        bool [B]: buckets touched. Room for the keys must have been taken (`reserve`)."""
        row_U = self.index.find(keys)
        absent_U = row_U < 0
        if absent_U.any():
            row_U[absent_U] = self._make(keys.take(absent_U))
            there_U = row_U >= 0
            if not there_U.all():
                keys, row_U, gradient_UD = keys.take(there_U), row_U[there_U], gradient_UD[there_U]
        which_U = kernels.which_table(keys.table_U, self.embeddings.table_K)
        gradient_UD = self._limited(gradient_UD)
        self.kernel(self.embeddings.rows_ND, self.state_NA, row_U, gradient_UD, which_U, self.parameters_KP)
        touched_B = np.zeros(self.num_buckets, np.bool_)
        flags = DIRTY | UNPUBLISHED if self.publishing else DIRTY
        kernels.stamp(
            row_U, flags, time_ms, self.index.flags_N, self.stamp_ms_N, self.index.bucket_N, touched_B
        )
        return touched_B

    def _limited(self, gradient_UD: np.ndarray) -> np.ndarray:
        if kernels.largest_number(gradient_UD) <= MAX_GRADIENT:
            return gradient_UD
        out_UD = np.empty_like(gradient_UD)
        self.num_limited += kernels.limit(gradient_UD, MAX_GRADIENT, out_UD)
        return out_UD

    def note_state(self, state_LA: np.ndarray) -> None:
        """Remember the largest accumulator seen: a row whose accumulators are large hardly moves any more."""
        chosen = state_LA[:, accumulators(self.rule, self.width)]
        if chosen.size:
            self.largest_accumulator = max(self.largest_accumulator, float(chosen.max()))

    def _make(self, keys: Keys) -> np.ndarray:
        """int64 [U]: places of first values for keys without a row; -1 where the key isn't admitted."""
        admitted_U = self.residency.admit(keys)
        keys = keys.take(admitted_U)
        row_M, new_M = self.index.add(keys)
        kernels.fill_new(
            self.embeddings.rows_ND,
            self.state_NA,
            row_M,
            new_M,
            keys.table_U,
            keys.id_U,
            kernels.which_table(keys.table_U, self.embeddings.table_K),
            self.embeddings.seed,
            self.embeddings.scale_K,
            self.first_state_K,
        )
        self.stamp_ms_N[row_M[new_M]] = NEVER
        row_U = np.full(len(admitted_U), -1, np.int64)
        row_U[admitted_U] = row_M
        return row_U

    # Generations

    def num_changed(self) -> int:
        return self.index.count_flagged(DIRTY) + len(self._gone)

    def keys_changed(self) -> Keys:
        """What was changed or expired since the last freeze."""
        return join_keys(self.index.keys_at(self.index.flagged(DIRTY)), self._gone)

    def freeze(self, watermark_ms: int, whole: Collection[int] = ()) -> FrozenRows:
        """Evict by the watermark, then copy everything that changed since the last freeze, what readers haven't got yet, and all
        of the buckets in `whole`; the next generation is empty."""
        self._evict(watermark_ms)
        flags = DIRTY | UNPUBLISHED | IN_FLIGHT
        row_M = self.index.in_buckets(whole, flags)
        changed = self.index.keys_at(row_M[(self.index.flags_N[row_M] & flags) != 0])
        gone, unpublished_G = self._take_gone()
        block = RowBlock(
            keys=join_keys(self.index.keys_at(row_M), gone),
            unpublished_K=np.concatenate(
                [(self.index.flags_N[row_M] & (UNPUBLISHED | IN_FLIGHT)) != 0, unpublished_G]
            ).astype(np.uint8),
            stamp_ms_L=self.stamp_ms_N[row_M],
            rows_LD=kernels.take_rows(self.embeddings.rows_ND, row_M),
            state_LA=kernels.take_rows(self.state_NA, row_M),
        )
        self.index.replace_flags(DIRTY)
        return FrozenRows(block, join_keys(changed, gone))

    def unfreeze(self, changed: Keys) -> None:
        """The generation of these keys will not be committed: they belong to the open one again."""
        row_K = self.index.find(changed)
        self.index.flags_N[row_K[row_K >= 0]] |= DIRTY
        self._gone = join_keys(self._gone, changed.take(row_K < 0))

    def _evict(self, watermark_ms: int) -> None:
        keys = self.index.keys_at(self.residency.evict(watermark_ms, self.index, self.stamp_ms_N))
        if not len(keys):
            return
        self.index.remove(keys)
        self._gone = join_keys(self._gone, keys)
        if self.publishing:
            self.outbox.add_tombstones(keys)

    def _take_gone(self) -> tuple[Keys, np.ndarray]:
        """Keys that have no row any more, each once, and bool [G]: whether readers are yet to be told."""
        unpublished = self.outbox.tombstones()
        gone = self._absent(join_keys(unpublished, self._gone))
        self._gone = no_keys()
        told = KeyIndex(self.num_buckets)
        told.add_new(unpublished)
        return gone, told.find(gone) >= 0

    def _absent(self, keys: Keys) -> Keys:
        """Those without a row, each once."""
        keys = keys.take(self.index.find(keys) < 0)
        return keys.take(KeyIndex(self.num_buckets).add_new(keys))

    # Restoring

    def put(self, block: RowBlock) -> None:
        """Rows of committed state as they were, clean, where no row has been changed since; its gone keys are forgotten. What the
        block marks as unpublished is not marked here (`mark_unpublished`)."""
        self.reserve(block.num_live)
        row_L = self.embeddings.put(block.live, block.rows_LD)
        kernels.put_rows(self.state_NA, row_L, block.state_LA)
        self.note_state(block.state_LA)
        self.stamp_ms_N[row_L] = block.stamp_ms_L
        self.index.remove(block.gone)

    def forget(self, keys: Keys) -> None:
        """Rows that committed state doesn't have."""
        self.index.remove(keys)

    def forget_changes(self) -> None:
        """A rollback is done: nothing differs from committed state."""
        self.index.replace_flags(DIRTY)
        self._gone = no_keys()

    def mark_unpublished(self, keys: Keys) -> None:
        """Readers may have another state of these keys: send them the row, or that there is none."""
        if self.publishing:
            row_U = self.index.find(keys)
            self.index.flags_N[row_U[row_U >= 0]] |= UNPUBLISHED | DISOWNED
            self.outbox.add_tombstones(keys.take(row_U < 0))

    def reserve(self, num_more: int) -> None:
        """Take memory for that many more rows. **If it fails** (MemoryError): the rows are as they were."""
        self.embeddings.reserve(num_more)
        for name in ("state_NA", "stamp_ms_N"):
            if len(getattr(self, name)) < self.index.capacity:
                setattr(self, name, grown(getattr(self, name), self.index.capacity))


class GradientPush(NamedTuple):
    """One push, checked: unique keys and finite gradients [U, D] of some stacks."""

    worker: int
    sequence: int
    time_ms: int
    oldest_engagement_ms: int
    oldest_close_ms: int
    parts: Sequence[tuple[StackTable, Keys, np.ndarray]]
    step: int = 0
    workers: int = 1  # whose pushes of this step are one update (param_server/gradient_barrier.py)
    clip_row_norm: float = 0.0  # of each row of their sum, at most; 0 = any


def check_owned(index: int, owners: BucketMap, asked: Sequence[Keys]) -> None:
    """Raises FencedError: a key is in a bucket that another shard than `index` has."""
    for keys in asked if owners.num_owners > 1 else ():
        if (at := kernels.first_foreign(keys.table_U, keys.id_U, owners.owner_B, index)) >= 0:
            bucket = bucket_of(int(keys.id_U[at]), int(keys.table_U[at]), len(owners.owner_B))
            raise FencedError(
                f"shard {index}: expected keys of its own buckets by map {owners.version}, got one of {bucket}, which shard "
                f"{owners.owner_B[bucket]} has; take the owners from the newest manifest, and check the order of `shards`"
            )


def build_tables(identity: ShardIdentity, residency: EvictionPolicyFactory) -> dict[str, StackTable]:
    """Stack → its rows on this shard, none yet."""
    seed, num_buckets, publishing = identity.seed, identity.num_buckets, identity.publishing
    return {
        name: StackTable(
            name, tables, seed=seed, num_buckets=num_buckets, residency=residency, publishing=publishing
        )
        for name, tables in identity.schema.stacks.items()
    }


def shapes_of(schema: Schema) -> dict[str, tuple[int, int]]:
    """Stack → (width, state width)."""
    return {name: (t.dim, t.rule.state_width(t.dim)) for name, (t, *_) in schema.stacks.items()}
