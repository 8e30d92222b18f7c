"""The whole commit in one thread: controller, worker and shards over in-memory transports, a clock that is moved, and deaths
at named moments.

A moment is `(who, what, when)`: a member executing a command, the controller doing an effect, or the worker between the
pushes of one batch. `kill_at` names the moment, which of its occurrences, and who dies there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from param_server.blobs import MemoryBlobs
from param_server.client import Client
from roo.decode import Decoder
from roo.errors import FencedError, RoostreamError, TransportError
from roo.wire import Record
from runtime import manifest as manifests
from runtime.clock import FakeClock
from runtime.kafka.record_reader import MemoryReader
from runtime.kafka.topics import Partition
from runtime.manifest import Manifest
from runtime.member import refusal_of
from runtime.transport import Arrays, Header
from tests.trainer import samples
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.loops import MemoryOutputs
from tests.trainer.memory_store import MemoryStore
from tests.trainer.real_shard import RealShard
from trainer.config import LoopConfig
from trainer.controller import Controller
from trainer.coordinator import Coordinator
from trainer.identity import Identity
from trainer.loop import TrainLoop, Wiring
from trainer.protocol import Claim, Effect, Facts, Link, State
from trainer.record_batches import RecordBatches
from trainer.rows import ShardRows
from trainer.worker import Worker

CONTROLLER, WORKER = "controller", "worker 0"
PARTITIONS = (("samples", 0), ("samples", 1))
KAFKA = {"cluster_id": "c", "topics": {"samples": "1"}}


class Killed(Exception):
    """Unwinds the process that died."""


@dataclasses.dataclass(frozen=True)
class Kill:
    moment: tuple[str, str, str]
    victim: str
    occurrence: int = 1


class Wire:
    """A transport to whichever process is behind a place now."""

    def __init__(self, find: Callable[[], FakeShard | RealShard | None]) -> None:
        self.find = find

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        shard = self.find()
        if shard is None:
            raise TransportError(f"{method}: connection refused")
        return shard.handle(method, dict(header), [np.array(a) for a in arrays])

    def close(self) -> None: ...


class TrickleReader(MemoryReader):
    """Three records a poll, so that cuts find records that were polled and not yet trained. Partitions that aren't this
    worker's are passed over."""

    def append(self, records: Iterable[Record]) -> None:
        super().append(record for record in records if (record.topic, record.partition) in self.partitions)

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        return super().poll(min(max_records, 3), timeout_s, partition)


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
    """A member's place: its process (None = dead), and what Member keeps for it."""

    process: Any = None
    session: int = 0
    incarnation: int = 0
    done: set[int] = dataclasses.field(default_factory=set)
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
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
    ) -> None:
        self.real_shards = real_shards
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
        self.clock, self.store = FakeClock(), MemoryStore()
        self.disks: list[Any] = [MemoryBlobs() if real_shards else {} for _ in range(num_shards)]
        self.places = {str(key): Place() for key in (*self.facts.shards, *self.facts.workers)}
        self.controller: WatchedController | None = None
        self.controller_dead_rounds = 0
        self.moments: Counter[tuple[str, str, str]] = Counter()
        self.killed: list[str] = []
        self.outputs = MemoryOutputs()

    # Processes

    def start(self, who: str) -> None:
        if who == CONTROLLER:
            coordinator = Coordinator(self.facts, self.clock.monotonic_s())
            self.controller = WatchedController(coordinator, self.store, self.clock, hold_s=0)
            self.controller.moment = self.moment
            return
        place = self.places[who]
        self.places[who] = Place(session=place.session + 1)
        self.places[who].process = self._process(*who.split())

    def kill(self, who: str) -> None:
        self.killed.append(who)
        if who == CONTROLLER:
            self.controller, self.controller_dead_rounds = None, 0
        else:
            self.places[who].process, self.places[who].dead_rounds = None, 0

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
        return FakeShard(index, samples.schema(), self.store, self.disks[index])

    def _process(self, role: str, index: str) -> Any:
        return self._worker(int(index)) if role == "worker" else self._shard(int(index))

    def _rows(self, worker: int) -> FakeRows | Client:
        shards = [Wire(lambda i=i: self.places[f"shard {i}"].process) for i in range(len(self.disks))]
        if self.real_shards:
            return Client(samples.schema(), shards, worker=worker, resend_for_s=0.2, clock=self.clock)
        rows = FakeRows(samples.schema(), shards, worker)
        rows.before_push = lambda: self.moment(f"worker {worker}", "push", "before")
        return rows

    def _worker(self, index: int) -> Worker:
        """Of every n-th partition, where there are n workers."""
        mine = PARTITIONS[index :: self.facts.num_workers]
        decoder = Decoder(samples.schema(), {}.get)
        wiring = Wiring(
            source=RecordBatches(TrickleReader(mine, self.records), decoder, self.clock, max_wait_ms=500),
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
        return Worker(loop, self.outputs, self.store, identity, index)

    # Time

    def round(self) -> None:
        """A quarter of a second: the dead come back, everyone beats, the controller acts, the worker trains once or twice."""
        self.clock.advance(0.25)
        self._revive()
        for who in self.places:
            self._guard(lambda who=who: self._beat(who))
        if self.controller is not None:
            self._guard(self._control)
        for key in self.facts.workers:
            for _ in range(3):
                if (worker := self.places[str(key)].process) is not None:
                    self._guard(worker.turn)

    def run(self, most_rounds: int = 400) -> Simulation:
        for _ in range(most_rounds):
            self.round()
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
        assert self.controller is not None
        try:
            self.controller.turn()
        except FencedError:
            self.kill(CONTROLLER)

    def _beat(self, who: str) -> None:
        """What runtime.member does, in one thread: report results, take commands, do each once."""
        place = self.places[who]
        if place.process is None or self.controller is None:
            return
        role, index = who.split()
        report = place.process.report() if role == "worker" else {}
        header = {"role": role, "index": int(index), "session": place.session, "incarnation": place.incarnation}
        try:
            answer, _ = self.controller.handle("beat", {**header, "results": place.results, "report": report}, ())
        except FencedError:
            return
        place.results = []
        for command in answer["commands"]:
            if place.process is None:
                return
            if command["id"] not in place.done:
                self.moment(who, command["kind"], "before")
                result = self._execute(place.process, command)
                place.done.add(command["id"])
                if command["kind"] == "restore" and result["ok"]:
                    place.incarnation = command["incarnation"]
                place.results.append({"id": command["id"], **result})
                self.moment(who, command["kind"], "after")

    def _execute(self, process: Any, command: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, **process.execute(command)}
        except RoostreamError as error:
            return refusal_of(error)

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
