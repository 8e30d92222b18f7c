"""Admission and eviction: which keys get an embedding row, and which rows expire. Each stack (tables of equal
width) has one policy. It does no I/O and is guarded by the shard's lock.

A policy is asked at two moments: at a push about keys without a row, and at a freeze about all rows. To plug
in another one (admit after n pushes, by probability, keep the most used), implement `EvictionPolicy` and pass
it to `Shard`; its settings belong to the schema's `Table`. The shard stores `state()` in the segment of each
commit and passes it to `load` at each restore, so a policy decides after a rollback as it did the first time
(guarantee G11). So answers may depend on the calls since the beginning or the last `load` alone: no clock,
and no randomness except from the keys.

Letters: U keys, N rows, M chosen rows, K tables of the stack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from param_server import kernels
from param_server.embedding_table import KeyIndex, Keys
from roostream.schema.schema import Table

log = logging.getLogger("roostream.shard")

NEVER = np.iinfo(np.int64).min
"""The smallest event time: of rows that were never pushed, and the limit of tables that never expire."""


class EvictionPolicy(Protocol):
    """See the module. A new object is in the initial state."""

    num_spared: int
    """Rows so far that were due to expire and were kept because they were too many. Not part of `state`."""

    def admit(self, keys: Keys) -> np.ndarray:
        """bool [U]: which of these keys get a row. **Called** at each push for its keys without one, in
        order. A rejected key keeps its initial value, and its gradient is dropped."""

    def evict(self, watermark_ms: int, index: KeyIndex, stamp_ms_N: np.ndarray) -> np.ndarray:
        """int64 [M]: rows to remove. **Called** at a freeze before it copies, never in between.
        `index` must not be changed; `stamp_ms_N` (int64) is the event time of each row's last push."""

    def state(self) -> bytes:
        """Everything that later answers depend on. **Called** at a freeze, after `evict`. Empty = initial
        state."""

    def load(self, state: bytes) -> None:
        """Return to the state that `state()` gave; empty = initial. Raises CheckpointError: it cannot be
        read."""


EvictionPolicyFactory: TypeAlias = Callable[[Sequence[Table]], EvictionPolicy]
"""A stack's tables → its policy in the initial state."""


class ExpiryPolicy:
    """Every key gets a row at its first push. A row expires `expire_after_ms` of its table after its last
    push.

    If more than `max_share` of a table's rows would expire at once, a wrong time is more likely than so much
    age. Then all rows of that table stay, an error is logged, and the next freeze asks again.
    """

    def __init__(self, tables: Sequence[Table], max_share: float = 1.0) -> None:
        self.names, self.max_share = [t.name for t in tables], max_share
        self.num_spared = 0
        self._logged: dict[int, int] = {}  # table → rows that were kept when it was last logged
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.expire_after_ms_K = np.array([t.expire_after_ms for t in tables], np.int64)

    def admit(self, keys: Keys) -> np.ndarray:
        return np.ones(len(keys), np.bool_)

    def evict(self, watermark_ms: int, index: KeyIndex, stamp_ms_N: np.ndarray) -> np.ndarray:
        if not self.expire_after_ms_K.any():
            return np.zeros(0, np.int64)
        before_ms_K = np.where(self.expire_after_ms_K > 0, watermark_ms - self.expire_after_ms_K, NEVER)
        row_M = kernels.expired(
            index.flags_N, index.used, index.table_N, stamp_ms_N, self.table_K, before_ms_K
        )
        if not len(row_M):
            return row_M
        which_M = kernels.which_table(index.table_N[row_M], self.table_K)
        due_K = np.bincount(which_M, minlength=len(self.table_K))
        live_K = np.zeros(len(self.table_K), np.int64)
        kernels.count_by_table(index.flags_N, index.used, index.table_N, self.table_K, live_K)
        spared_K = due_K > self.max_share * live_K
        for k in np.flatnonzero(spared_K).tolist():
            self.num_spared += int(due_K[k])
            if self._logged.get(k) == due_K[k]:
                continue
            self._logged[k] = int(due_K[k])
            log.error(
                "table %s: %d of %d rows would expire at once at watermark %d ms, more than "
                "max_expired_share = %g; they are kept. Raise max_expired_share if that much time has passed",
                self.names[k],
                due_K[k],
                live_K[k],
                watermark_ms,
                self.max_share,
            )
        return row_M[~spared_K[which_M]]

    def state(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        """Stateless."""
