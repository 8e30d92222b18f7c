"""Where a replica keeps the rows of one stack: what is asked of it, and the one in this process' own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from param_server.held_rows import HeldRows
from param_server.index import Keys
from roostream.schema.schema import Table


class RowStore(Protocol):
    """One writer. `UnavailableError` of a change: no room; part of it may have been made, and it can be made again."""

    @property
    def width(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def put(self, keys: Keys, rows_UD: np.ndarray) -> None:
        """Hold float32 [U, D] under the keys."""

    def remove(self, keys: Keys) -> None:
        """These have no row, if they had one."""

    def replace(self, bucket: int, keys: Keys, rows_UD: np.ndarray) -> None:
        """These are all rows of the bucket."""

    def gather(self, keys: Keys) -> np.ndarray:
        """float32 [U, D]; initial values for keys without a row."""


class PrivateRows:
    """In memory of this process; its owner's lock keeps readers out while it changes."""

    def __init__(self, tables: Sequence[Table], *, seed: int, num_buckets: int) -> None:
        self.held = HeldRows(tables, seed=seed, num_buckets=num_buckets)

    @property
    def width(self) -> int:
        return self.held.width

    @property
    def num_rows(self) -> int:
        return self.held.index.num_live

    def put(self, keys: Keys, rows_UD: np.ndarray) -> None:
        self.held.reserve(len(keys))
        self.held.put(keys, rows_UD)

    def remove(self, keys: Keys) -> None:
        self.held.index.remove(keys)

    def replace(self, bucket: int, keys: Keys, rows_UD: np.ndarray) -> None:
        self.remove(self.held.index.keys_at(self.held.index.in_bucket(bucket)))
        self.put(keys, rows_UD)

    def gather(self, keys: Keys) -> np.ndarray:
        return self.held.gather(keys)
