"""Rows asked of the shards while a request waits: one call a shard, all at once, none for longer than they may take.

A shard that didn't answer is not asked again for a while, so that it costs the wait once, and not with every request. Who has
which bucket is asked once beside (`learn`), and again where a shard says that it hasn't what it was asked for.

Letters: U keys asked for, D width, S shards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from param_server import kernels
from param_server.index import Keys
from param_server.replica.shard_owners import asked_owners
from roostream.errors import FencedError, RoostreamError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Transport

log = logging.getLogger("roostream.rows")

AGAIN_S = 1.0


class Fetched(NamedTuple):
    """What shards gave of one stack's keys."""

    at_M: np.ndarray  # int64: which of the keys asked for
    rows_MD: np.ndarray  # float32
    there_M: np.ndarray  # uint8: 1 = there is such a row
    incarnation: int
    sequence_M: np.ndarray  # uint64: the row is as new as this delta of its bucket, or newer


class ShardReads:
    """`read` from several threads. Nothing is created by reading."""

    def __init__(self, shards: Sequence[Transport], num_buckets: int, timeout_s: float, clock: Clock) -> None:
        self.shards, self.num_buckets, self.timeout_s, self.clock = shards, num_buckets, timeout_s, clock
        self.num_failed = 0
        self.owners = BucketMap.modulo(num_buckets, max(len(shards), 1))
        self._learns_at_s: float | None = 0.0  # None: the map is known
        self._ask_at_s = [0.0] * len(shards)
        self._pool = ThreadPoolExecutor(2 * len(shards), "row-reads") if len(shards) > 1 else None

    def read(self, wanted: Mapping[str, Keys]) -> dict[str, list[Fetched]]:
        """Stack → what came in time, a part a shard; keys of a shard that is away are in none."""
        out: dict[str, list[Fetched]] = {stack: [] for stack in wanted}
        parts = self._shares(wanted)
        busy = [(shard, part) for shard, part in enumerate(parts) if part]
        if self._pool is None or len(busy) < 2:
            answers = [self._ask(shard, part) for shard, part in busy]
        else:
            answers = list(self._pool.map(lambda its: self._ask(*its), busy))
        for answer in answers:
            for stack, fetched in answer.items():
                out[stack].append(fetched)
        return out

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for shard in self.shards:
            shard.close()

    def learn(self) -> None:
        """Ask who has which bucket, where that isn't known: beside requests, which go by what was believed before."""
        now_s = self.clock.monotonic_s()
        if self._learns_at_s is None or now_s < self._learns_at_s:
            return
        try:
            self.owners, self._learns_at_s = (
                asked_owners(self.shards, self.num_buckets, timeout_s=self.timeout_s),
                None,
            )
        except RoostreamError as error:
            self._learns_at_s = now_s + AGAIN_S
            log.debug("rows are asked for by the map that was known: %s", error)

    def _shares(self, wanted: Mapping[str, Keys]) -> list[dict[str, tuple[np.ndarray, Keys]]]:
        """Of each shard: stack → which of the keys, and the keys there."""
        shares: list[dict[str, tuple[np.ndarray, Keys]]] = [{} for _ in self.shards]
        owners = self.owners
        for stack, keys in wanted.items():
            owner_U = owners.owner_B[kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)]
            for shard, share in enumerate(shares):
                if len(at_M := np.flatnonzero(owner_U == shard)):
                    share[stack] = (at_M, keys.take(at_M))
        return shares

    def _ask(self, shard: int, part: Mapping[str, tuple[np.ndarray, Keys]]) -> dict[str, Fetched]:
        if self.clock.monotonic_s() < self._ask_at_s[shard]:
            return {}
        arrays = [array for _, keys in part.values() for array in (keys.table_U, keys.id_U)]
        try:
            header, got = self.shards[shard].call(
                "read", {"stacks": list(part)}, arrays, timeout_s=self.timeout_s
            )
        except RoostreamError as error:
            self.num_failed += 1
            if isinstance(error, FencedError):
                self._learns_at_s = 0.0  # it was told by a map that is over; the shard is in order
            else:
                self._ask_at_s[shard] = self.clock.monotonic_s() + AGAIN_S
            log.debug("shard %d gave no rows: %s", shard, error)
            return {}
        incarnation = int(header["incarnation"])
        return {
            stack: Fetched(at_M, got[3 * n], got[3 * n + 1], incarnation, got[3 * n + 2])
            for n, (stack, (at_M, _)) in enumerate(part.items())
        }
