"""Which keys get a row, and which rows go: one policy a stack, pure, held by its table under the shard's lock.

A policy is asked at two moments: at a push about keys that have no row yet, and at a freeze about all rows. To plug in another
(admit after n pushes, by probability, keep the most used): write a class of this protocol and give it to `Shard`; its settings
are the schema's `Table`'s. Nothing else changes: the shard stores `state()` in the segment of each commit and gives it back to
`load` at each restore, so that a policy decides after a rollback as it did the first time (G11). For that, answers may depend
on the calls since the beginning or the last `load` alone: no clock, no chance but from the keys.

Letters: U keys, N places, M chosen rows, K tables of the stack.
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
"""Event time before all others: of a row that was never pushed, and of what expires never."""


class EvictionPolicy(Protocol):
    """See the module. Made anew, a policy is as at the beginning."""

    num_spared: int
    """So far: rows that were due to go at a freeze and were kept, since they were too many. Told, not kept in `state`."""

    def admit(self, keys: Keys) -> np.ndarray:
        """bool [U]: which of these keys get a row. **When**: at each push, about its keys without one, in the order pushed.
        A key that gets none keeps its initial value, and this gradient of it is dropped."""

    def evict(self, watermark_ms: int, index: KeyIndex, stamp_ms_N: np.ndarray) -> np.ndarray:
        """int64 [M]: places of the rows that go. **When**: at a freeze, before it copies; never in between. `index` has the
        keys and is not to be changed; `stamp_ms_N` (int64) is the event time of each row's last push."""

    def state(self) -> bytes:
        """All that later answers depend on. **When**: at a freeze, after `evict`. Empty = as at the beginning."""

    def load(self, state: bytes) -> None:
        """Be as when `state()` gave this; empty = the beginning. Raises CheckpointError: it can't be read."""


EvictionPolicyFactory: TypeAlias = Callable[[Sequence[Table]], EvictionPolicy]
"""A stack's tables → its policy, at the beginning."""


class ExpiryPolicy:
    """Every key gets a row at its first push; a row goes when its table's `expire_after_ms` have passed since its last one.

    Where more than `max_share` of a stack's rows would go at once, a wrong time is likelier than so much age: all stay, it is
    said, and the next freeze asks again.
    """

    def __init__(self, tables: Sequence[Table], max_share: float = 1.0) -> None:
        self.names, self.max_share = ", ".join(t.name for t in tables), max_share
        self.num_spared = 0
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
        if len(row_M) <= self.max_share * index.num_live:
            return row_M
        self.num_spared += len(row_M)
        log.error(
            "tables %s: %d of %d rows would expire at once at watermark %d ms, more than max_expired_share = %g: they are kept; "
            "where that much time has passed, raise it",
            self.names,
            len(row_M),
            index.num_live,
            watermark_ms,
            self.max_share,
        )
        return np.zeros(0, np.int64)

    def state(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        """There is none."""
