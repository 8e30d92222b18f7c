"""Where workers that hold rows themselves keep what is committed: each in a shard of its own process
(`roostream train`), or all in the shards of a running stack.

Letters: M keys, D width, A state width, F = D + A numbers of a row with its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from param_server.client import Client
from param_server.embedding_table import Keys
from param_server.row_block import RowBlock
from param_server.server import Shard
from roostream.runtime.bucket_map import BucketMap

PIECE_ROWS = 1 << 18  # that a shard of this process gives at once


class KeptRows(NamedTuple):
    """Rows of a stack with their states."""

    keys: Keys
    records_MF: np.ndarray  # float32


class RowHome(Protocol):
    """Keeps the rows that one worker answers for at commits. Only that worker's loop calls it. A call raises
    FencedError if the shards have another incarnation."""

    seed: int  # of rows that nobody has trained

    def set_incarnation(
        self, incarnation: int, worker: int, workers: int, owners: BucketMap | None
    ) -> BucketMap:
        """The rows were restored. `owners`: of the manifest; None = the first ones. Returns which worker
        answers for each bucket. Raises ConfigError: `owners` does not fit."""

    def load(self, stack: str) -> Iterator[KeptRows]:
        """All rows that this worker answers for, in pieces, none of them empty. Raises UnavailableError: they
        cannot be read now."""

    def store(self, stack: str, block: RowBlock) -> None:
        """Set rows that this worker answers for; the next commit contains them. Raises UnavailableError: some
        may be set; all members must be restored."""

    def contains(self, stack: str, keys: Keys) -> np.ndarray:
        """bool [M]: the keys that have a row. Raises UnavailableError."""


class OwnShard:
    """A `RowHome` in a shard of this process, which another thread restores; worker N answers for the buckets
    of shard N."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.seed = shard, shard.identity.seed
        self._incarnation = 0

    def set_incarnation(
        self, incarnation: int, worker: int, workers: int, owners: BucketMap | None
    ) -> BucketMap:
        owners = owners or self.shard.identity.first_owners
        owners.check(self.shard.identity.num_buckets, workers)
        self._incarnation = incarnation
        return owners

    def load(self, stack: str) -> Iterator[KeptRows]:
        table = self.shard.tables[stack]
        buckets = range(self.shard.identity.num_buckets)
        start, end = 0, 1
        while start < end:
            keys, rows_MD, state_MA, end = self.shard.records(
                self._incarnation, table, buckets, start, PIECE_ROWS
            )
            start += PIECE_ROWS
            if len(keys):
                yield KeptRows(keys, np.concatenate([rows_MD, state_MA], axis=1))

    def store(self, stack: str, block: RowBlock) -> None:
        self.shard.overwrite(stack, block, incarnation=self._incarnation)

    def contains(self, stack: str, keys: Keys) -> np.ndarray:
        return self.shard.contains(self._incarnation, self.shard.tables[stack], keys)


class StackShards:
    """A `RowHome` in the shards behind `client`. Worker n of W answers for the buckets b with b mod W = n,
    whichever shard has them; the number of shards is any."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.seed = client, seed
        self._buckets: list[int] = []

    def set_incarnation(
        self, incarnation: int, worker: int, workers: int, owners: BucketMap | None
    ) -> BucketMap:
        self.client.set_incarnation(incarnation, workers, owners)
        answering = BucketMap.modulo(self.client.num_buckets, workers)
        self._buckets = answering.buckets_of(worker)
        return answering

    def load(self, stack: str) -> Iterator[KeptRows]:
        return (KeptRows(*piece) for piece in self.client.records(stack, self._buckets))

    def store(self, stack: str, block: RowBlock) -> None:
        self.client.overwrite(stack, block)

    def contains(self, stack: str, keys: Keys) -> np.ndarray:
        return self.client.contains(stack, keys)
