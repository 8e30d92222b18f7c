"""The whole commit in one thread: controller, worker and shards over in-memory transports, a clock that is moved, deaths at
named moments, messages that are lost, late or come twice, and a store that is away now and then.

Between two commands of a worker it trains, as `write` is done beside training. With a `seed`, how many commands a member does in
a round, how much is trained between them, and what becomes of a message is drawn; the same seed gives the same run.

Workers are actors (actors.py): one waits for the others in a sum, or in a push that a shard holds, while the rest goes on. Which
worker goes on first, and how far, is drawn too.

A moment is `(who, what, when)`: a member executing a command, the controller doing an effect, or the worker between the
pushes of one batch. `kill_at` names the moment, which of its occurrences, and who dies there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from param_server.blobs import MemoryBlobs
from param_server.client import Client
from roo.decode import Decoder
from roo.errors import FencedError, RoostreamError, TransportError, UnavailableError
from roo.wire import Record
from runtime import manifest as manifests
from runtime.clock import FakeClock
from runtime.kafka.reader import KafkaReader
from runtime.kafka.reading import Reading
from runtime.kafka.topics import Partition
from runtime.manifest import Manifest
from runtime.member import Member
from runtime.transport import Arrays, Header
from tests.runtime.fake_consumer import LogConsumer
from tests.trainer import samples
from tests.trainer.actors import Actor, Hall, HallTeam, Killed
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.loops import MemoryOutputs
from tests.trainer.memory_store import MemoryStore
from tests.trainer.real_shard import RealShard
from trainer.config import LoopConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.protocol import Claim, Effect, Facts, Link, State
from trainer.identity import Identity
from trainer.loop import TrainLoop, Wiring
from trainer.record_batches import RecordBatches
from trainer.rows import ShardRows
from trainer.worker import Worker

CONTROLLER, WORKER = "controller", "worker 0"
PARTITIONS = (("samples", 0), ("samples", 1))
KAFKA = {"cluster_id": "c", "topics": {"samples": "1"}}


@dataclasses.dataclass(frozen=True)
class Kill:
    moment: tuple[str, str, str]
    victim: str
    occurrence: int = 1


class Disorder:
    """What becomes of messages: `draw` names a fault, or "" for none. After `most` faults the network is well, so that every run
    ends."""

    def __init__(self, seed: int | None, *, share: float = 0.15, most: int = 60) -> None:
        self.random = random.Random(seed)
        self.share, self.left = share, 0 if seed is None else most
        self.drawn: Counter[str] = Counter()
        self.late: list[Callable[[], object]] = []  # copies that are still on their way

    def draw(self, *faults: str) -> str:
        if not self.left or self.random.random() >= self.share:
            return ""
        self.left -= 1
        fault = self.random.choice(faults)
        self.drawn[fault] += 1
        return fault

    def deliver_late(self) -> None:
        """Some copies arrive now, in any order; nobody waits for their answers."""
        self.random.shuffle(self.late)
        while self.late and self.random.random() < 0.5:
            with contextlib.suppress(RoostreamError):
                self.late.pop()()


class EvenClock(FakeClock):
    """Every wait takes a tenth of a second: how long a retry waits is drawn where no seed reaches."""

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        return super().sleep(0.1, stop)


class ShakyStore(MemoryStore):
    """A store that now and then can't be read or written for a call, before or after it had its effect; `well` while a test
    looks."""

    def __init__(self, disorder: Disorder) -> None:
        super().__init__()
        self.disorder, self.well = disorder, True

    def _fault(self, method: str, when: str) -> None:
        super()._fault(method, when)
        if not self.well and self.disorder.draw("store away"):
            raise UnavailableError(f"{method}: the store is away")


class Wire:
    """A transport to whichever process is behind a place now."""

    def __init__(self, find: Callable[[], FakeShard | RealShard | None], disorder: Disorder) -> None:
        self.find, self.disorder = find, disorder

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        fault = self.disorder.draw("lost", "answer lost", "twice", "late copy")
        if fault == "lost":
            raise TransportError(f"{method}: lost")
        if fault == "late copy":
            self.disorder.late.append(lambda: self._handle(method, header, arrays))
        answer = self._handle(method, header, arrays)
        if fault == "twice":
            answer = self._handle(method, header, arrays)
        if fault == "answer lost":
            raise TransportError(f"{method}: the answer was lost")
        return answer

    def close(self) -> None: ...

    def _handle(self, method: str, header: Header, arrays: Arrays) -> Any:
        shard = self.find()
        if shard is None:
            raise TransportError(f"{method}: connection refused")
        return shard.handle(method, dict(header), [np.array(a) for a in arrays])


class BeatWire:
    """A member's transport to whichever controller there is. `overtake` lets the member beat once more, from its other thread,
    while an answer is on its way."""

    def __init__(self, find: Callable[[], Controller | None], disorder: Disorder, overtake: Callable[[], None]) -> None:
        self.find, self.disorder, self.overtake = find, disorder, overtake

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        fault = self.disorder.draw("beat lost", "beat's answer lost", "beat twice", "late copy of a beat", "late answer")
        if fault == "beat lost":
            raise TransportError("beat: lost")
        if fault == "late copy of a beat":
            self.disorder.late.append(lambda: self._handle(header))
        answer = self._handle(header)
        if fault == "beat twice":
            answer = self._handle(header)
        if fault == "beat's answer lost":
            raise TransportError("beat: the answer was lost")
        if fault == "late answer":
            self.overtake()
        return answer, []

    def close(self) -> None: ...

    def _handle(self, header: Header) -> Header:
        controller = self.find()
        if controller is None:
            raise TransportError("beat: connection refused")
        return copy.deepcopy(controller.handle("beat", copy.deepcopy(header), ())[0])


class TrickleReader(KafkaReader):
    """Three records a poll, without waiting, so that cuts find records that were fetched or polled and not yet trained."""

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        return super().poll(min(max_records, 3), 0.0, partition)


class WatchedController(Controller):
    """A controller whose effects are moments."""

    moment: Callable[[str, str, str], None]

    def _do(self, effect: Effect) -> None:
        what = {Claim: "claim", Link: "link"}.get(type(effect), "retire")
        self.moment(CONTROLLER, what, "before")
        super()._do(effect)
        self.moment(CONTROLLER, what, "after")


@dataclasses.dataclass
class Place:
    """A member's place: its process (None = dead), and its side of the controller."""

    process: Any = None
    session: int = 0
    member: Member | None = None
    actor: Actor = dataclasses.field(default_factory=Actor)
    dead_rounds: int = 0


