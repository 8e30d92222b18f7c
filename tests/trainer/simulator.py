"""The whole commit in one thread: controller, worker and shards over in-memory transports, a clock that is
moved, deaths at named moments, messages that are lost, late or come twice, and a store that is away now and
then.

Between two commands of a worker it trains, as `write` is done beside training. With a `seed`, how many
commands a member does in a round, how much is trained between them, and what becomes of a message is drawn;
the same seed gives the same run.

What lies between the programs is in network.py, with faults that last. Workers are actors (actors.py): one
waits for the others in a sum, or in a push that a shard holds, while the rest goes on. Which worker goes on
first, and how far, is drawn too.

A moment is `(who, what, when)`: a member executing a command, the controller doing an effect, or the worker
between the pushes of one batch. `kill_at` names the moment, which of its occurrences, and who dies there."""

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
from tests.trainer.actors import Actor, Hall, HallTeam, Killed
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.loops import PARTITIONS, MemoryOutputs
from tests.trainer.memory_store import MemoryStore
from tests.trainer.network import (
    CONTROLLER,
    BeatWire,
    Disorder,
    Lasting,
    Network,
    ProgramClock,
    ShakyStore,
    StoreLink,
    Wire,
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
NOTHING_LASTS = Lasting()
MAX_ROUNDS, ROUND_S = 400, 0.25


@dataclasses.dataclass(frozen=True)
class Kill:
    moment: tuple[str, str, str]
    victim: str
    occurrence: int = 1
    loses_disk: bool = False  # the victim, a shard, comes back with an empty home


class Twin(NamedTuple):
    """A second process of a member, from one round on for some rounds. It does what it is asked, should the
    controller accept it; calls of others still reach the first process."""

    who: str
    first: int
    rounds: int


class EvenClock(FakeClock):
    """Every wait takes a tenth of a second: how long a retry waits is drawn where no seed reaches."""

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        return super().sleep(0.1, stop)


class TrickleReader(KafkaConsumer):
    """Three records a poll, without waiting, so that cuts find records that were fetched or polled and not
    yet trained."""

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        return super().poll(min(max_records, 3), 0.0, partition)


class WatchedController(Controller):
    """A controller whose effects are moments."""

    moment: Callable[[str, str, str], None]

    def perform(self, effect: Effect) -> None:
        what = {Claim: "claim", Link: "link"}.get(type(effect), "retire")
        self.moment(CONTROLLER, what, "before")
        super().perform(effect)
        self.moment(CONTROLLER, what, "after")


@dataclasses.dataclass(frozen=True)
class Site:
    """What a simulation begins with: its schema and Kafka, and what there is in its store and on its shards'
    disks."""

    schema: Schema = dataclasses.field(default_factory=samples.schema)
    kafka: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(samples.KAFKA))
    objects: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    disks: Sequence[Any] = ()

    def registry(self, fingerprint: int) -> Schema | None:
        """Samples are those of `samples.schema()`, whatever the programs' schema is."""
        return {s.fingerprint: s for s in (samples.schema(), self.schema)}.get(fingerprint)

    def identity(self, facts: CoordinatorConfig) -> DeploymentIdentity:
        site = {"schema": self.schema, "registry": self.registry, "kafka": self.kafka}
        return samples.identity(**site, num_shards=facts.num_shards)


@dataclasses.dataclass
class Place:
    """A member's place: its process (None = dead), and its side of the controller."""

    process: Any = None
    session: int = 0
    member: ControllerAgent | None = None
    actor: Actor = dataclasses.field(default_factory=Actor)
    dead_rounds: int = 0
    begins_at: int = 0  # of a slow shard: the round in which it does what it was asked; 0 = when it comes


NEW = Site()


