"""Reading rows from the shards while a request waits: one call a shard, all shards at once, with a time
limit.

A shard that did not answer is not asked again for RETRY_AFTER_S, so an outage costs one wait a second and not
one wait a request. The map from buckets to shards is fetched in the background (`refresh_bucket_map`), again
after a shard has refused a key that it does not own.

Letters: U requested keys, M keys of one shard, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from param_server import kernels
from param_server.embedding_table import Keys
from roostream.errors import FencedError, RoostreamError, UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Transport

log = logging.getLogger("roostream.rows")

RETRY_AFTER_S = 1.0


def fetch_bucket_map(shards: Sequence[Transport], num_buckets: int, *, timeout_s: float) -> BucketMap:
    """Ask all shards which of them owns which bucket; the answer of the newest incarnation counts.

    A single shard owns every bucket and is not asked.

    Raises:
        UnavailableError: no shard answered; try again.
        ConfigError: the map has another number of buckets or shards.
    """
    if len(shards) < 2:
        return BucketMap.modulo(num_buckets, max(len(shards), 1))
    answers: list[tuple[int, BucketMap]] = []
    for shard in shards:
        try:
            header, arrays = shard.call("owners", {}, timeout_s=timeout_s)
            owners = BucketMap(arrays[0], int(header["num_owners"]), int(header["version"]))
            answers.append((int(header["incarnation"]), owners))
        except RoostreamError as error:
            log.debug("a shard did not give its bucket map: %s", error)
    if not answers:
        raise UnavailableError(f"expected a bucket map from one of {len(shards)} shards, got none; try again")
    newest = max(answers, key=lambda answer: answer[0])[1]
    newest.check(num_buckets, len(shards))
    return newest


class FetchedRows(NamedTuple):
    """The rows of one stack that one shard returned."""

    at_M: np.ndarray  # int64: positions among the requested keys
    rows_MD: np.ndarray  # float32
    exists_M: np.ndarray  # uint8: 1 = the shard has the row
    incarnation: int
    sequence_M: np.ndarray  # uint64: the row is at least as new as this delta of its bucket


class ShardReads:
    """`read` may be called by several threads. Reading creates no rows."""

    def __init__(self, shards: Sequence[Transport], num_buckets: int, timeout_s: float, clock: Clock) -> None:
        self.shards, self.num_buckets, self.timeout_s, self.clock = shards, num_buckets, timeout_s, clock
        self.num_failed = 0
        self.owners = BucketMap.modulo(num_buckets, max(len(shards), 1))
        self._refresh_at_s: float | None = 0.0  # None: the bucket map is known
        self._retry_at_s = [0.0] * len(shards)
        self._pool = ThreadPoolExecutor(2 * len(shards), "row-reads") if len(shards) > 1 else None

    def read(self, wanted: Mapping[str, Keys]) -> dict[str, list[FetchedRows]]:
        """Stack → the rows that arrived in time, one part a shard. Keys of a shard that is away are in no
        part."""
        out: dict[str, list[FetchedRows]] = {stack: [] for stack in wanted}
        busy = [(shard, part) for shard, part in enumerate(self._split_by_shard(wanted)) if part]
        if self._pool is None or len(busy) < 2:
            answers = [self._read_from(shard, part) for shard, part in busy]
        else:
            answers = list(self._pool.map(lambda job: self._read_from(*job), busy))
        for answer in answers:
            for stack, fetched in answer.items():
                out[stack].append(fetched)
        return out

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for shard in self.shards:
            shard.close()

    def refresh_bucket_map(self) -> None:
        """Fetch the bucket map if it is not known. Requests use the previous map meanwhile."""
        now_s = self.clock.monotonic_s()
        if self._refresh_at_s is None or now_s < self._refresh_at_s:
            return
        try:
            self.owners = fetch_bucket_map(self.shards, self.num_buckets, timeout_s=self.timeout_s)
            self._refresh_at_s = None
        except RoostreamError as error:
            self._refresh_at_s = now_s + RETRY_AFTER_S
            log.debug("rows are read by the previous bucket map: %s", error)

    def _split_by_shard(self, wanted: Mapping[str, Keys]) -> list[dict[str, tuple[np.ndarray, Keys]]]:
        """For each shard: stack → positions of its keys, and the keys."""
        parts: list[dict[str, tuple[np.ndarray, Keys]]] = [{} for _ in self.shards]
        owners = self.owners
        for stack, keys in wanted.items():
            owner_U = owners.owner_B[kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)]
            for shard, part in enumerate(parts):
                if len(at_M := np.flatnonzero(owner_U == shard)):
                    part[stack] = (at_M, keys.take(at_M))
        return parts

    def _read_from(self, shard: int, part: Mapping[str, tuple[np.ndarray, Keys]]) -> dict[str, FetchedRows]:
        """Stack → rows. Empty if the shard does not answer in time, or did not shortly before."""
        if self.clock.monotonic_s() < self._retry_at_s[shard]:
            return {}
        arrays = [array for _, keys in part.values() for array in (keys.table_U, keys.id_U)]
        try:
            header, answer = self.shards[shard].call(
                "read", {"stacks": list(part)}, arrays, timeout_s=self.timeout_s
            )
        except RoostreamError as error:
            self.num_failed += 1
            if isinstance(error, FencedError):
                self._refresh_at_s = 0.0  # the shard is healthy, but the bucket map is outdated
            else:
                self._retry_at_s[shard] = self.clock.monotonic_s() + RETRY_AFTER_S
            log.debug("shard %d returned no rows: %s", shard, error)
            return {}
        incarnation = int(header["incarnation"])
        return {
            stack: FetchedRows(at_M, answer[3 * n], answer[3 * n + 1], incarnation, answer[3 * n + 2])
            for n, (stack, (at_M, _)) in enumerate(part.items())
        }