class Simulation:
    """`run` until every record is trained and committed."""

    def __init__(
        self,
        records: Sequence[Record],
        *,
        exact: bool = False,
        kills: Sequence[Kill] = (),
        restart_after: int = 2,
        num_shards: int = 2,
        num_workers: int = 1,
        batch_requests: int = 4,
        commit_interval_s: float = 0.7,
        real_shards: bool = False,
        seed: int | None = None,
    ) -> None:
        self.real_shards, self.seeded, self.disorder = real_shards, seed is not None, Disorder(seed)
        self.records, self.kills, self.restart_after = list(records), list(kills), restart_after
        self.config = LoopConfig(exact=exact, batch_requests=batch_requests, max_batch_wait_ms=500)
        self.facts = Facts(
            schema=f"{samples.schema().fingerprint:016x}",
            seed=0,
            num_shards=num_shards,
            num_workers=num_workers,
            num_buckets=64,
            num_partitions=4,
            kafka=KAFKA,
            commit_interval_s=commit_interval_s,
        )
        self.clock, self.store = EvenClock(), ShakyStore(self.disorder)
        self.disks: list[Any] = [MemoryBlobs() if real_shards else {} for _ in range(num_shards)]
        self.places = {str(key): Place() for key in (*self.facts.shards, *self.facts.workers)}
        self.controller: WatchedController | None = None
        self.controller_dead_rounds = 0
        self.moments: Counter[tuple[str, str, str]] = Counter()
        self.killed: list[str] = []
        self.defects: list[Exception] = []
        self.outputs = MemoryOutputs()
        self.hall = Hall(self.clock, lambda worker: bool(self.disorder.draw("torn sum")))

    # Processes

    def start(self, who: str) -> None:
        if who == CONTROLLER:
            coordinator = Coordinator(self.facts, self.clock.monotonic_s())
            self.controller = WatchedController(coordinator, self.store, self.clock, hold_s=0)
            self.controller.moment = self.moment
            return
        session = self.places[who].session + 1
        role, index = who.split()
        process = self._process(role, index)
        self.places[who] = place = Place(process=process, session=session)

        def execute(command: dict[str, Any]) -> dict[str, Any]:
            self.moment(who, command["kind"], "before")
            try:
                result = process.execute(command)
            except RoostreamError:
                raise
            except Exception as error:
                self.defects.append(error)
                raise
            self.moment(who, command["kind"], "after")
            return result

        place.member = Member(
            lambda: self._beat_wire(place),
            role,
            int(index),
            execute,
            process.report,
            threading.Event(),
            clock=self.clock,
            session=session,
            hear=getattr(process, "hear", lambda command: None),
        )

    def _beat_wire(self, place: Place, overtaking: bool = False) -> BeatWire:
        def overtake() -> None:
            if not overtaking and place.member is not None:
                self._control()
                with contextlib.suppress(RoostreamError):
                    place.member.beat(self._beat_wire(place, overtaking=True))

        return BeatWire(lambda: self.controller, self.disorder, overtake)

    def kill(self, who: str) -> None:
        self.killed.append(who)
        if who == CONTROLLER:
            self.controller, self.controller_dead_rounds = None, 0
        else:
            place = self.places[who]
            if isinstance(place.process, (FakeShard, RealShard)):
                place.process.die()
            elif place.process is not None:
                self.hall.away(int(who.split()[1]))
            place.process, place.dead_rounds = None, 0
            if not place.actor.is_running:
                place.actor.kill()

    def moment(self, who: str, what: str, when: str) -> None:
        self.moments[who, what, when] += 1
        for kill in [k for k in self.kills if k.moment == (who, what, when) and k.occurrence == self.moments[who, what, when]]:
            self.kills.remove(kill)
            self.kill(kill.victim)
            if kill.victim == who:
                raise Killed

    def _shard(self, index: int) -> FakeShard | RealShard:
        if self.real_shards:
            return RealShard(index, len(self.disks), self.store, self.clock, self.disks[index])
        return FakeShard(index, samples.schema(), self.store, self.disks[index], self.clock)

    def _process(self, role: str, index: str) -> Any:
        return self._worker(int(index)) if role == "worker" else self._shard(int(index))

    def _wire(self, shard: str) -> Wire:
        return Wire(lambda: self.places[shard].process, self.disorder)

    def _rows(self, worker: int) -> FakeRows | Client:
        shards = [self._wire(f"shard {i}") for i in range(len(self.disks))]
        if self.real_shards:
            client = Client(samples.schema(), shards, worker=worker, resend_for_s=0.2, clock=self.clock)
            client.close()
            client._pool = None  # an actor has one thread: one shard after the other
            return client
        rows = FakeRows(samples.schema(), shards, worker)
        rows.before_push = lambda: self.moment(f"worker {worker}", "push", "before")
        return rows

    def _worker(self, index: int) -> Worker:
        """Of all partitions, until RESTORE says which."""

        def read(mine: tuple[Partition, ...]) -> TrickleReader:
            return TrickleReader(LogConsumer(mine, self.records), Reading(partitions=mine, merged=True))  # type: ignore[arg-type]

        decoder = Decoder(samples.schema(), {}.get)
        wiring = Wiring(
            source=RecordBatches(read(PARTITIONS), decoder, self.clock, max_wait_ms=500, reopen=read),
            rows=ShardRows(self._rows(index)),  # type: ignore[arg-type]
            outputs=self.outputs,
            clock=self.clock,
        )
        identity = Identity(
            schema=samples.schema(),
            registry={}.get,
            kafka=KAFKA,
            num_shards=self.facts.num_shards,
            num_buckets=self.facts.num_buckets,
            num_partitions=self.facts.num_partitions,
            seed=self.facts.seed,
        )
        loop = TrainLoop(self.config, samples.schema(), samples.MODEL, wiring)
        return Worker(loop, self.outputs, self.store, identity, index, HallTeam(self.hall, index))

    # Time

    def round(self) -> None:
        """A quarter of a second: the dead come back, everyone beats and does commands, the controller acts, workers train."""
        self.store.well = False
        self.clock.advance(0.25)
        self._revive()
        for who in self.places:
            self._guard(lambda who=who: self._beat(who))
        self._guard(self.disorder.deliver_late)
        self._guard(self._control)
        for _ in range(3 * self.facts.num_workers):
            for who in self._in_some_order():
                self._train(who, 1)
        self.store.well = True

    def run(self, most_rounds: int = 400) -> Simulation:
        for _ in range(most_rounds):
            self.round()
            assert not self.defects, self.defects
            if self.is_done():
                return self
        raise AssertionError(f"not done after {most_rounds} rounds: {self.controller and self.controller.status()}")

    def run_as_far_as_kills_go(self) -> Simulation:
        """`run`, where some of the kills may name moments that never come."""
        for _ in range(400):
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
        )

    def _revive(self) -> None:
        for who, place in list(self.places.items()):
            place.dead_rounds += 1
            if place.process is None and (place.session == 0 or place.dead_rounds >= self.restart_after):
                self.start(who)
        self.controller_dead_rounds += 1
        if self.controller is None and (not self.killed or self.controller_dead_rounds >= self.restart_after):
            self.start(CONTROLLER)

    def _guard(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Killed:
            return

    def _control(self) -> None:
        if self.controller is None:
            return
        try:
            self.controller.turn()
        except FencedError:
            self.kill(CONTROLLER)

    def _beat(self, who: str) -> None:
        """What the threads of runtime.member do, in one."""
        place = self.places[who]
        if place.process is None or place.member is None:
            return
        with contextlib.suppress(RoostreamError):
            place.member.beat(self._beat_wire(place))
        most = self.disorder.random.randint(0, 3) if self.seeded else None
        while not place.member._commands.empty() and most != 0:
            if not self._is_free(place):
                return
            command = place.member._commands.get()
            assert command is not None
            self._act(place, functools.partial(place.member.run, command))
            if who.startswith("worker"):
                self._train(who, self.disorder.random.randint(0, 3) if self.seeded else 2)
            most = most and most - 1

    def _train(self, who: str, times: int) -> None:
        for _ in range(times):
            place = self.places[who]
            if place.process is not None and self._is_free(place):
                self._act(place, place.process.turn)

    def _in_some_order(self) -> list[str]:
        """The workers; where it is drawn some wait longer."""
        workers = [str(key) for key in self.facts.workers]
        if self.seeded and len(workers) > 1:
            workers = self.disorder.random.sample(workers, self.disorder.random.randint(1, len(workers)))
        return workers

    def _is_free(self, place: Place) -> bool:
        """What it was in the middle of has gone on, and is done."""
        if place.actor.busy:
            place.actor.go_on()
        return not place.actor.busy and place.process is not None

    def _act(self, place: Place, act: Callable[[], object]) -> None:
        if self.facts.num_workers > 1:
            place.actor.do(act)
        else:
            self._guard(act)

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
            out |= {id_: row.pushes for (t, id_), row in self.places[f"shard {index}"].process.rows.items() if t == table}
        return out

    def bits(self) -> dict[str, bytes]:
        """Every parameter and optimizer state, dense and sparse."""
        out = {name: value.tobytes() for name, value in self.worker.loop.snapshot().shared.items()}
        for index in range(len(self.disks)):
            out |= self.places[f"shard {index}"].process.bits()
        return out
