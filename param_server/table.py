"""The embedding rows of one stack on a shard, with their optimizer state: tables of equal width and update
rule are stored together in growing arrays. The rule's parameters are those of each table.

Letters: U keys of a call, N rows of the array, M chosen rows, D width, A state width, K tables of the stack,
P parameters, B buckets.

Two generations of changes can be open. A freeze fixes what changed since the last freeze and starts the next
generation. Until the frozen rows are committed, a rollback must undo both `changed_keys` and their keys.

A freeze marks rows and copies none, so it takes milliseconds for millions of rows. The values are copied
while training continues: by `copy_frozen` when a segment is written, and by a push just before it changes a
row that is still frozen (copy-on-write by row).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from param_server import kernels
from param_server.config import ShardIdentity
from param_server.embedding_table import EmbeddingTable, KeyIndex, Keys, grown, join_keys
from param_server.eviction import NEVER, EvictionPolicyFactory
from param_server.kernels import DIRTY, DIRTY_A, DIRTY_B, DISOWNED, IN_FLIGHT, UNPUBLISHED
from param_server.outbox import SLICE_ROWS, Outbox
from param_server.row_block import RowBlock
from param_server.rules import KERNELS, MAX_GRADIENT, accumulators
from roostream.errors import FencedError, SchemaError, WireError
from roostream.runtime.bucket_map import BucketMap
from roostream.schema.ids import bucket_of
from roostream.schema.schema import Schema, Table

_PUBLISHING = UNPUBLISHED | IN_FLIGHT
_SAVED_ROWS = 1 << 14
COPY_BYTES = 1 << 20
"""Bytes of rows that are copied while the shard's lock is held once."""


class SavedRows:
    """Copies of rows, in blocks of equal size, so that saving one more never moves the others."""

    def __init__(self, width: int, state_width: int) -> None:
        self.width, self.state_width, self.num_rows = width, state_width, 0
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def append(self, stamp_ms_M: np.ndarray, rows_MD: np.ndarray, state_MA: np.ndarray) -> np.ndarray:
        """Add rows; return their numbers here (int64 [M])."""
        number_M = np.arange(self.num_rows, self.num_rows + len(stamp_ms_M))
        while len(self._blocks) * _SAVED_ROWS < self.num_rows + len(stamp_ms_M):
            self._blocks.append(
                (
                    np.empty(_SAVED_ROWS, np.int64),
                    np.empty((_SAVED_ROWS, self.width), np.float32),
                    np.empty((_SAVED_ROWS, self.state_width), np.float32),
                )
            )
        for block, here_M in self._by_block(number_M):
            for array, values in zip(block, (stamp_ms_M, rows_MD, state_MA), strict=True):
                array[number_M[here_M] % _SAVED_ROWS] = values[here_M]
        self.num_rows += len(stamp_ms_M)
        return number_M

    def put_into(self, number_M: np.ndarray, at_M: np.ndarray, into: Sequence[np.ndarray]) -> None:
        """Copy the rows with these numbers to positions `at_M` (int64) of arrays (stamps, rows, state)."""
        for block, here_M in self._by_block(number_M):
            for array, out in zip(block, into, strict=True):
                out[at_M[here_M]] = array[number_M[here_M] % _SAVED_ROWS]

    def _by_block(
        self, number_M: np.ndarray
    ) -> Iterator[tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]]:
        """(block, positions in `number_M` of its rows)."""
        block_M = number_M // _SAVED_ROWS
        for block in np.unique(block_M).tolist():
            yield self._blocks[block], np.flatnonzero(block_M == block)


