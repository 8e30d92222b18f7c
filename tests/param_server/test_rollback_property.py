"""Random pushes, commits, failures, kills and restores. The shard always equals an undisturbed one (G11), and
a replica that follows its deltas ends with the same rows and never goes back (G4). Guarantees:
docs/architecture.md."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from param_server.client import Client
from param_server.eviction import EvictionPolicyFactory, ExpiryPolicy
from param_server.key_value_store import MemoryKeyValueStore
from param_server.publish import Publisher
from param_server.server import Shard
from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ITEM,
    NEVER_STOP,
    TOPIC,
    USER,
    AdmitAtSecondPush,
    Follower,
    gradients_of,
    link_manifest,
    lookup_of,
    make_shard,
    small_schema,
    state_of,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
PARTITION = st.integers(0, 3)
SCHEMA = small_schema(expire_after_ms=3000)


class Undisturbed:
    """A shard that gets the same pushes and expiries without any fault."""

    def __init__(self, eviction: EvictionPolicyFactory) -> None:
        self.shard = make_shard(schema=SCHEMA, publishing=False, eviction=eviction)
        self.shard.restore(1, "")
        self.client = client_of(self.shard)
        self.seq = 0

    def apply(self, event: tuple) -> None:
        if event[0] == "push":
            _, ids, value, time_ms = event
            lookup = lookup_of({ITEM: ids, USER: ids[:1], TOPIC: ids[1:]})
            self.client.push(lookup, gradients_of(lookup, value), step=0, time_ms=time_ms)
        else:
            self.seq += 1
            self.shard.freeze(self.seq, event[1])
            self.shard.abort(self.seq)


def client_of(shard: Shard) -> Client:
    client = Client(SCHEMA, [transport_to(shard)], worker=0)
    client.set_incarnation(shard.incarnation)
    return client


pytestmark = pytest.mark.timeout(400)  # long examples that run next to other tests


class ShardMachine(RuleBasedStateMachine):
    eviction: EvictionPolicyFactory = ExpiryPolicy

    def __init__(self) -> None:
        super().__init__()
        self.blobs, self.store, self.topic = MemoryKeyValueStore(), MemoryStore(), InMemoryRows()
        self.incarnation, self.seq, self.manifests = 0, 0, [""]
        self.events: list[tuple] = []
        self.committed: list[list[tuple]] = [[]]  # events up to each manifest
        self.frozen: list[tuple] | None = None
        self.is_written = self.linked = False
        self.now_ms = 0
        self.start_process()
        self.restore(-1)
        self.follower = Follower(self.topic)
        self.follower.bootstrap(self.shard)
        self.versions: dict[tuple[str, int], tuple[int, int]] = {}

    def start_process(self) -> None:
        self.shard = make_shard(self.blobs, self.store, schema=SCHEMA, eviction=self.eviction)
        self.publisher = Publisher(self.shard, self.topic, FakeClock())

    def restore(self, which: int) -> None:
        """Restore the newest manifest (-1) or an earlier one (-2, ...); later manifests are discarded."""
        which = max(which, -len(self.manifests))
        del (
            self.manifests[len(self.manifests) + which + 1 :],
            self.committed[len(self.committed) + which + 1 :],
        )
        self.incarnation += 1
        self.shard.restore(self.incarnation, self.manifests[-1])
        self.events = list(self.committed[-1])
        self.frozen = None
        self.is_written = self.linked = False
        self.client = client_of(self.shard)
        self.expected = Undisturbed(self.eviction)
        for event in self.events:
            self.expected.apply(event)

    def record(self, event: tuple) -> None:
        self.events.append(event)
        self.expected.apply(event)

    @rule(ids=IDS, value=st.floats(-3, 3, width=32), ms=st.integers(0, 1500))
    def push(self, ids: list[int], value: float, ms: int) -> None:
        self.now_ms += ms
        lookup = lookup_of({ITEM: ids, USER: ids[:1], TOPIC: ids[1:]})
        self.client.push(lookup, gradients_of(lookup, value), step=0, time_ms=self.now_ms)
        self.record(("push", ids, value, self.now_ms))

    @rule(ids=IDS)
    def push_with_a_lost_answer(self, ids: list[int]) -> None:
        self.client.transports[0].fail_next("push", "after")  # type: ignore[attr-defined]
        self.push(ids, 1.0, 0)

    @precondition(lambda self: self.frozen is None)
    @rule()
    def freeze(self) -> None:
        self.shard.freeze(self.seq + 1, self.now_ms)
        self.record(("expire", self.now_ms))
        self.frozen = list(self.events)

    @precondition(lambda self: self.frozen is not None and not self.linked)
    @rule(fail_at=st.integers(0, 4))
    def write(self, fail_at: int) -> None:
        self.blobs.fail_at(fail_at)
        try:
            self.result = self.shard.write(self.seq + 1)
            self.is_written = True
        except UnavailableError:
            assert fail_at
            self.is_written = False  # the shard deleted what an earlier write of the same commit had stored
        self.blobs.fail_at(0)

    @precondition(lambda self: self.is_written and not self.linked)
    @rule()
    def link(self) -> None:
        assert self.frozen is not None
        self.manifests.append(link_manifest(self.store, self.seq + 1, self.incarnation, [self.result]))
        self.committed.append(self.frozen)
        self.linked = True

    @precondition(lambda self: self.linked)
    @rule()
    def commit(self) -> None:
        self.seq += 1
        self.shard.commit(self.seq)
        self.frozen, self.is_written, self.linked = None, False, False

    @precondition(lambda self: self.frozen is not None and not self.linked)
    @rule()
    def abort(self) -> None:
        self.seq += 1  # the number of an aborted commit is never used again
        self.shard.abort(self.seq)
        self.frozen, self.is_written = None, False

    @precondition(lambda self: self.frozen is None)
    @rule()
    def whole_commit(self) -> None:
        self.freeze()
        self.write(0)
        self.link()
        self.commit()

    @rule(kill=st.booleans(), which=st.sampled_from([-1, -1, -1, -2]))
    def roll_back(self, kill: bool, which: int) -> None:
        self.seq += 2  # numbers of discarded manifests are not reused
        if kill:
            self.start_process()
        self.restore(which)

    # Readers

    @rule()
    def publish(self) -> None:
        # Kafka is down or a fault was injected: the next turn retries
        with contextlib.suppress(UnavailableError):
            self.publisher.turn(NEVER_STOP)

    @rule(num_messages=st.integers(0, 6))
    def publish_with_a_fault_midway(self, num_messages: int) -> None:
        self.topic.fail_after(num_messages)
        self.publish()

    @rule(down=st.booleans())
    def set_kafka_outage(self, down: bool) -> None:
        self.topic.down = down

    @rule(partition=PARTITION, max_records=st.integers(1, 5))
    def read_records(self, partition: int, max_records: int) -> None:
        if not self.follower.read(partition, max_records) or self.follower.replica.needs_bootstrap:
            self.follower.bootstrap(self.shard)

    @rule()
    def bootstrap(self) -> None:
        self.follower.bootstrap(self.shard)

    @rule()
    def start_new_replica(self) -> None:
        self.follower = Follower(self.topic)
        self.follower.bootstrap(self.shard)
        self.versions = {}

    @rule(partition=PARTITION)
    def delete_old_records(self, partition: int) -> None:
        self.topic.trim(partition, len(self.topic.values[partition]))

    @invariant()
    def equals_the_undisturbed_shard(self) -> None:
        assert state_of(self.shard) == state_of(self.expected.shard)
        for table, expected in zip(
            self.shard.tables.values(), self.expected.shard.tables.values(), strict=True
        ):
            assert table.eviction.state() == expected.eviction.state()

    @invariant()
    def versions_of_a_replica_never_go_back(self) -> None:
        for stack in SCHEMA.stacks:
            for bucket in range(64):
                version = self.follower.replica.version(stack, bucket)
                assert version >= self.versions.get((stack, bucket), (0, 0))
                self.versions[stack, bucket] = version

    @rule()
    def replica_equals_the_shard_after_recovery(self) -> None:
        self.topic.down = False
        for _ in range(2):
            self.publish()
        self.follower.catch_up(self.shard)
        everything = lookup_of({t: list(range(10)) for t in (ITEM, USER, TOPIC)})
        read, rows = self.follower.replica.gather(everything), self.client.pull(everything)
        assert all(np.array_equal(read[stack], rows[stack]) for stack in rows)


class ShardMachineWithPolicy(ShardMachine):
    """The machine with a policy that has its own state."""

    eviction = AdmitAtSecondPush


TestShardMachine = ShardMachine.TestCase
TestShardMachine.settings = settings(max_examples=15, stateful_step_count=40)
TestShardMachineWithPolicy = ShardMachineWithPolicy.TestCase
TestShardMachineWithPolicy.settings = settings(max_examples=5, stateful_step_count=40)
