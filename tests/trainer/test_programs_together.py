"""Controller, shards and worker over sockets and threads, as their programs put them together; only Kafka is
in memory."""

from __future__ import annotations

import dataclasses
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from param_server.client import Client
from param_server.key_value_store import MemoryKeyValueStore
from roostream.cli.inspect_batch import describe_batch
from roostream.errors import HeldError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.health import Health
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import Progress
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.program import Stop
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header
from roostream.runtime.store_identity import create_store
from roostream.runtime.thread_group import StopBudget
from roostream.wire.decode import Decoder
from tests.trainer import samples
from tests.trainer.control.test_coordinator import FACTS
from tests.trainer.loops import PARTITIONS, MemoryOutputs
from tests.trainer.real_shard import RealShard
from trainer.config import LoopConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.idle import Backlog, IdleDetector, IdleHoldWatcher, IdleRule
from trainer.feed import connect_feed
from trainer.loop import LoopDependencies, TrainLoop
from trainer.metrics import WORKER
from trainer.monitoring.caught_up import CaughtUpLimits, TrainingState
from trainer.pipeline.stage_timer import StageTimer
from trainer.record_source import RecordSource
from trainer.rows import ShardRows
from trainer.saved_batch import SavedBatches, decode
from trainer.worker import Worker
from trainer.worker_monitor import Monitor
from trainer.worker_program import train, wait_for_release

LONG_S = 60.0


