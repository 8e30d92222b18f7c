"""The embedding rows of one stack on a shard, with their optimizer state: tables of equal width and update
rule are stored together in growing arrays. The rule's parameters are those of each table.

Letters: U keys of a call, N rows of the array, M chosen rows, D width, A state width, K tables of the stack,
P parameters, B buckets.

Two generations of changes can be open. `freeze` copies what changed since the last freeze and starts the next
generation. Until the copy is committed, a rollback must undo both `changed_keys` and the keys of the copy.
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
    """What a freeze copies."""

    block: RowBlock
    changed: Keys  # keys of the block that a rollback must undo; the others are as committed


class PublishableRows(NamedTuple):
    """The answer to a read outside training."""

    rows_UD: np.ndarray  # float32; initial values for keys without a publishable row
    exists_U: np.ndarray  # uint8: 1 = there is a row that may be published
    sequence_U: np.ndarray  # uint64: last delta of the key's bucket; the row is at least as new


class StackTable:
    """Not thread-safe; the shard's lock makes every method atomic. Equal pushes in equal order give equal
    bits."""

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
        *,
        seed: int,
        num_buckets: int,
        eviction: EvictionPolicyFactory,
        publishing: bool = True,
    ) -> None:
        self.name, self.width, self.rule = name, tables[0].dim, tables[0].rule.name
        self.kernel = KERNELS[self.rule]
        self.state_width = tables[0].rule.state_width(self.width)
        self.parameters_KP = np.array([t.rule.parameters for t in tables], np.float64)
        self.first_state_K = np.array([t.rule.first_state for t in tables], np.float32)
        self.names = {t.id: t.name for t in tables}
        self.num_buckets, self.publishing = num_buckets, publishing
        self.num_limited = 0  # gradient rows that were scaled down to MAX_GRADIENT
        self.largest_accumulator = 0.0  # of rows written or restored since the start
        self.embeddings = EmbeddingTable(tables, seed=seed, num_buckets=num_buckets)
        self.eviction = eviction(tables)
        self.clear()

    def clear(self) -> None:
        """Remove all rows and changes, and reset the outbox's sequences."""
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
        """Raises SchemaError: a key's table does not belong to this stack."""
        at = kernels.unknown_table(keys.table_U, self.embeddings.table_K)
        if at >= 0:
            raise SchemaError(
                f"stack {self.name}: expected one of tables {', '.join(self.names.values())}, got table id "
                f"{int(keys.table_U[at])}; use the same schema as the shards"
            )

    def check_gradient(self, keys: Keys, gradient_UD: np.ndarray) -> None:
        """Raises WireError: wrong shape, or a number that is not finite."""
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
                "expected finite gradients, got a NaN or infinity for id "
                f"{int(keys.id_U[at]) & (1 << 64) - 1} of table "
                f"{table!r}; nothing was applied: lower the learning rate or clip gradients",
            )

    def read(self, keys: Keys, max_norm: float) -> PublishableRows:
        """The rows of these keys as far as they may be published. Creates no rows."""
        row_U = self.index.find(keys)
        exists_U = (row_U >= 0) & kernels.publishable(self.embeddings.gather_at(keys, row_U), max_norm)
        rows_UD = self.embeddings.gather_at(keys, np.where(exists_U, row_U, -1))
        bucket_U = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        return PublishableRows(
            rows_UD, exists_U.astype(np.uint8), self.outbox.sequence_B[bucket_U].astype(np.uint64)
        )

    def push(self, keys: Keys, gradient_UD: np.ndarray, time_ms: int) -> np.ndarray:
        """Apply checked gradients (float32 [U, D]) at event time `time_ms`, creating admitted rows; bool [B]:
        buckets changed.

        Room for the keys must have been reserved.
        """
        row_U = self.index.find(keys)
        absent_U = row_U < 0
        if absent_U.any():
            row_U[absent_U] = self._create_rows(keys.take(absent_U))
            admitted_U = row_U >= 0
            if not admitted_U.all():
                keys, row_U, gradient_UD = keys.take(admitted_U), row_U[admitted_U], gradient_UD[admitted_U]
        which_U = kernels.which_table(keys.table_U, self.embeddings.table_K)
        gradient_UD = self._scaled(gradient_UD)
        self.kernel(self.embeddings.rows_ND, self.state_NA, row_U, gradient_UD, which_U, self.parameters_KP)
        touched_B = np.zeros(self.num_buckets, np.bool_)
        flags = DIRTY | UNPUBLISHED if self.publishing else DIRTY
        kernels.stamp(
            row_U, flags, time_ms, self.index.flags_N, self.stamp_ms_N, self.index.bucket_N, touched_B
        )
        return touched_B

    def _scaled(self, gradient_UD: np.ndarray) -> np.ndarray:
        if kernels.largest_number(gradient_UD) <= MAX_GRADIENT:
            return gradient_UD
        out_UD = np.empty_like(gradient_UD)
        self.num_limited += kernels.limit(gradient_UD, MAX_GRADIENT, out_UD)
        return out_UD

    def track_accumulators(self, state_LA: np.ndarray) -> None:
        """Track the largest accumulator: a row with large accumulators hardly changes any more."""
        chosen = state_LA[:, accumulators(self.rule, self.width)]
        if chosen.size:
            self.largest_accumulator = max(self.largest_accumulator, float(chosen.max()))

    def _create_rows(self, keys: Keys) -> np.ndarray:
        """int64 [U]: row numbers of new initial rows; -1 where the key is not admitted."""
        admitted_U = self.eviction.admit(keys)
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

    def num_changed(self) -> int:
        return self.index.count_flagged(DIRTY) + len(self._gone)

    def changed_keys(self) -> Keys:
        """Keys that were changed or expired since the last freeze."""
        return join_keys(self.index.keys_at(self.index.flagged(DIRTY)), self._gone)

    def freeze(self, watermark_ms: int, complete: Collection[int] = ()) -> FrozenRows:
        """Evict by the watermark, then copy all changes since the last freeze, all unpublished rows, and all
        rows of the buckets in `complete`.

        The next generation starts empty.
        """
        self._evict(watermark_ms)
        flags = DIRTY | UNPUBLISHED | IN_FLIGHT
        row_M = self.index.in_buckets(complete, flags)
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
        """The generation of these keys is not committed: they count as changed again."""
        row_K = self.index.find(changed)
        self.index.flags_N[row_K[row_K >= 0]] |= DIRTY
        self._gone = join_keys(self._gone, changed.take(row_K < 0))

    def _evict(self, watermark_ms: int) -> None:
        keys = self.index.keys_at(self.eviction.evict(watermark_ms, self.index, self.stamp_ms_N))
        if not len(keys):
            return
        self.index.remove(keys)
        self._gone = join_keys(self._gone, keys)
        if self.publishing:
            self.outbox.add_tombstones(keys)

    def _take_gone(self) -> tuple[Keys, np.ndarray]:
        """Keys that have no row any more, each once, and bool [G]: whether readers still need a tombstone."""
        unpublished = self.outbox.tombstones()
        gone = self._absent(join_keys(unpublished, self._gone))
        self._gone = no_keys()
        unpublished_keys = KeyIndex(self.num_buckets)
        unpublished_keys.add_new(unpublished)
        return gone, unpublished_keys.find(gone) >= 0

    def _absent(self, keys: Keys) -> Keys:
        """The keys without a row, each once."""
        keys = keys.take(self.index.find(keys) < 0)
        return keys.take(KeyIndex(self.num_buckets).add_new(keys))

    def put(self, block: RowBlock) -> None:
        """Insert committed rows, unchanged since, and remove the block's deleted keys.

        Rows that the block marks as unpublished are not marked here; call `mark_unpublished`.
        """
        self.reserve(block.num_live)
        row_L = self.embeddings.put(block.live, block.rows_LD)
        kernels.put_rows(self.state_NA, row_L, block.state_LA)
        self.track_accumulators(block.state_LA)
        self.stamp_ms_N[row_L] = block.stamp_ms_L
        self.index.remove(block.gone)

    def clear_changes(self) -> None:
        """After a rollback: nothing differs from committed state."""
        self.index.replace_flags(DIRTY)
        self._gone = no_keys()

    def mark_unpublished(self, keys: Keys) -> None:
        """Readers may have another state of these keys: publish the row, or that there is none."""
        if self.publishing:
            row_U = self.index.find(keys)
            self.index.flags_N[row_U[row_U >= 0]] |= UNPUBLISHED | DISOWNED
            self.outbox.add_tombstones(keys.take(row_U < 0))

    def reserve(self, num_more: int) -> None:
        """Allocate memory for `num_more` rows. **If it fails** (MemoryError): the rows are unchanged."""
        self.embeddings.reserve(num_more)
        for name in ("state_NA", "stamp_ms_N"):
            if len(getattr(self, name)) < self.index.capacity:
                setattr(self, name, grown(getattr(self, name), self.index.capacity))


