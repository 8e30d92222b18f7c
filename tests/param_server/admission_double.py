"""A residency policy that keeps something: a key gets a row at its second push, and rows expire as usual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from param_server.embedding_table import Keys
from param_server.eviction import ExpiryPolicy
from roostream.schema.schema import Table


class SecondPush(ExpiryPolicy):
    """A `EvictionPolicy`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__(tables)
        self.seen: Counter[tuple[int, int]] = Counter()

    def admit(self, keys: Keys) -> np.ndarray:
        pairs = list(zip(keys.table_U.tolist(), keys.id_U.tolist(), strict=True))
        self.seen.update(pairs)
        return np.array([self.seen[pair] >= 2 for pair in pairs], np.bool_)

    def state(self) -> bytes:
        return (
            msgspec.json.encode(sorted((*pair, count) for pair, count in self.seen.items()))
            if self.seen
            else b""
        )

    def load(self, state: bytes) -> None:
        counts = msgspec.json.decode(state, type=list[tuple[int, int, int]]) if state else []
        self.seen = Counter({(table, id_): count for table, id_, count in counts})
