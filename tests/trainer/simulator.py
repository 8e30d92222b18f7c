"""A deterministic simulation of the commit protocol: controller, workers and shards over in-memory
transports, with a fake clock, kills at named moments, and lost, delayed and repeated messages.

A worker trains between two commands, because `write` runs beside training. With a `seed`, these are random:
the number of commands per round, the training steps between them, the order of workers, and the fate of each
message. The same seed gives the same run.

network.py holds the network and its faults. Workers are actors (actors.py): one can wait for the others in a
gradient sum, or in a push that a shard holds back, while the other processes run.

A moment is `(who, what, when)`: a member executes a command, the controller performs an effect, or a worker
is between two pushes of a batch. A `Kill` names a moment, which of its occurrences, and the process that dies
then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from param_server.client import Client
from param_server.key_value_store import MemoryKeyValueStore
from roostream.errors import FencedError, RoostreamError
from roostream.runtime import manifest as manifests
from roostream.runtime.clock import FakeClock
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.runtime.manifest import Manifest
from roostream.runtime.store_identity import IdentifiedStore
from roostream.runtime.work_unit import TableInput, WorkUnit
from roostream.schema.schema import Schema
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.runtime.fake_consumer import LogConsumer
from tests.trainer import samples
from tests.trainer.actors import Actor, InMemoryRendezvous, Killed, ReductionHub
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.loops import PARTITIONS, MemoryOutputs
from tests.trainer.memory_store import MemoryStore
from tests.trainer.network import (
    CONTROLLER,
    FaultSchedule,
    FlakyMemoryStore,
    HeartbeatTransport,
    MessageFaults,
    Network,
    ProgramClock,
    ShardTransport,
    StoreLink,
)
from tests.trainer.real_shard import RealShard
from trainer.batch_source import BatchSource
from trainer.config import LoopConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.phases import historical_range
from trainer.control.types import Claim, CoordinatorConfig, Effect, Link, State, worker_keys
from trainer.deployment_identity import DeploymentIdentity
from trainer.loop import LoopDependencies, TrainLoop
from trainer.process_group import Rendezvous
from trainer.record_source import RecordSource
from trainer.rows import ShardRows
from trainer.worker import Worker

WORKER = "worker 0"
NO_FAULTS = FaultSchedule()
MAX_ROUNDS, ROUND_S = 400, 0.25


@dataclasses.dataclass(frozen=True)
class Kill:
    moment: tuple[str, str, str]
    victim: str
    occurrence: int = 1
    loses_disk: bool = False  # the victim, a shard, restarts with an empty disk


class Twin(NamedTuple):
    """A second process of the same member, for some rounds. It executes commands if the controller accepts
    it. RPCs of other programs still reach the first process."""

    who: str
    first: int
    rounds: int


class FixedWaitClock(FakeClock):
    """A clock whose every wait takes 0.1 s, because the product draws the waits of retries without a seed."""

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        return super().sleep(0.1, stop)


class TrickleReader(KafkaConsumer):
    """Returns at most three records per poll, so that a cut finds records that are fetched or polled, but not
    yet trained."""

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        return super().poll(min(max_records, 3), 0.0, partition)


class WatchedController(Controller):
    """A controller that reports each effect as a moment."""

    moment: Callable[[str, str, str], None]

    def perform(self, effect: Effect) -> None:
        what = {Claim: "claim", Link: "link"}.get(type(effect), "retire")
        self.moment(CONTROLLER, what, "before")
        super().perform(effect)
        self.moment(CONTROLLER, what, "after")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The initial state of a simulation: its schema, its Kafka cluster, and the contents of the store and of
    the shards' disks."""

    schema: Schema = dataclasses.field(default_factory=samples.schema)
    kafka: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(samples.KAFKA))
    objects: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    disks: Sequence[Any] = ()

    def registry(self, fingerprint: int) -> Schema | None:
        """Find a schema. Samples always have `samples.schema()`, whatever the schema of the programs is."""
        return {s.fingerprint: s for s in (samples.schema(), self.schema)}.get(fingerprint)

    def identity(self, coordinator_config: CoordinatorConfig) -> DeploymentIdentity:
        settings = {"schema": self.schema, "registry": self.registry, "kafka": self.kafka}
        return samples.identity(**settings, num_shards=coordinator_config.num_shards)


@dataclasses.dataclass
class MemberSlot:
    """The current process of one member of the fleet."""

    process: Any = None  # None = dead
    session: int = 0
    agent: ControllerAgent | None = None
    actor: Actor = dataclasses.field(default_factory=Actor)
    dead_rounds: int = 0
    executes_at_round: int = 0  # when a slow shard executes the waiting command; 0 = at once