class FrozenRows:
    """What a freeze has fixed: the rows that were changed before it, those that replicas did not have yet,
    and all rows of the buckets in `chosen_B`.

    The freeze itself looks at no row. `StackTable.mark` finds the rows afterwards, while training changes
    them: a push saves a frozen row before it changes it.
    """

    def __init__(
        self,
        num_changed: int,
        flags: int,
        chosen_B: np.ndarray,
        gone: Keys,
        unpublished_G: np.ndarray,
        saved: SavedRows,
    ) -> None:
        """`num_changed`: keys that were changed or expired. `flags`: a row without the flag of later changes
        is frozen if it has any of these. `gone`: keys that have no row; `unpublished_G` (bool): whether
        replicas still need their tombstone. `saved`: where pushes copy rows to."""
        self.num_changed, self.flags, self.chosen_B = num_changed, flags, chosen_B
        self.gone, self.unpublished_G, self.saved = gone, unpublished_G, saved
        self.row_M, self.flags_M = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._noted: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, numbers in `saved`, flags
        self._number_M, self._num_looked_up = np.zeros(0, np.int64), 0

    def __len__(self) -> int:
        """Number of keys, with those that have no row; known after `set_rows`."""
        return len(self.row_M) + len(self.gone)

    @property
    def changed_row_M(self) -> np.ndarray:
        """int64: rows that differ from what is committed or published; the others belong to buckets that are
        written whole. Empty before `set_rows`."""
        return self.row_M[(self.flags_M & (DIRTY | _PUBLISHING)) != 0]

    def changed_keys(self, index: KeyIndex) -> Keys:
        """Keys that a rollback must undo; before `set_rows` only those without a row."""
        return join_keys(index.keys_at(self.changed_row_M), self.gone)

    def note_saved(self, row_M: np.ndarray, number_M: np.ndarray, flags_M: np.ndarray) -> None:
        self._noted.append((row_M, number_M, flags_M))

    def set_rows(self, rows: Sequence[np.ndarray], flags: Sequence[np.ndarray]) -> None:
        """Complete the rows that `mark` has found by those that were saved before it found them. Needs no
        lock."""
        noted = tuple(self._noted)
        row_M = np.concatenate([*rows, *(rows_M for rows_M, _, _ in noted)])
        flags_M = np.concatenate([*flags, *(flags_M for _, _, flags_M in noted)])
        self.row_M, first_M = np.unique(row_M, return_index=True)
        self.flags_M = flags_M[first_M]
        self._number_M, self._num_looked_up = np.full(len(self.row_M), -1, np.int64), 0

    def saved_numbers(self, at_M: np.ndarray) -> np.ndarray:
        """int64: number in `saved` of the rows at these positions of `row_M`; -1 = the table has it."""
        for row_M, number_M, _ in self._noted[self._num_looked_up :]:
            self._number_M[np.searchsorted(self.row_M, row_M)] = number_M
        self._num_looked_up = len(self._noted)
        return self._number_M[at_M]


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
        self.outbox = Outbox(name, self.embeddings)
        self.eviction = eviction(tables)
        self.clear()

    def clear(self) -> None:
        """Remove all rows and changes, and reset the outbox's sequences."""
        self.embeddings.clear()
        self.outbox.clear()
        self.state_NA = np.zeros((self.index.capacity, self.state_width), np.float32)
        self.stamp_ms_N = np.zeros(self.index.capacity, np.int64)
        self._gone: list[Keys] = []
        self._num_dirty = 0
        self._dirty, self._dirty_before = DIRTY_A, DIRTY_B  # changed since the last freeze, and before it
        self.frozen: FrozenRows | None = None  # pushes save its rows before they change them

    @property
    def index(self) -> KeyIndex:
        return self.embeddings.index

    @property
    def num_rows(self) -> int:
        return self.index.num_live

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its key, state and time."""
        return 4 * (self.width + self.state_width) + 21

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
                f"{int(keys.id_U[at]) & (1 << 64) - 1} of table {table!r}; nothing "
                "was applied: lower the learning rate or clip gradients",
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
        if self.frozen is not None:
            self._save(self.frozen, row_U[~absent_U])
        if absent_U.any():
            row_U[absent_U] = self._create_rows(keys.take(absent_U))
            admitted_U = row_U >= 0
            if not admitted_U.all():
                keys, row_U, gradient_UD = keys.take(admitted_U), row_U[admitted_U], gradient_UD[admitted_U]
        which_U = kernels.which_table(keys.table_U, self.embeddings.table_K)
        gradient_UD = self._scaled(gradient_UD)
        self.kernel(self.embeddings.rows_ND, self.state_NA, row_U, gradient_UD, which_U, self.parameters_KP)
        return self._mark_changed(row_U, time_ms)

    def overwrite(self, block: RowBlock) -> np.ndarray:
        """Set rows and state that were trained elsewhere. They count as changed at the block's times; bool
        [B]: buckets changed."""
        self.reserve(block.num_live)
        row_L = self.index.find(block.live)
        known_L, stamp_ms_L = row_L >= 0, block.stamp_ms_L.copy()
        stamp_ms_L[known_L] = np.maximum(stamp_ms_L[known_L], self.stamp_ms_N[row_L[known_L]])
        if self.frozen is not None:
            self._save(self.frozen, row_L[known_L])
        row_L = self.embeddings.put(block.live, block.rows_LD)
        kernels.put_rows(self.state_NA, row_L, block.state_LA)
        self.stamp_ms_N[row_L] = stamp_ms_L
        return self._mark_changed(row_L, NEVER)

    def _mark_changed(self, row_U: np.ndarray, time_ms: int) -> np.ndarray:
        touched_B = np.zeros(self.num_buckets, np.bool_)
        self._num_dirty += kernels.stamp(
            row_U,
            self._dirty,
            UNPUBLISHED if self.publishing else 0,
            time_ms,
            self.index.flags_N,
            self.stamp_ms_N,
            self.index.bucket_N,
            touched_B,
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
        """Any thread; needs no lock."""
        return self._num_dirty + sum(map(len, tuple(self._gone)))

    def changed_keys(self) -> Keys:
        """Keys that were changed or expired since the last freeze. Rows of an earlier freeze are among them
        until it is released."""
        return join_keys(self.index.keys_at(self.index.flagged(DIRTY)), *self._gone)

    # A freeze, in this order: due_rows, evict, gone_keys, freeze. No push may come in between: then the steps
    # that only read need no lock, and the lock may be released between two steps of a generator.

    def due_rows(self, watermark_ms: int) -> np.ndarray:
        """int64 [M]: rows to evict. Only reads."""
        return self.eviction.evict(watermark_ms, self.index, self.stamp_ms_N)

    def evict(self, row_M: np.ndarray) -> Generator[None, None, None]:
        """Remove these rows."""
        for start in range(0, len(row_M), SLICE_ROWS // 4):
            keys = self.index.keys_at(row_M[start : start + SLICE_ROWS // 4])
            self.index.remove(keys)
            self._gone.append(keys)
            if self.publishing:
                self.outbox.add_tombstones(keys)
            yield

    def gone_keys(self, unpublished: Keys) -> tuple[Keys, np.ndarray]:
        """Keys that have no row any more, each once, and bool [G]: whether replicas still need a tombstone.
        `unpublished`: `Outbox.tombstones`. Only reads."""
        gone = self._absent(join_keys(unpublished, *self._gone))
        unpublished_keys = KeyIndex(self.num_buckets)
        unpublished_keys.add_new(unpublished)
        return gone, unpublished_keys.find(gone) >= 0

    def freeze(self, gone: Keys, unpublished_G: np.ndarray, complete: Collection[int] = ()) -> FrozenRows:
        """Freeze all changes since the last freeze, all unpublished rows, and all rows of the buckets in
        `complete`. The next generation starts empty. `gone`, `unpublished_G`: of `gone_keys`.

        Takes the same time with any number of rows.
        """
        chosen_B = np.zeros(self.num_buckets, np.bool_)
        chosen_B[list(complete)] = True
        self._dirty, self._dirty_before = self._dirty_before, self._dirty
        flags = self._dirty_before | _PUBLISHING
        saved = SavedRows(self.width, self.state_width)
        self.frozen = FrozenRows(self.num_changed(), flags, chosen_B, gone, unpublished_G, saved)
        self._gone, self._num_dirty = [], 0
        return self.frozen

    def _save(self, frozen: FrozenRows, row_U: np.ndarray) -> None:
        """Copy those of the rows (int64) that are frozen, before they change for the first time."""
        flags_N = self.index.flags_N
        row_M = kernels.frozen_among(
            flags_N, self.index.bucket_N, row_U, self._dirty, frozen.flags, frozen.chosen_B
        )
        if len(row_M):
            number_M = frozen.saved.append(
                self.stamp_ms_N[row_M],
                kernels.take_rows(self.embeddings.rows_ND, row_M),
                kernels.take_rows(self.state_NA, row_M),
            )
            frozen.note_saved(row_M, number_M, flags_N[row_M])

    def mark(self, frozen: FrozenRows) -> Generator[None, None, tuple[list[np.ndarray], list[np.ndarray]]]:
        """Find the frozen rows that were not changed since, and mark them; return them for
        `FrozenRows.set_rows`. The lock may be released between two steps.

        Rows that replicas have received since the freeze may be missing: what was sent since then is sent
        again after a restore.
        """
        index, rows, flags = self.index, [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
        wanted = frozen.flags = self._dirty_before | _PUBLISHING
        for numbers in index.slices(SLICE_ROWS):
            row_M = kernels.in_buckets(
                index.flags_N, index.bucket_N, numbers.start, numbers.stop, frozen.chosen_B, wanted
            )
            row_M = kernels.frozen_among(
                index.flags_N, index.bucket_N, row_M, self._dirty, wanted, frozen.chosen_B
            )
            flags_M = index.flags_N[row_M]
            index.flags_N[row_M[(flags_M & _PUBLISHING) != 0]] |= self._dirty_before
            rows.append(row_M)
            flags.append(flags_M)
            yield
        frozen.flags = self._dirty_before  # a row that becomes unpublished from now on is not frozen
        return rows, flags

    def copy_frozen(self, frozen: FrozenRows, at_M: np.ndarray) -> Generator[None, None, RowBlock]:
        """A block of the frozen rows at positions `at_M` (int64) of `frozen.row_M`, as they were at the
        freeze. The lock may be released between two steps."""
        row_M = frozen.row_M[at_M]
        stamp_ms_M = np.empty(len(row_M), np.int64)
        rows_MD = np.empty((len(row_M), self.width), np.float32)
        state_MA = np.empty((len(row_M), self.state_width), np.float32)
        num_rows = max(COPY_BYTES // (4 * (self.width + self.state_width) + 8), 1)
        for start in range(0, len(row_M), num_rows):
            here = slice(start, start + num_rows)
            stamp_ms_M[here] = self.stamp_ms_N[row_M[here]]
            rows_MD[here] = kernels.take_rows(self.embeddings.rows_ND, row_M[here])
            state_MA[here] = kernels.take_rows(self.state_NA, row_M[here])
            number_M = frozen.saved_numbers(at_M[here])
            saved_M = np.flatnonzero(number_M >= 0)
            frozen.saved.put_into(number_M[saved_M], saved_M + start, (stamp_ms_M, rows_MD, state_MA))
            yield
        return RowBlock(
            keys=self.index.keys_at(row_M),
            unpublished_K=((frozen.flags_M[at_M] & (UNPUBLISHED | IN_FLIGHT)) != 0).astype(np.uint8),
            stamp_ms_L=stamp_ms_M,
            rows_LD=rows_MD,
            state_LA=state_MA,
        )

    def release(self, frozen: FrozenRows) -> Generator[None, None, None]:
        """The frozen values are not needed any more. The lock may be released between two steps."""
        self.frozen = None
        for start in range(0, len(frozen.row_M), SLICE_ROWS):
            self.index.replace_flags_at(frozen.row_M[start : start + SLICE_ROWS], self._dirty_before)
            yield

    def unfreeze(self, frozen: FrozenRows) -> Generator[None, None, None]:
        """The frozen generation is not committed: its rows count as changed again. The lock may be released
        between two steps."""
        self.frozen = None
        for numbers in self.index.slices(SLICE_ROWS):
            row_M = self.index.flagged(self._dirty_before, numbers)
            self._num_dirty += self.index.replace_flags_at(row_M, self._dirty_before, self._dirty)
            yield
        released_M = frozen.changed_row_M
        for start in range(0, len(released_M), SLICE_ROWS):
            row_M = released_M[start : start + SLICE_ROWS]
            self._num_dirty += int(((self.index.flags_N[row_M] & self._dirty) == 0).sum())
            self.index.flags_N[row_M] |= self._dirty
            yield
        self._gone.append(frozen.gone)

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
        """After a rollback: nothing differs from committed state, and nothing is frozen."""
        self.index.replace_flags(DIRTY)
        self._gone, self._num_dirty, self.frozen = [], 0, None

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
