"""What a shard exports, read from it when it is scraped."""

from __future__ import annotations

from typing import Any

from param_server.publish import Publisher
from param_server.server import Shard
from runtime.exports import Exports

_HELPS = {
    "rows": "rows in memory",
    "incarnation": "incarnation in which calls are answered",
    "committed_seq": "number of the last commit",
    "segments": "segments of the last commit",
    "bytes": "memory of the rows",
    "dirty": "rows changed since the last freeze",
    "spared": "rows due to expire and kept, since they were more than max_expired_share",
    "withheld": "rows not published: not finite, or larger than max_publish_norm",
    "limited": "rows of gradients that were scaled down to what a rule's state can hold",
    "largest_accumulator": "largest accumulator of squares that was written or read back since the start",
    "damaged": "parts of the committed segments that are damaged now; the next commit writes their rows again",
    "damages": "parts of segments that were found damaged since the start",
    "pulls": "pulls answered",
    "pushes": "pushes applied",
    "repeats": "pushes that had been applied before",
    "waiting": "pushes that wait for the other workers' of their step",
    "ready": "1 = restored",
    "publish_lag_ms": "since readers last had everything",
    "published_keys": "keys sent in deltas",
    "republished_keys": "keys seen behind barriers",
}


def shard_exports(shard: Shard, publisher: Publisher | None) -> Exports:
    """`roostream_shard_<what>`; rows by stack."""

    def read() -> dict[str, Any]:
        stats = shard.stats()
        shown = {name: stats[name] for name in _HELPS if name in stats}
        if publisher:
            shown |= {
                "publish_lag_ms": publisher.lag_ms,
                "published_keys": publisher.num_keys,
                "republished_keys": publisher.num_republished,
            }
        return shown

    return Exports("shard", read, {"rows": "stack", "largest_accumulator": "stack"}, helps=_HELPS)
