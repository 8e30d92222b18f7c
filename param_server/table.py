"""The rows of one stack: tables of equal width and update rule, stored together in growing arrays; what a rule's parameters
are is each table's own.

Letters: U keys asked for, N places, M chosen rows, D width, A state width, K tables of the stack, P parameters, B buckets.

Two generations of changes can be open. `freeze` copies what changed since the last freeze and starts the next generation;
until the copy is committed (the caller keeps it), `keys_changed` and the copy's keys together are what a rollback must undo.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from param_server import kernels
from param_server.config import ShardIdentity
from param_server.index import KeyIndex, Keys, grown, join_keys, no_keys
from param_server.kernels import DIRTY, IN_FLIGHT, UNPUBLISHED
from param_server.outbox import Outbox
from param_server.row_block import RowBlock
from param_server.rules import KERNELS
from roo.errors import SchemaError, WireError
from roo.schema import Schema, Table

_NEVER = np.iinfo(np.int64).min


class StackTable:
    """Not thread-safe; the shard's lock makes every method one step. Equal pushes in equal order give equal bits."""

    def __init__(self, name: str, tables: Sequence[Table], *, seed: int, num_buckets: int, publishing: bool = True) -> None:
        self.name, self.width, self.kernel = name, tables[0].dim, KERNELS[tables[0].rule.name]
        self.state_width = tables[0].rule.state_width(self.width)
        self.parameters_KP = np.array([t.rule.parameters for t in tables], np.float64)
        self.first_state_K = np.array([t.rule.first_state for t in tables], np.float32)
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.names = {t.id: t.name for t in tables}
        self.scale_K = np.array([t.init_scale for t in tables], np.float32)
        self.expire_after_ms_K = np.array([t.expire_after_ms for t in tables], np.int64)
        self.seed, self.num_buckets, self.publishing = np.uint64(seed & (1 << 64) - 1), num_buckets, publishing
        self.clear()

    def clear(self) -> None:
        """No rows, no changes. The outbox's sequences begin again too."""
        self.index = KeyIndex(self.num_buckets)
        self.outbox = Outbox(self)
        self.rows_ND = np.zeros((self.index.capacity, self.width), np.float32)
        self.state_NA = np.zeros((self.index.capacity, self.state_width), np.float32)
        self.stamp_ms_N = np.zeros(self.index.capacity, np.int64)
        self._gone = no_keys()

    @property
    def num_rows(self) -> int:
        return self.index.num_live

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays that grow with the rows."""
        return self.index.capacity * (4 * self.width + 4 * self.state_width + 61)

    def check_keys(self, keys: Keys) -> None:
        """Raises SchemaError: a key's table is not one of this stack."""
        at = kernels.unknown_table(keys.table_U, self.table_K)
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
        out_UD = np.empty((len(keys), self.width), np.float32)
        kernels.gather(
            self.rows_ND, self.index.find(keys), keys.table_U, keys.id_U, self.seed, self.table_K, self.scale_K, out_UD
        )
        return out_UD

    def push(self, keys: Keys, gradient_UD: np.ndarray, time_ms: int) -> np.ndarray:
        """Apply checked gradients at event time `time_ms`, making the rows that don't exist; bool [B]: buckets touched."""
        self.reserve(len(keys))
        place_U, new_U = self.index.add(keys)
        which_U = kernels.which_table(keys.table_U, self.table_K)
        kernels.fill_new(
            self.rows_ND,
            self.state_NA,
            place_U,
            new_U,
            keys.table_U,
            keys.id_U,
            which_U,
            self.seed,
            self.scale_K,
            self.first_state_K,
        )
        self.stamp_ms_N[place_U[new_U]] = _NEVER
        self.kernel(self.rows_ND, self.state_NA, place_U, gradient_UD, which_U, self.parameters_KP)
        touched_B = np.zeros(self.num_buckets, np.bool_)
        flags = DIRTY | UNPUBLISHED if self.publishing else DIRTY
        kernels.stamp(place_U, flags, time_ms, self.index.flags_N, self.stamp_ms_N, self.index.bucket_N, touched_B)
        return touched_B

    # Generations

    def num_changed(self) -> int:
        return len(self.index.flagged(DIRTY)) + len(self._gone)

    def keys_changed(self) -> Keys:
        """What was changed or expired since the last freeze."""
        return join_keys(self.index.keys_at(self.index.flagged(DIRTY)), self._gone)

    def freeze(self, watermark_ms: int) -> RowBlock:
        """Expire by the watermark, then copy everything that changed since the last freeze, and what readers haven't got yet;
        the next generation is empty."""
        self._expire(watermark_ms)
        place_M = self.index.flagged(DIRTY | UNPUBLISHED | IN_FLIGHT)
        gone, unpublished_G = self._take_gone()
        block = RowBlock(
            keys=join_keys(self.index.keys_at(place_M), gone),
            unpublished_K=np.concatenate([(self.index.flags_N[place_M] & (UNPUBLISHED | IN_FLIGHT)) != 0, unpublished_G]).astype(
                np.uint8
            ),
            stamp_ms_L=self.stamp_ms_N[place_M],
            rows_LD=kernels.take_rows(self.rows_ND, place_M),
            state_LA=kernels.take_rows(self.state_NA, place_M),
        )
        self.index.replace_flags(DIRTY)
        return block

    def unfreeze(self, block: RowBlock) -> None:
        """The copy will not be committed: its keys belong to the open generation again."""
        place_K = self.index.find(block.keys)
        self.index.flags_N[place_K[place_K >= 0]] |= DIRTY
        self._gone = join_keys(self._gone, block.gone)

    def _expire(self, watermark_ms: int) -> None:
        if not self.expire_after_ms_K.any():
            return
        before_ms_K = np.where(self.expire_after_ms_K > 0, watermark_ms - self.expire_after_ms_K, _NEVER)
        index = self.index
        place_M = kernels.expired(index.flags_N, index.used, index.table_N, self.stamp_ms_N, self.table_K, before_ms_K)
        keys = index.keys_at(place_M)
        index.remove(keys)
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

    def put(self, block: RowBlock, flags: int = 0) -> None:
        """Rows of committed state as they were, clean but for `flags`; its gone keys are forgotten. What the block marks as
        unpublished is not marked here (`mark_unpublished`)."""
        self.reserve(block.num_live)
        place_L, _ = self.index.add(block.live)
        kernels.put_rows(self.rows_ND, place_L, block.rows_LD)
        kernels.put_rows(self.state_NA, place_L, block.state_LA)
        self.stamp_ms_N[place_L] = block.stamp_ms_L
        self.index.flags_N[place_L] = kernels.LIVE | flags
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
            place_U = self.index.find(keys)
            self.index.flags_N[place_U[place_U >= 0]] |= UNPUBLISHED
            self.outbox.add_tombstones(keys.take(place_U < 0))

    def reserve(self, num_more: int) -> None:
        """Take memory for that many more rows. **If it fails** (MemoryError): the rows are as they were."""
        if self.index.reserve(num_more):
            for name in ("rows_ND", "state_NA", "stamp_ms_N"):
                setattr(self, name, grown(getattr(self, name), self.index.capacity))


def build_tables(identity: ShardIdentity) -> dict[str, StackTable]:
    """Stack → its rows on this shard, none yet."""
    seed, num_buckets, publishing = identity.seed, identity.num_buckets, identity.publishing
    return {
        name: StackTable(name, tables, seed=seed, num_buckets=num_buckets, publishing=publishing)
        for name, tables in identity.schema.stacks.items()
    }


def shapes_of(schema: Schema) -> dict[str, tuple[int, int]]:
    """Stack → (width, state width)."""
    return {name: (t.dim, t.rule.state_width(t.dim)) for name, (t, *_) in schema.stacks.items()}
