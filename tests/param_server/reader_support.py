"""A follower of the in-memory `rows` topic, as serving's is of Kafka's."""

from __future__ import annotations

import threading

import numpy as np

from param_server.client import Client
from param_server.publish import Publisher
from param_server.replica.replica import Replica
from param_server.rows_topic import InMemoryRows
from param_server.server import Shard
from roostream.runtime.clock import FakeClock
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from tests.param_server.shard_support import ITEM, gradients_of, lookup_of, small_schema, transport_to

GO = threading.Event()  # never set: nothing is told to stop


class Follower:
    """A replica and where it is in each partition."""

    def __init__(self, topic: InMemoryRows) -> None:
        self.replica, self.topic = Replica(small_schema(), 0), topic
        self.at = [0] * len(topic.values)
        self.num_bootstraps = 0

    def bootstrap(self, *shards: Shard) -> None:
        self.at = [len(values) for values in self.topic.values]
        self.replica.bootstrap([transport_to(shard) for shard in shards])
        self.num_bootstraps += 1

    def read(self, partition: int, most: int = 1 << 30) -> bool:
        """Apply up to `most` records; False where the next one is gone, so that only a bootstrap helps."""
        if self.at[partition] < self.topic.first[partition]:
            return False
        for value in self.topic.values[partition][self.at[partition] : self.at[partition] + most]:
            self.replica.apply(wire.decode(value)[1])  # type: ignore[arg-type]
            self.at[partition] += 1
        return True

    def catch_up(self, *shards: Shard) -> None:
        """Read to the end, by a bootstrap if nothing else helps."""
        complete = all([self.read(p) for p in range(len(self.at))])
        if not complete or self.replica.needs_bootstrap:
            self.bootstrap(*shards)

    def rows(self, table: str, *ids: int) -> np.ndarray:
        stack = small_schema().table_by_name[table].stack
        return self.replica.gather(lookup_of({table: ids}))[stack]


class Loop:
    """A shard, its publisher, its topic and a reader."""

    def __init__(self, shard: Shard, topic: InMemoryRows | None = None) -> None:
        self.shard, self.topic, self.clock = shard, topic or InMemoryRows(), FakeClock()
        self.publisher = Publisher(shard, self.topic, self.clock)
        self.client = Client(small_schema(), [transport_to(shard)], worker=0)
        self.client.set_incarnation(shard.incarnation)

    def push(self, *ids: int, table: str = ITEM, value: float = 1.0, time_ms: int = 0, **times: int) -> None:
        lookup = lookup_of({table: ids})
        self.client.push(lookup, gradients_of(lookup, value), step=0, time_ms=time_ms, **times)

    def turn(self) -> None:
        self.publisher.turn(GO)

    def rows(self, *ids: int, table: str = ITEM) -> np.ndarray:
        return self.client.pull(lookup_of({table: ids}))[small_schema().table_by_name[table].stack]


def messages(topic: InMemoryRows, kind: int) -> list[tuple[int, int, object]]:
    """(partition, offset, message) of one kind."""
    found = []
    for partition, values in enumerate(topic.values):
        found += [
            (partition, at, wire.decode(v)[1]) for at, v in enumerate(values) if wire.kind_of(v) == kind
        ]
    return found


def deltas(topic: InMemoryRows) -> list[pb.RowDelta]:
    return [m for _, _, m in messages(topic, wire.ROW_DELTA)]  # type: ignore[misc]
