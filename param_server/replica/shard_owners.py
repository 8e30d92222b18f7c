"""Which shard a reader asks for which rows: as the shards say, which have it from the manifest that they were restored to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from roostream.errors import RoostreamError, UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.rpc.transport import Transport

log = logging.getLogger("roostream.rows")


def asked_owners(shards: Sequence[Transport], num_buckets: int, *, timeout_s: float) -> BucketMap:
    """The map of the newest incarnation that any shard is in. One shard has everything, and isn't asked.

    Raises:
        UnavailableError: no shard says it now; try again.
        ConfigError: it is of other buckets or shards.
    """
    if len(shards) < 2:
        return BucketMap.modulo(num_buckets, max(len(shards), 1))
    told: list[tuple[int, BucketMap]] = []
    for shard in shards:
        try:
            header, arrays = shard.call("owners", {}, timeout_s=timeout_s)
            owners = BucketMap(arrays[0], int(header["num_owners"]), int(header["version"]))
            told.append((int(header["incarnation"]), owners))
        except RoostreamError as error:
            log.debug("a shard doesn't say who has which bucket: %s", error)
    if not told:
        raise UnavailableError(f"none of {len(shards)} shards says which has which bucket; try again")
    newest = max(told, key=lambda its: its[0])[1]
    newest.check(num_buckets, len(shards))
    return newest
