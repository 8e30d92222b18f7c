"""Some buckets whole, in this process; rows of the others by a cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from param_server import kernels
from param_server.replica.replica import Replica
from param_server.replica.row_cache import RowCache
from roostream.runtime.rpc.transport import Transport
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup, StackLookup


class SomeBuckets:
    """See `serving.rows.row_follower.RowReplica`; each bucket is one's of the two."""

    def __init__(self, replica: Replica, cache: RowCache) -> None:
        self.replica, self.cache = replica, cache
        self._own_B = np.zeros(replica.num_buckets, np.bool_)
        self._own_B[list(replica.buckets)] = True

    @property
    def needs_bootstrap(self) -> bool:
        return self.replica.needs_bootstrap or self.cache.needs_bootstrap

    @property
    def stale(self) -> Collection[object]:
        return self.replica.stale

    @property
    def num_rows(self) -> int:
        return self.replica.num_rows + self.cache.num_rows

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Raises as `Replica.apply`."""
        return (self.replica if message.bucket in self.replica.buckets else self.cache).apply(message)

    def bootstrap(self, transports: Sequence[Transport]) -> None:
        """The replica's buckets; the cache begins anew. Raises as `Replica.bootstrap`."""
        self.cache.bootstrap(transports)
        self.replica.bootstrap(transports)

    def doubt(self, bucket: int) -> None:
        self.replica.doubt(bucket)
        if bucket not in self.replica.buckets:
            self.cache.doubt(bucket)

    def mend(self, transports: Sequence[Transport]) -> None:
        self.replica.mend(transports)

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]."""
        own = {
            n: self._own_B[kernels.buckets(s.table_U, s.id_U, len(self._own_B))]
            for n, s in lookup.stacks.items()
        }
        held, cached = (
            self.replica.gather(_part(lookup, own)),
            self.cache.gather(_part(lookup, {n: ~m for n, m in own.items()})),
        )
        out = {}
        for name, own_U in own.items():
            out[name] = np.empty((len(own_U), held[name].shape[1]), np.float32)
            out[name][own_U], out[name][~own_U] = held[name], cached[name]
        return out


def _part(lookup: Lookup, chosen: dict[str, np.ndarray]) -> Lookup:
    return Lookup(
        {n: StackLookup(s.table_U[chosen[n]], s.id_U[chosen[n]], {}) for n, s in lookup.stacks.items()}
    )