class GradientPush(NamedTuple):
    """One checked push: unique keys and finite gradients [U, D] of some stacks."""

    worker: int
    sequence: int
    time_ms: int
    oldest_engagement_ms: int
    oldest_close_ms: int
    parts: Sequence[tuple[StackTable, Keys, np.ndarray]]
    step: int = 0
    workers: int = 1  # whose pushes of this step form one update (param_server/gradient_barrier.py)
    clip_row_norm: float = 0.0  # norm limit of each row of the sum; 0 = none


def check_owned(index: int, owners: BucketMap, requested: Sequence[Keys]) -> None:
    """Raises FencedError: a key is in a bucket that another shard owns."""
    for keys in requested if owners.num_owners > 1 else ():
        if (at := kernels.first_foreign(keys.table_U, keys.id_U, owners.owner_B, index)) >= 0:
            bucket = bucket_of(int(keys.id_U[at]), int(keys.table_U[at]), len(owners.owner_B))
            raise FencedError(
                f"shard {index}: expected keys of its own buckets (map version {owners.version}), got "
                f"one of bucket {bucket}, which shard {owners.owner_B[bucket]} owns; read the newest "
                "manifest, and check the order of `shards`"
            )


def build_tables(identity: ShardIdentity, eviction: EvictionPolicyFactory) -> dict[str, StackTable]:
    """Stack → its table on this shard, empty."""
    seed, num_buckets, publishing = identity.seed, identity.num_buckets, identity.publishing
    return {
        name: StackTable(
            name, tables, seed=seed, num_buckets=num_buckets, eviction=eviction, publishing=publishing
        )
        for name, tables in identity.schema.stacks.items()
    }


def shapes_of(schema: Schema) -> dict[str, tuple[int, int]]:
    """Stack → (width, state width)."""
    return {name: (t.dim, t.rule.state_width(t.dim)) for name, (t, *_) in schema.stacks.items()}
