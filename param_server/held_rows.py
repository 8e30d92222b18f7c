"""The rows of one stack by key: what a shard trains and a replica reads. What a rule keeps beside a row is its owner's.

Letters: U keys asked for, N places, D width, K tables of the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from param_server import kernels
from param_server.index import KeyIndex, Keys, grown
from roostream.schema.schema import Table


class HeldRows:
    """An index and the array beside it; growing replaces both, so ask for them anew each time. Not thread-safe."""

    def __init__(self, tables: Sequence[Table], *, seed: int, num_buckets: int) -> None:
        self.width, self.num_buckets = tables[0].dim, num_buckets
        self.seed = np.uint64(seed & (1 << 64) - 1)
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.scale_K = np.array([t.init_scale for t in tables], np.float32)
        self.clear()

    def clear(self) -> None:
        """No rows."""
        self.index = KeyIndex(self.num_buckets)
        self.rows_ND = np.zeros((self.index.capacity, self.width), np.float32)

    def reserve(self, num_more: int) -> None:
        """Take memory for that many more rows. **If it fails** (MemoryError): the rows are as they were."""
        self.index.reserve(num_more)
        if len(self.rows_ND) < self.index.capacity:
            self.rows_ND = grown(self.rows_ND, self.index.capacity)

    def put(self, keys: Keys, rows_UD: np.ndarray) -> np.ndarray:
        """Hold float32 [U, D] under the keys, made where they are new; their places, int64 [U]. Room must have been taken."""
        place_U, _ = self.index.add(keys)
        kernels.put_rows(self.rows_ND, place_U, rows_UD)
        return place_U

    def gather(self, keys: Keys) -> np.ndarray:
        """float32 [U, D]; a key without a row gives its initial value, and still has none."""
        return self.gather_at(keys, self.index.find(keys))

    def gather_at(self, keys: Keys, place_U: np.ndarray) -> np.ndarray:
        """float32 [U, D]: the rows at these places (int64), initial values for -1."""
        out_UD = np.empty((len(keys), self.width), np.float32)
        kernels.gather(
            self.rows_ND, place_U, keys.table_U, keys.id_U, self.seed, self.table_K, self.scale_K, out_UD
        )
        return out_UD

    def places(self, buckets: Sequence[int]) -> list[np.ndarray]:
        """int64 [M] of each bucket: places of its rows. One pass over all places."""
        place_M = self.index.in_buckets(buckets)
        bucket_M = self.index.bucket_N[place_M]
        order_M = np.argsort(bucket_M, kind="stable")
        edges = np.searchsorted(bucket_M[order_M], [[b, b + 1] for b in buckets])
        return [place_M[order_M[start:end]] for start, end in edges]