class Ahead(SystemClock):
    """The system's clock, put forward by `ahead_s`."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


class Trainer(NamedTuple):
    monitor: Monitor
    stop: Stop
    thread: threading.Thread
    clock: Ahead  # of its member
    end: Callable[[], None]
    health: Health
    agent: ControllerAgent


class SpoiltLoop(TrainLoop):
    """Numbers of it are never finite."""

    def _build(self) -> None:
        super()._build()
        with torch.no_grad():
            next(iter(self.model.parameters())).fill_(math.nan)


class MemoryLookout:
    """A `BacklogProbe` of a memory consumer."""

    def __init__(self, source: MemoryConsumer) -> None:
        self.source = source

    def count(self, committed: Progress) -> Backlog | None:
        ends = self.source.end_offsets()
        return Backlog(sum(end - committed.get(p, 0) for p, end in ends.items()), ends)


class Together:
    """Everything in one process, each program in its threads; `stop_all` ends them."""

    def __init__(self, folder: Path) -> None:
        self.store, self.clock = FileStore(folder), SystemClock()
        create_store(self.store)
        schema = f"{samples.schema().fingerprint:016x}"
        facts = dataclasses.replace(
            FACTS, schema=schema, kafka=samples.KAFKA, commit_interval_s=0.1, holds_idle=True
        )
        self.controller = Controller(Coordinator(facts, self.clock.monotonic_s()), self.store, self.clock)
        self.server = RpcServer(self.controller.handle).start()
        self.stops: list[Callable[[], object]] = []
        self.disks = [MemoryKeyValueStore(), MemoryKeyValueStore()]
        self.ports = [0, 0]
        self.kills: list[Callable[[], None]] = []  # of the shards
        self.failures: queue.Queue[Exception] = queue.Queue()
        self.stop = stop = Stop()
        self.control = self._thread(lambda: self.controller.run(stop, closing_s=LONG_S))
        self.stops += [stop.set, self.server.stop]

    def shard(self, index: int) -> Callable[[], None]:
        """Start it; what is returned kills it."""
        gone = threading.Event()
        shard = RealShard(index, 2, self.store, self.clock, self.disks[index], samples.schema())  # type: ignore[arg-type]
        server = RpcServer(shard.handle, port=self.ports[index]).start()
        self.ports[index] = server.port
        member = ControllerAgent(
            lambda: SocketTransport(self.server.address), "shard", index, shard.execute, dict, gone
        ).start()

        def kill() -> None:
            gone.set()
            member.join()
            server.stop()

        self.stops.append(kill)
        return kill

    def worker(
        self,
        source: MemoryConsumer,
        staleness: int = 0,
        *,
        home: Path | None = None,
        spoilt: bool = False,
        index: int = 0,
        waits: bool = False,
    ) -> Trainer:
        """`spoilt`: its weights are not finite after each restore. `waits`: for the end of a hold."""
        shards = [SocketTransport(f"127.0.0.1:{port}") for port in self.ports]
        client = Client(samples.schema(), shards, worker=index, resend_for_s=0.5)
        settings = LoopConfig(batch_requests=4)
        decoder = Decoder(samples.schema(), {}.get)
        outputs = MemoryOutputs()
        stages = StageTimer(self.clock)
        batches, rows, feed = connect_feed(
            lambda: RecordSource(source, decoder, self.clock, max_wait_ms=50, stages=stages),
            ShardRows(client),
            stages,
            staleness=staleness,
            read_ahead=2,
        )
        parts: dict[str, Any] = {"source": batches, "rows": rows, "feed": feed, "outputs": outputs}
        saved = SavedBatches(home) if home else None
        dependencies = LoopDependencies(**parts, clock=self.clock, stages=stages, saved=saved)
        identity = samples.identity(num_shards=2)
        loop = (SpoiltLoop if spoilt else TrainLoop)(settings, samples.schema(), samples.MODEL, dependencies)
        worker = Worker(loop, outputs, self.store, identity, index)
        monitor = Monitor(worker, self.clock, CaughtUpLimits(lag_ms=5000))
        stop, left, clock = Stop(), threading.Event(), Ahead()
        dial, ending = lambda: SocketTransport(self.server.address), StopBudget(stop, LONG_S)
        member = ControllerAgent(
            dial, "worker", index, worker.submit, monitor.report, left, clock=clock, stop_budget=ending
        )
        member.start()
        health = Health(LONG_S)

        def run() -> None:
            try:
                train(worker, monitor, member, health, ending, LONG_S)
            except HeldError as held:
                if not waits:
                    raise
                wait_for_release(held, member, health, stop)

        thread = self._thread(run)

        def end() -> None:
            stop.set()
            thread.join(20)
            left.set()
            worker.close()
            member.join()
            worker.loop.feed.close()
            batches.close()
            client.close()
            for transport in shards:
                transport.close()

        self.stops.append(end)
        return Trainer(monitor, stop, thread, clock, end, health, member)

    def watch_idleness(self, source: MemoryConsumer) -> None:
        """Release the workers when `source` has had nothing to read for a moment."""
        rule = IdleRule(hold_s=0.2, min_records=100, max_wait_s=0.2, min_held_s=0.2)
        watch = IdleHoldWatcher(self.controller, MemoryLookout(source), IdleDetector(rule), self.clock)  # type: ignore[arg-type]

        def look() -> None:
            while not self.stop.wait(0.05):
                watch.check()

        self._thread(look)

    def wait_for(self, what: Callable[[], object], limit_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < deadline_s, self.controller.status()
            assert self.failures.empty(), self.failures.get()
            time.sleep(0.02)

    def call(self, method: str, **header: Any) -> Header:
        """What the controller answers."""
        transport = SocketTransport(self.server.address)
        answer, _ = transport.call(method, header, timeout_s=2 * LONG_S)
        transport.close()
        return answer

    def committed(self, num_records: int) -> bool:
        last = manifests.newest(self.store)
        return last is not None and sum(last.manifest.offsets.values()) == num_records

    def stop_all(self) -> None:
        for stop in reversed(self.stops):
            stop()

    def _thread(self, body: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except Exception as error:
                self.failures.put(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def eight_samples() -> MemoryConsumer:
    return MemoryConsumer(PARTITIONS, samples.records(list(range(1, 9))))


@pytest.fixture
def together(tmp_path: Path) -> Iterator[Together]:
    stage = Together(tmp_path)
    stage.kills = [stage.shard(index) for index in (0, 1)]
    yield stage
    stage.stop_all()


def test_g3_training_resumes_by_itself_after_a_shard_was_killed(together: Together) -> None:
    source = MemoryConsumer(PARTITIONS, samples.records(list(range(1, 21))))
    monitor = together.worker(source, staleness=1).monitor
    together.wait_for(lambda: together.committed(20))
    together.kills[0]()
    together.shard(0)
    source.append(samples.records(list(range(1, 41)))[20:])
    together.wait_for(lambda: together.committed(40))
    last = manifests.newest(together.store)
    assert last is not None and last.manifest.workers[0].metrics["requests"] == 40
    assert last.manifest.workers[0].dedupe == 40
    assert together.controller.status()["incarnation"] >= 2
    together.wait_for(lambda: monitor.progress.overall.state is TrainingState.CAUGHT_UP)
    shown = {family.name: family for family in MetricsCollector(monitor.metrics, WORKER).collect()}
    assert shown["roostream_worker_lag_records"].samples[0].value == 0
    states = {s.labels["state"]: s.value for s in shown["roostream_worker_state"].samples}
    assert states["caught_up"] == 1 and sum(states.values()) == 1


@pytest.mark.parametrize("role", ["worker", "controller"])
def test_a_preempted_job_exits_after_the_commit(together: Together, role: str) -> None:
    trainer = together.worker(eight_samples())
    together.wait_for(lambda: trainer.monitor.worker.loop.num_steps >= 1)
    answer = together.call("preempt", role=role, index=0, notice_s=LONG_S)
    assert answer["committed"] is True
    last, loop = manifests.newest(together.store), trainer.monitor.worker.loop
    assert last is not None and (last.manifest.seq, last.manifest.step) == (answer["seq"], loop.num_steps)
    ended = trainer.thread if role == "worker" else together.control
    ended.join(LONG_S)
    assert not ended.is_alive() and together.failures.empty()
    assert together.controller.coordinator.num_rollbacks == 0


def test_a_pausing_stream_holds_training_until_the_next_record(together: Together) -> None:
    source = eight_samples()
    first = together.worker(source)
    together.wait_for(lambda: together.committed(8))
    together.watch_idleness(source)
    first.thread.join(LONG_S)
    failure = together.failures.get(timeout=LONG_S)
    assert isinstance(failure, HeldError) and "nothing to read for 0.2 s; it ends by itself" in str(failure)
    assert first.monitor.progress.overall.state is TrainingState.HELD
    status = together.controller.status()
    assert status["holds"][0]["kind"] == "transient" and status["state"] == "held"
    assert status["rollbacks"] == 0
    first.end()
    together.stops.remove(first.end)
    source.append(samples.records(list(range(1, 10)))[8:])
    together.wait_for(lambda: together.controller.status()["holds"] == [])
    together.worker(source)
    together.wait_for(lambda: together.committed(9))
    last = manifests.newest(together.store)
    assert last is not None and last.manifest.workers[0].metrics["requests"] == 9, (
        "nothing was lost, nothing came twice"
    )
    assert together.controller.status()["device_s"]["transient_hold"] > 0


def test_persistent_non_finite_numbers_hold_training_and_name_the_batch(
    together: Together, tmp_path: Path
) -> None:
    trainer = together.worker(eight_samples(), home=tmp_path / "worker", spoilt=True)
    trainer.thread.join(LONG_S)
    assert isinstance(together.failures.get(timeout=LONG_S), HeldError)
    (hold,) = together.controller.status()["holds"]
    found = re.search(r"dense weights.* 3 times .*`roostream inspect batch (\S+)` shows", hold["reason"])
    assert hold["kind"] == "permanent" and hold["member"] == "worker 0" and found, hold
    told = describe_batch(decode(Path(found[1]).read_bytes(), found[1]))
    assert told["requests"] == 4 and told["findings"][0].startswith("dense weight ")
    assert manifests.newest(together.store) is None


def test_a_worker_on_standby_is_ready(together: Together) -> None:
    """Otherwise its pod would block the roll-out of the set that it belongs to."""
    source = eight_samples()
    spare = together.worker(source, index=1)
    together.wait_for(lambda: not spare.health.unready())
    assert not spare.monitor.worker.incarnation
    needed = together.worker(source)
    together.wait_for(lambda: together.committed(8) and not needed.health.unready())
    assert needed.monitor.worker.incarnation and not spare.monitor.worker.incarnation


def test_a_worker_may_wait_for_the_end_of_a_hold(together: Together) -> None:
    trainer = together.worker(eight_samples(), spoilt=True, waits=True)
    together.wait_for(lambda: together.controller.status()["state"] == "held" and trainer.agent.hold)
    together.wait_for(lambda: not trainer.health.unready())  # a roll-out that repairs the cause goes on
    assert trainer.thread.is_alive()
    together.call("release")
    trainer.thread.join(LONG_S)
    failure = together.failures.get(timeout=LONG_S)
    assert isinstance(failure, UnavailableError) and "the hold is over" in str(failure)


def test_a_worker_without_a_controller_stops(together: Together) -> None:
    trainer = together.worker(eight_samples())
    worker = trainer.monitor.worker
    together.wait_for(lambda: together.committed(8) and worker.training and not worker.is_cut)
    together.server.stop()

    def long_after() -> bool:
        """Again and again, since an answer may still be on its way."""
        trainer.clock.ahead_s += 2 * LONG_S
        return not together.failures.empty()

    together.wait_for(long_after)
    failure = together.failures.get(timeout=LONG_S)
    assert isinstance(failure, UnavailableError) and "the controller has not answered for" in str(failure)
