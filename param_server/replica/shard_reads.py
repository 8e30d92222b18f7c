"""Rows asked of the shards while a request waits: one call a shard, all at once, none for longer than they may take.

A shard that didn't answer is not asked again for a while, so that it costs the wait once, and not with every request.

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
from roo.errors import RoostreamError
from runtime.clock import Clock
from runtime.transport import Transport

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
        self._ask_at_s = [0.0] * len(shards)
        self._pool = ThreadPoolExecutor(2 * len(shards), "row-reads") if len(shards) > 1 else None

    def read(self, wanted: Mapping[str, Keys]) -> dict[str, list[Fetched]]:
        """Stack → what came in time, a part a shard; keys of a shard that is away are in none."""
        out: dict[str, list[Fetched]] = {stack: [] for stack in wanted}
        parts = [self._share(wanted, shard) for shard in range(len(self.shards))]
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

    def _share(self, wanted: Mapping[str, Keys], shard: int) -> dict[str, tuple[np.ndarray, Keys]]:
        found = {}
        for stack, keys in wanted.items():
            at_M = np.flatnonzero(kernels.buckets(keys.table_U, keys.id_U, self.num_buckets) % len(self.shards) == shard)
            if len(at_M):
                found[stack] = (at_M, keys.take(at_M))
        return found

    def _ask(self, shard: int, part: Mapping[str, tuple[np.ndarray, Keys]]) -> dict[str, Fetched]:
        if self.clock.monotonic_s() < self._ask_at_s[shard]:
            return {}
        arrays = [array for _, keys in part.values() for array in (keys.table_U, keys.id_U)]
        try:
            header, got = self.shards[shard].call("read", {"stacks": list(part)}, arrays, timeout_s=self.timeout_s)
        except RoostreamError as error:
            self.num_failed += 1
            self._ask_at_s[shard] = self.clock.monotonic_s() + AGAIN_S
            log.debug("shard %d gave no rows: %s", shard, error)
            return {}
        incarnation = int(header["incarnation"])
        return {
            stack: Fetched(at_M, got[3 * n], got[3 * n + 1], incarnation, got[3 * n + 2])
            for n, (stack, (at_M, _)) in enumerate(part.items())
        }