NEW_DEPLOYMENT = Deployment()


class Simulation:
    """A fleet and its controller. `run` until every record is trained and committed."""

    def __init__(  # noqa: PLR0913 (one option of the simulation each)
        self,
        records: Sequence[Record],
        *,
        exact: bool = False,
        kills: Sequence[Kill] = (),
        restart_after: int = 2,
        num_shards: int = 2,
        num_workers: int = 1,
        initial_workers: int = 0,
        initial_batch_requests: int = 0,
        unit_records: int = 4,
        export: Mapping[int, int] | None = None,
        from_table: bool = False,
        batch_requests: int = 4,
        commit_interval_s: float = 0.7,
        real_shards: bool = False,
        uploads: bool = False,
        seed: int | None = None,
        faults: FaultSchedule = NO_FAULTS,
        limits: dict[str, float] | None = None,
        twins: Sequence[Twin] = (),
        deployment: Deployment = NEW_DEPLOYMENT,
        loop: Mapping[str, Any] | None = None,
        open_store: Callable[[MessageFaults], FlakyMemoryStore] = FlakyMemoryStore,
    ) -> None:
        """`uploads`: real shards copy their segments to the store; each part of an upload is a moment
        `(shard, "upload", "before")`. `loop`: further settings of `LoopConfig`. `limits`: time limits of
        `CoordinatorConfig` that replace the defaults."""
        self.deployment = deployment
        self.uploads = uploads
        self.real_shards, self.seeded, self.message_faults = (
            real_shards,
            seed is not None,
            MessageFaults(seed),
        )
        self.network = Network(faults)
        self.records, self.kills, self.restart_after = list(records), list(kills), restart_after
        self.config = LoopConfig(
            exact=exact,
            batch_requests=batch_requests,
            initial_batch_requests=initial_batch_requests,
            max_batch_wait_ms=500,
            **(loop or {}),
        )
        self.export = dict(export or {})
        self.coordinator_config = CoordinatorConfig(
            schema=f"{deployment.schema.fingerprint:016x}",
            seed=0,
            num_shards=num_shards,
            num_workers=num_workers,
            initial_workers=initial_workers,
            unit_records=unit_records,
            from_table=from_table,
            num_buckets=64,
            num_partitions=4,
            kafka=deployment.kafka,
            commit_interval_s=commit_interval_s,
            **(limits or {}),
        )
        self.clock, self.store = FixedWaitClock(), open_store(self.message_faults)
        self.store.objects |= deployment.objects
        self.store.before_part = self._before_part
        self.mount_point = MemoryStore()
        self.mount_point.objects.clear()
        self.disks: list[Any] = list(deployment.disks) or [
            MemoryKeyValueStore() if real_shards else {} for _ in range(num_shards)
        ]
        self.workers = worker_keys(max(num_workers, initial_workers))
        self.slots = {str(key): MemberSlot() for key in (*self.coordinator_config.shards, *self.workers)}
        self.twins = {twin: MemberSlot(session=100 + n) for n, twin in enumerate(twins)}
        self.refusals: Counter[str] = Counter()  # member → heartbeats refused in favor of another process
        self.controller: WatchedController | None = None
        self.controller_dead_rounds = 0
        self.moments: Counter[tuple[str, str, str]] = Counter()
        self.killed: list[str] = []
        self.defects: list[Exception] = []
        self.commits: dict[int, Manifest] = {}  # the newest commit at the end of each round, by its number
        self.outputs = MemoryOutputs()
        self.reduction_hub = ReductionHub(
            self.clock, lambda worker: bool(self.message_faults.draw("torn sum")), self.network.can_receive
        )

    # Processes

    def start(self, who: str) -> None:
        if who == CONTROLLER:
            coordinator = Coordinator(self.coordinator_config, self.clock.monotonic_s())
            store, check = self._store(CONTROLLER), self.deployment.identity(self.coordinator_config).check
            self.controller = WatchedController(
                coordinator,
                store,
                self._clock(CONTROLLER),
                history=self._history,
                open_session=self._open_session,
                long_poll_s=0,
                check=check,
            )
            self.controller.moment = self.moment
            return
        self.slots[who] = self._start_process(who, self.slots[who].session + 1, self.moment)

    def _start_process(
        self, who: str, session: int, moment: Callable[[str, str, str], None] = lambda *_: None
    ) -> MemberSlot:
        role, index = who.split()
        process = self._process(role, index)
        slot = MemberSlot(process=process, session=session)

        def execute(command: dict[str, Any]) -> dict[str, Any]:
            moment(who, command["kind"], "before")
            try:
                result = process.execute(command)
            except RoostreamError:
                raise
            except Exception as error:
                self.defects.append(error)
                raise
            moment(who, command["kind"], "after")
            return result

        slot.agent = ControllerAgent(
            lambda: self._heartbeat_transport(slot),
            role,
            int(index),
            execute,
            process.report,
            threading.Event(),
            clock=self._clock(who),
            session=session,
            on_received=getattr(process, "hear", lambda command: None),
        )
        return slot

    def _history(self, committed: Mapping[int, int]) -> tuple[WorkUnit, ...]:
        ends = Counter(record.partition for record in self.records)
        return tuple(historical_range({p: (0, end) for p, end in ends.items()}, committed, self.export))

    def _open_session(self) -> TableInput | None:
        """Return no session: this simulation has no warehouse."""
        return None

    def _heartbeat_transport(self, slot: MemberSlot, overtaking: bool = False) -> HeartbeatTransport:
        agent = slot.agent
        assert agent is not None
        who = f"{agent.role} {agent.index}"

        def overtake() -> None:
            if not overtaking:
                self.control()
                with contextlib.suppress(RoostreamError):
                    agent.beat(self._heartbeat_transport(slot, overtaking=True))

        return HeartbeatTransport(self, who, lambda: self.controller, overtake)

    def _store(self, who: str) -> IdentifiedStore:
        return IdentifiedStore(StoreLink(self.store, self.mount_point, who, self.network), "the store")

    def _clock(self, who: str) -> ProgramClock:
        return ProgramClock(self.clock, who, self.network)

    def _before_part(self, name: str, part: int) -> None:
        shard = name.removeprefix("segments/").partition("-")[0]
        self.moment(f"shard {shard}", "upload", "before")

    def kill(self, who: str, *, loses_disk: bool = False) -> None:
        """Kill the process of a program. `loses_disk`: a shard's disk is empty afterwards."""
        self.killed.append(who)
        if loses_disk and who.startswith("shard"):
            self.disks[int(who.split()[1])] = MemoryKeyValueStore()
        for member in self._members_of_process(who):
            self._end(member)

    def _end(self, who: str) -> None:
        if who == CONTROLLER:
            self.controller, self.controller_dead_rounds = None, 0
        else:
            self._end_process(who, self.slots[who])

    def _end_process(self, who: str, slot: MemberSlot) -> None:
        if isinstance(slot.process, (FakeShard, RealShard)):
            slot.process.die()
        elif slot.process is not None:
            self.reduction_hub.worker_died(int(who.split()[1]))
        slot.process, slot.dead_rounds = None, 0
        if not slot.actor.is_running:
            slot.actor.kill()

    def moment(self, who: str, what: str, when: str) -> None:
        """Count a moment, and perform its kills. Raises Killed if `who` itself is killed."""
        self.moments[who, what, when] += 1
        for kill in [
            k
            for k in self.kills
            if k.moment == (who, what, when) and k.occurrence == self.moments[who, what, when]
        ]:
            self.kills.remove(kill)
            self.kill(kill.victim, loses_disk=kill.loses_disk)
            if who in self._members_of_process(kill.victim):
                raise Killed

    def _members_of_process(self, who: str) -> tuple[str, ...]:
        """The members that share this member's process, and die with it."""
        return (who,)

    def _shard(self, index: int) -> FakeShard | RealShard:
        store, clock = self._store(f"shard {index}"), self._clock(f"shard {index}")
        if self.real_shards:
            disk, schema = self.disks[index], self.deployment.schema
            return RealShard(index, len(self.disks), store, clock, disk, schema, uploads=self.uploads)
        return FakeShard(index, self.deployment.schema, store, self.disks[index], clock)

    def _process(self, role: str, index: str) -> Any:
        return self._worker(int(index)) if role == "worker" else self._shard(int(index))

    def _shard_transport(self, source: str, shard: str) -> ShardTransport:
        return ShardTransport(self, source, shard, lambda: self.slots[shard].process)

    def _rows(self, worker: int) -> FakeRows | Client:
        shards = [self._shard_transport(f"worker {worker}", f"shard {i}") for i in range(len(self.disks))]
        if self.real_shards:
            clock = self._clock(f"worker {worker}")
            client = Client(self.deployment.schema, shards, worker=worker, resend_for_s=0.2, clock=clock)
            client.close()
            client.pool = None  # an actor has one thread, so it calls the shards one by one
            return client
        rows = FakeRows(self.deployment.schema, shards, worker)
        rows.before_push = lambda: self.moment(f"worker {worker}", "push", "before")
        return rows

    def _worker(self, index: int) -> Worker:
        """Create a worker. It reads all partitions until RESTORE assigns some."""

        def read(partitions: tuple[Partition, ...]) -> TrickleReader:
            return TrickleReader(
                LogConsumer(partitions, self.records),
                ConsumerOptions(partitions=partitions, merge_by_time=True),
            )  # type: ignore[arg-type]

        decoder, clock = (
            Decoder(self.deployment.schema, self.deployment.registry),
            self._clock(f"worker {index}"),
        )
        dependencies = LoopDependencies(
            source=self._source(RecordSource(read(PARTITIONS), decoder, clock, max_wait_ms=500, reopen=read)),
            rows=ShardRows(self._rows(index)),  # type: ignore[arg-type]
            outputs=self.outputs,
            clock=clock,
        )
        loop = TrainLoop(self.config, self.deployment.schema, samples.MODEL, dependencies)
        identity, rendezvous = (
            self.deployment.identity(self.coordinator_config),
            self._rendezvous(index, dependencies.rows),
        )
        return Worker(loop, self.outputs, self._store(f"worker {index}"), identity, index, rendezvous)

    def _rendezvous(self, index: int, rows: Any) -> Rendezvous:
        return InMemoryRendezvous(self.reduction_hub, index)

    def _source(self, stream: BatchSource) -> BatchSource:
        """The source that a worker reads. Subclasses add others."""
        return stream

    # Time

    def round(self) -> None:
        """Simulate a quarter of a second: dead processes restart, members send heartbeats and execute
        commands, the controller acts, and workers train."""
        self.store.reliable = False
        self.network.round += 1
        self.clock.advance(ROUND_S)
        self._revive()
        for who in self.slots:
            self.until_killed(lambda who=who: self._beat(who))
        for twin in self.twins:
            self._run_twin(twin)
        self.until_killed(self.message_faults.deliver_delayed)
        self.until_killed(self.control)
        for _ in range(3 * len(self.workers)):
            for who in self._training_order():
                self._train(who, 1)
        self.store.reliable = True
        if last := manifests.newest(self.store):
            self.commits[last.manifest.seq] = last.manifest

    def run(self, max_rounds: int = MAX_ROUNDS) -> Simulation:
        for _ in range(max_rounds):
            self.round()
            assert not self.defects, self.defects
            assert not self.mount_point.objects, (
                "something was written to the mount point of an unmounted store"
            )
            if self.is_done():
                return self
        raise AssertionError(
            f"not done after {max_rounds} rounds, {max_rounds * ROUND_S:g} simulated seconds; kills to come: "
            f" {self.kills}; {self.controller and self.controller.status()}"
        )

    def run_with_optional_kills(self) -> Simulation:
        """Like `run`, but some of the kills may name moments that never occur."""
        for _ in range(MAX_ROUNDS):
            self.round()
            pending, self.kills = self.kills, []
            done = self.is_done()
            self.kills = pending
            if done:
                self.kills = []
                return self.run()
        raise AssertionError(f"not done: {self.controller and self.controller.status()}")

    def is_done(self) -> bool:
        last = manifests.newest(self.store)
        return (
            not self.kills
            and last is not None
            and sum(last.manifest.offsets.values()) == len(self.records)
            and self.controller is not None
            and self.controller.coordinator.state is State.RUNNING
            and all(slot.process is not None for slot in self.slots.values())
            and self._is_everyone_restored(self.controller.coordinator)
        )

    def _is_everyone_restored(self, coordinator: Coordinator) -> bool:
        """Whether all twins have ended, and all members are in the controller's incarnation."""
        agents = [self.slots[str(key)].agent for key in coordinator.membership.everyone]
        return all(self.network.round >= twin.first + twin.rounds for twin in self.twins) and all(
            agent is not None and agent.incarnation == coordinator.incarnation for agent in agents
        )

    def _run_twin(self, twin: Twin) -> None:
        """Run a twin for one round. It behaves like any other member, and restarts while the controller
        refuses it. It is killed in its last round, so that every run ends."""
        slot = self.twins[twin]
        if self.network.round == twin.first:
            self.twins[twin] = self._start_process(twin.who, slot.session)
        elif self.network.round >= twin.first + twin.rounds:
            if slot.agent is not None and slot.agent.refused:
                slot.process = None  # a refused process is in no group, so nobody waits for it
            self._end_process(twin.who, slot)
        elif slot.process is not None and slot.agent is not None:
            self.until_killed(lambda: self._beat_slot(twin.who, slot))
            self.refusals[f"{twin.who}'s twin"] += bool(slot.agent.refused)
            if twin.who.startswith("worker"):
                self._train_slot(slot)
            if slot.agent.refused and self.network.round % 8 == 0:
                self.twins[twin] = self._start_process(twin.who, slot.session + 1000)

    def _revive(self) -> None:
        for who, slot in list(self.slots.items()):
            slot.dead_rounds += 1
            if slot.process is None and (slot.session == 0 or slot.dead_rounds >= self.restart_after):
                self.start(who)
        self.controller_dead_rounds += 1
        if self.controller is None and (not self.killed or self.controller_dead_rounds >= self.restart_after):
            self.start(CONTROLLER)

    def until_killed(self, action: Callable[[], Any]) -> None:
        """Run an action that may kill its own process."""
        try:
            action()
        except Killed:
            return

    def control(self) -> None:
        if self.controller is None:
            return
        try:
            self.controller.turn()
        except FencedError:
            self.kill(CONTROLLER)

    def _beat(self, who: str) -> None:
        """Send a heartbeat, and count its refusal."""
        slot = self.slots[who]
        self._beat_slot(who, slot)
        self.refusals[who] += bool(slot.agent and slot.agent.refused)

    def _beat_slot(self, who: str, slot: MemberSlot) -> None:
        """Send a heartbeat and execute commands. In the product, `controller_agent` has a thread for each."""
        if slot.process is None or slot.agent is None:
            return
        with contextlib.suppress(RoostreamError):
            slot.agent.beat(self._heartbeat_transport(slot))
        if self._is_delayed(who, slot):
            return
        commands_left = self.message_faults.random.randint(0, 3) if self.seeded else None  # None = all
        while not slot.agent.commands.empty() and commands_left != 0:
            if not self._is_free(slot):
                return
            command = slot.agent.commands.get()
            assert command is not None
            self._do(slot, functools.partial(slot.agent.run, command))
            if who.startswith("worker"):
                for _ in range(self.message_faults.random.randint(0, 3) if self.seeded else 2):
                    self._train_slot(slot)
            commands_left = commands_left and commands_left - 1

    def _is_delayed(self, who: str, slot: MemberSlot) -> bool:
        """Whether a slow shard is not yet to execute its waiting command."""
        if slot.agent is None or slot.agent.commands.empty():
            return False
        if not slot.executes_at_round and (slow := self.network.slowness(who)):
            slot.executes_at_round = self.network.round + slow.rounds_late
        if self.network.round < slot.executes_at_round:
            return True
        slot.executes_at_round = 0
        return False

    def _train(self, who: str, times: int) -> None:
        for _ in range(times):
            self._train_slot(self.slots[who])

    def _train_slot(self, slot: MemberSlot) -> None:
        if slot.process is not None and self._is_free(slot):
            self._do(slot, slot.process.turn)

    def _training_order(self) -> list[str]:
        """The workers in the order in which they train. With a seed it is random, and some are left out."""
        workers = [str(key) for key in self.workers]
        if self.seeded and len(workers) > 1:
            workers = self.message_faults.random.sample(
                workers, self.message_faults.random.randint(1, len(workers))
            )
        return workers

    def _is_free(self, slot: MemberSlot) -> bool:
        """Continue a paused action. Returns whether the process is alive and has none left."""
        if slot.actor.busy:
            slot.actor.resume()
        return not slot.actor.busy and slot.process is not None

    def _do(self, slot: MemberSlot, action: Callable[[], object]) -> None:
        if len(self.workers) > 1:
            slot.actor.do(action)
        else:
            self.until_killed(action)

    # Results

    @property
    def worker(self) -> Worker:
        return self.slots[WORKER].process

    @property
    def last(self) -> Manifest:
        found = manifests.newest(self.store)
        assert found is not None
        return found.manifest

    def pushes(self) -> dict[int, int]:
        """User (= sample) → number of pushes to its row."""
        table = samples.schema().table_by_name["user"].id
        out: dict[int, int] = {}
        for index in range(len(self.disks)):
            out |= {
                id_: row.pushes
                for (t, id_), row in self.slots[f"shard {index}"].process.rows.items()
                if t == table
            }
        return out

    def assert_applied_once(self, numbers: Sequence[int]) -> None:
        assert self.pushes() == dict.fromkeys(sorted(set(numbers)), 1)

    def bits(self) -> dict[str, bytes]:
        """The bytes of all weights, rows and optimizer states."""
        out = {name: value.tobytes() for name, value in self.worker.loop.snapshot().shared.items()}
        for index in range(len(self.disks)):
            out |= self.slots[f"shard {index}"].process.bits()
        return out
