"""Which keys get a row, and which rows go: one policy a stack, pure, held by its table under the shard's lock.

A policy is asked at two moments: at a push about keys that have no row yet, and at a freeze about all rows. To plug in another
(admit after n pushes, by probability, keep the most used): write a class of this protocol and give it to `Shard`; its settings
are the schema's `Table`'s. Nothing else changes: the shard stores `state()` in the segment of each commit and gives it back to
`load` at each restore, so that a policy decides after a rollback as it did the first time (G11). For that, answers may depend
on the calls since the beginning or the last `load` alone: no clock, no chance but from the keys.

Letters: U keys, N places, M chosen rows, K tables of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from param_server import kernels
from param_server.index import KeyIndex, Keys
from roo.schema import Table

NEVER = np.iinfo(np.int64).min
"""Event time before all others: of a row that was never pushed, and of what expires never."""


class Residency(Protocol):
    """See the module. Made anew, a policy is as at the beginning."""

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


Policy: TypeAlias = Callable[[Sequence[Table]], Residency]
"""A stack's tables → its policy, at the beginning."""


class Expiry:
    """Every key gets a row at its first push; a row goes when its table's `expire_after_ms` have passed since its last one."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.expire_after_ms_K = np.array([t.expire_after_ms for t in tables], np.int64)

    def admit(self, keys: Keys) -> np.ndarray:
        return np.ones(len(keys), np.bool_)

    def evict(self, watermark_ms: int, index: KeyIndex, stamp_ms_N: np.ndarray) -> np.ndarray:
        if not self.expire_after_ms_K.any():
            return np.zeros(0, np.int64)
        before_ms_K = np.where(self.expire_after_ms_K > 0, watermark_ms - self.expire_after_ms_K, NEVER)
        return kernels.expired(index.flags_N, index.used, index.table_N, stamp_ms_N, self.table_K, before_ms_K)

    def state(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        """There is none."""