class Simulation:
    """`run` until every record is trained and committed."""

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
        lasting: Lasting = NOTHING_LASTS,
        limits: dict[str, float] | None = None,
        twins: Sequence[Twin] = (),
        site: Site = NEW,
        loop: Mapping[str, Any] | None = None,
        open_store: Callable[[Disorder], ShakyStore] = ShakyStore,
    ) -> None:
        """`uploads`: real shards copy their segments to the store; each piece of a copy is a moment
        `(shard, "upload", "before")`. `twins`: second processes of members. `loop`: settings of the loop
        beyond the others. `limits`: time limits of `CoordinatorConfig` that are not the product's own."""
        self.site = site
        self.uploads = uploads
        self.real_shards, self.seeded, self.disorder = real_shards, seed is not None, Disorder(seed)
        self.network = Network(lasting)
        self.records, self.kills, self.restart_after = list(records), list(kills), restart_after
        self.config = LoopConfig(
            exact=exact,
            batch_requests=batch_requests,
            initial_batch_requests=initial_batch_requests,
            max_batch_wait_ms=500,
            **(loop or {}),
        )
        self.export = dict(export or {})
        self.facts = CoordinatorConfig(
            schema=f"{site.schema.fingerprint:016x}",
            seed=0,
            num_shards=num_shards,
            num_workers=num_workers,
            initial_workers=initial_workers,
            unit_records=unit_records,
            from_table=from_table,
            num_buckets=64,
            num_partitions=4,
            kafka=site.kafka,
            commit_interval_s=commit_interval_s,
            **(limits or {}),
        )
        self.clock, self.store = EvenClock(), open_store(self.disorder)
        self.store.objects |= site.objects
        self.store.before_part = self._before_part
        self.mount_point = MemoryStore()
        self.mount_point.objects.clear()
        self.disks: list[Any] = list(site.disks) or [
            MemoryKeyValueStore() if real_shards else {} for _ in range(num_shards)
        ]
        self.workers = worker_keys(max(num_workers, initial_workers))
        self.places = {str(key): Place() for key in (*self.facts.shards, *self.workers)}
        self.twins = {twin: Place(session=100 + n) for n, twin in enumerate(twins)}
        self.refusals: Counter[str] = Counter()  # who was refused in favor of another process, how often
        self.controller: WatchedController | None = None
        self.controller_dead_rounds = 0
        self.moments: Counter[tuple[str, str, str]] = Counter()
        self.killed: list[str] = []
        self.defects: list[Exception] = []
        self.commits: dict[int, Manifest] = {}  # every one that was there at the end of a round
        self.outputs = MemoryOutputs()
        self.hall = Hall(self.clock, lambda worker: bool(self.disorder.draw("torn sum")), self.network.hears)

    # Processes

    def start(self, who: str) -> None:
        if who == CONTROLLER:
            coordinator = Coordinator(self.facts, self.clock.monotonic_s())
            store, check = self._store(CONTROLLER), self.site.identity(self.facts).check
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
        self.places[who] = self._started(who, self.places[who].session + 1, self.moment)

    def _started(
        self, who: str, session: int, moment: Callable[[str, str, str], None] = lambda *_: None
    ) -> Place:
        role, index = who.split()
        process = self._process(role, index)
        place = Place(process=process, session=session)

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

        place.member = ControllerAgent(
            lambda: self._beat_wire(place),
            role,
            int(index),
            execute,
            process.report,
            threading.Event(),
            clock=self._clock(who),
            session=session,
            on_received=getattr(process, "hear", lambda command: None),
        )
        return place

    def _history(self, committed: Mapping[int, int]) -> tuple[WorkUnit, ...]:
        ends = Counter(record.partition for record in self.records)
        return tuple(historical_range({p: (0, end) for p, end in ends.items()}, committed, self.export))

    def _open_session(self) -> TableInput | None:
        """There is no warehouse."""
        return None

    def _beat_wire(self, place: Place, overtaking: bool = False) -> BeatWire:
        member = place.member
        assert member is not None
        who = f"{member.role} {member.index}"

        def overtake() -> None:
            if not overtaking:
                self.control()
                with contextlib.suppress(RoostreamError):
                    member.beat(self._beat_wire(place, overtaking=True))

        return BeatWire(self, who, lambda: self.controller, overtake)

    def _store(self, who: str) -> IdentifiedStore:
        return IdentifiedStore(StoreLink(self.store, self.mount_point, who, self.network), "the store")

    def _clock(self, who: str) -> ProgramClock:
        return ProgramClock(self.clock, who, self.network)

    def _before_part(self, name: str, part: int) -> None:
        shard = name.removeprefix("segments/").partition("-")[0]
        self.moment(f"shard {shard}", "upload", "before")

    def kill(self, who: str, *, loses_disk: bool = False) -> None:
        self.killed.append(who)
        if loses_disk and who.startswith("shard"):
            self.disks[int(who.split()[1])] = MemoryKeyValueStore()
        for member in self._process_of(who):
            self._end(member)

    def _end(self, who: str) -> None:
        if who == CONTROLLER:
            self.controller, self.controller_dead_rounds = None, 0
        else:
            self._end_process(who, self.places[who])

    def _end_process(self, who: str, place: Place) -> None:
        if isinstance(place.process, (FakeShard, RealShard)):
            place.process.die()
        elif place.process is not None:
            self.hall.away(int(who.split()[1]))
        place.process, place.dead_rounds = None, 0
        if not place.actor.is_running:
            place.actor.kill()

    def moment(self, who: str, what: str, when: str) -> None:
        self.moments[who, what, when] += 1
        for kill in [
            k
            for k in self.kills
            if k.moment == (who, what, when) and k.occurrence == self.moments[who, what, when]
        ]:
            self.kills.remove(kill)
            self.kill(kill.victim, loses_disk=kill.loses_disk)
            if who in self._process_of(kill.victim):
                raise Killed

    def _process_of(self, who: str) -> tuple[str, ...]:
        """The members that die with it."""
        return (who,)

    def _shard(self, index: int) -> FakeShard | RealShard:
        store, clock = self._store(f"shard {index}"), self._clock(f"shard {index}")
        if self.real_shards:
            disk, schema = self.disks[index], self.site.schema
            return RealShard(index, len(self.disks), store, clock, disk, schema, uploads=self.uploads)
        return FakeShard(index, self.site.schema, store, self.disks[index], clock)

    def _process(self, role: str, index: str) -> Any:
        return self._worker(int(index)) if role == "worker" else self._shard(int(index))

    def _wire(self, source: str, shard: str) -> Wire:
        return Wire(self, source, shard, lambda: self.places[shard].process)

    def _rows(self, worker: int) -> FakeRows | Client:
        shards = [self._wire(f"worker {worker}", f"shard {i}") for i in range(len(self.disks))]
        if self.real_shards:
            clock = self._clock(f"worker {worker}")
            client = Client(self.site.schema, shards, worker=worker, resend_for_s=0.2, clock=clock)
            client.close()
            client.pool = None  # an actor has one thread: one shard after the other
            return client
        rows = FakeRows(self.site.schema, shards, worker)
        rows.before_push = lambda: self.moment(f"worker {worker}", "push", "before")
        return rows

    def _worker(self, index: int) -> Worker:
        """Of all partitions, until RESTORE says which."""

        def read(mine: tuple[Partition, ...]) -> TrickleReader:
            return TrickleReader(
                LogConsumer(mine, self.records), ConsumerOptions(partitions=mine, merge_by_time=True)
            )  # type: ignore[arg-type]

        decoder, clock = Decoder(self.site.schema, self.site.registry), self._clock(f"worker {index}")
        dependencies = LoopDependencies(
            source=self._source(RecordSource(read(PARTITIONS), decoder, clock, max_wait_ms=500, reopen=read)),
            rows=ShardRows(self._rows(index)),  # type: ignore[arg-type]
            outputs=self.outputs,
            clock=clock,
        )
        loop = TrainLoop(self.config, self.site.schema, samples.MODEL, dependencies)
        identity, team = self.site.identity(self.facts), self._team(index, dependencies.rows)
        return Worker(loop, self.outputs, self._store(f"worker {index}"), identity, index, team)

    def _team(self, index: int, rows: Any) -> Rendezvous:
        return HallTeam(self.hall, index)

    def _source(self, stream: BatchSource) -> BatchSource:
        """What a worker reads."""
        return stream

    # Time

    def round(self) -> None:
        """A quarter of a second: the dead come back, everyone beats and does commands, the controller acts,
        workers train."""
        self.store.well = False
        self.network.round += 1
        self.clock.advance(ROUND_S)
        self._revive()
        for who in self.places:
            self.guard(lambda who=who: self._beat(who))
        for twin in self.twins:
            self._be_twin(twin)
        self.guard(self.disorder.deliver_late)
        self.guard(self.control)
        for _ in range(3 * len(self.workers)):
            for who in self._in_some_order():
                self._train(who, 1)
        self.store.well = True
        if last := manifests.newest(self.store):
            self.commits[last.manifest.seq] = last.manifest

    def run(self, max_rounds: int = MAX_ROUNDS) -> Simulation:
        for _ in range(max_rounds):
            self.round()
            assert not self.defects, self.defects
            assert not self.mount_point.objects, "something was written where the store is mounted"
            if self.is_done():
                return self
        raise AssertionError(
            f"not done after {max_rounds} rounds, {max_rounds * ROUND_S:g} simulated seconds; kills to come: "
            f" {self.kills}; {self.controller and self.controller.status()}"
        )

    def run_as_far_as_kills_go(self) -> Simulation:
        """`run`, where some of the kills may name moments that never come."""
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
            and all(place.process is not None for place in self.places.values())
            and self._is_everyone_restored(self.controller.coordinator)
        )

    def _is_everyone_restored(self, coordinator: Coordinator) -> bool:
        """No twin is left, and the controller's members are the processes at their places."""
        here = [self.places[str(key)].member for key in coordinator.membership.everyone]
        return all(self.network.round >= twin.first + twin.rounds for twin in self.twins) and all(
            member is not None and member.incarnation == coordinator.incarnation for member in here
        )

    def _be_twin(self, twin: Twin) -> None:
        """It starts, does what the others of its kind do, and restarts when it was refused for a while. In
        its last round it is killed, so that every run ends."""
        place = self.twins[twin]
        if self.network.round == twin.first:
            self.twins[twin] = self._started(twin.who, place.session)
        elif self.network.round >= twin.first + twin.rounds:
            if place.member is not None and place.member.refused:
                place.process = None  # it has no part in anything
            self._end_process(twin.who, place)
        elif place.process is not None and place.member is not None:
            self.guard(lambda: self._beat_place(twin.who, place))
            self.refusals[f"{twin.who}'s twin"] += bool(place.member.refused)
            if twin.who.startswith("worker"):
                self._train_place(place)
            if place.member.refused and self.network.round % 8 == 0:
                self.twins[twin] = self._started(twin.who, place.session + 1000)

    def _revive(self) -> None:
        for who, place in list(self.places.items()):
            place.dead_rounds += 1
            if place.process is None and (place.session == 0 or place.dead_rounds >= self.restart_after):
                self.start(who)
        self.controller_dead_rounds += 1
        if self.controller is None and (not self.killed or self.controller_dead_rounds >= self.restart_after):
            self.start(CONTROLLER)

    def guard(self, act: Callable[[], Any]) -> None:
        try:
            act()
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
        place = self.places[who]
        self._beat_place(who, place)
        self.refusals[who] += bool(place.member and place.member.refused)

    def _beat_place(self, who: str, place: Place) -> None:
        """What the threads of roostream.runtime.controller_agent do, in one."""
        if place.process is None or place.member is None:
            return
        with contextlib.suppress(RoostreamError):
            place.member.beat(self._beat_wire(place))
        if self._begins_late(who, place):
            return
        most = self.disorder.random.randint(0, 3) if self.seeded else None
        while not place.member.commands.empty() and most != 0:
            if not self._is_free(place):
                return
            command = place.member.commands.get()
            assert command is not None
            self._act(place, functools.partial(place.member.run, command))
            if who.startswith("worker"):
                for _ in range(self.disorder.random.randint(0, 3) if self.seeded else 2):
                    self._train_place(place)
            most = most and most - 1

    def _begins_late(self, who: str, place: Place) -> bool:
        """A slow shard has been asked for something, and isn't there yet."""
        if place.member is None or place.member.commands.empty():
            return False
        if not place.begins_at and (slow := self.network.late(who)):
            place.begins_at = self.network.round + slow.late
        if self.network.round < place.begins_at:
            return True
        place.begins_at = 0
        return False

    def _train(self, who: str, times: int) -> None:
        for _ in range(times):
            self._train_place(self.places[who])

    def _train_place(self, place: Place) -> None:
        if place.process is not None and self._is_free(place):
            self._act(place, place.process.turn)

    def _in_some_order(self) -> list[str]:
        """The workers; where it is drawn some wait longer."""
        workers = [str(key) for key in self.workers]
        if self.seeded and len(workers) > 1:
            workers = self.disorder.random.sample(workers, self.disorder.random.randint(1, len(workers)))
        return workers

    def _is_free(self, place: Place) -> bool:
        """What it was in the middle of has gone on, and is done."""
        if place.actor.busy:
            place.actor.go_on()
        return not place.actor.busy and place.process is not None

    def _act(self, place: Place, act: Callable[[], object]) -> None:
        if len(self.workers) > 1:
            place.actor.do(act)
        else:
            self.guard(act)

    # What came of it

    @property
    def worker(self) -> Worker:
        return self.places[WORKER].process

    @property
    def last(self) -> Manifest:
        found = manifests.newest(self.store)
        assert found is not None
        return found.manifest

    def pushes(self) -> dict[int, int]:
        """User (= sample) → how often its row was pushed to, now."""
        table = samples.schema().table_by_name["user"].id
        out: dict[int, int] = {}
        for index in range(len(self.disks)):
            out |= {
                id_: row.pushes
                for (t, id_), row in self.places[f"shard {index}"].process.rows.items()
                if t == table
            }
        return out

    def assert_applied_once(self, numbers: Sequence[int]) -> None:
        assert self.pushes() == dict.fromkeys(sorted(set(numbers)), 1)

    def bits(self) -> dict[str, bytes]:
        """Every parameter and optimizer state, dense and sparse."""
        out = {name: value.tobytes() for name, value in self.worker.loop.snapshot().shared.items()}
        for index in range(len(self.disks)):
            out |= self.places[f"shard {index}"].process.bits()
        return out
