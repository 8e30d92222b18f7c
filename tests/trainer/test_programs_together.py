"""Controller, shards and workers in threads of one process, connected by sockets and assembled as the
programs assemble them. Only Kafka is in memory."""

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
from tests.trainer.control.test_coordinator import CONFIG
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


class ShiftedClock(SystemClock):
    """The system clock plus `ahead_s`."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


class RunningWorker(NamedTuple):
    monitor: Monitor
    stop: Stop
    thread: threading.Thread
    clock: ShiftedClock  # of its controller agent
    end: Callable[[], None]
    health: Health
    agent: ControllerAgent


class NonFiniteLoop(TrainLoop):
    """A loop whose model has non-finite weights after each restore."""

    def _build(self) -> None:
        super()._build()
        with torch.no_grad():
            next(iter(self.model.parameters())).fill_(math.nan)


class MemoryBacklogProbe:
    """A `BacklogProbe` for an in-memory consumer."""

    def __init__(self, source: MemoryConsumer) -> None:
        self.source = source

    def count(self, committed: Progress) -> Backlog | None:
        ends = self.source.end_offsets()
        return Backlog(sum(end - committed.get(p, 0) for p, end in ends.items()), ends)


class InProcessStack:
    """All programs in one process, each in its own threads. `stop_all` ends them."""

    def __init__(self, folder: Path) -> None:
        self.store, self.clock = FileStore(folder), SystemClock()
        create_store(self.store)
        schema = f"{samples.schema().fingerprint:016x}"
        config = dataclasses.replace(
            CONFIG, schema=schema, kafka=samples.KAFKA, commit_interval_s=0.1, holds_idle=True
        )
        self.controller = Controller(Coordinator(config, self.clock.monotonic_s()), self.store, self.clock)
        self.server = RpcServer(self.controller.handle).start()
        self.stops: list[Callable[[], object]] = []
        self.disks = [MemoryKeyValueStore(), MemoryKeyValueStore()]
        self.ports = [0, 0]
        self.kills: list[Callable[[], None]] = []  # one function per shard that kills it
        self.failures: queue.Queue[Exception] = queue.Queue()
        self.stop = stop = Stop()
        self.control = self._thread(lambda: self.controller.run(stop, closing_s=LONG_S))
        self.stops += [stop.set, self.server.stop]

    def shard(self, index: int) -> Callable[[], None]:
        """Start a shard. Returns a function that kills it."""
        killed = threading.Event()
        shard = RealShard(index, 2, self.store, self.clock, self.disks[index], samples.schema())  # type: ignore[arg-type]
        server = RpcServer(shard.handle, port=self.ports[index]).start()
        self.ports[index] = server.port
        agent = ControllerAgent(
            lambda: SocketTransport(self.server.address), "shard", index, shard.execute, dict, killed
        ).start()

        def kill() -> None:
            killed.set()
            agent.join()
            server.stop()

        self.stops.append(kill)
        return kill

    def worker(
        self,
        source: MemoryConsumer,
        staleness: int = 0,
        *,
        home: Path | None = None,
        non_finite: bool = False,
        index: int = 0,
        waits_for_release: bool = False,
    ) -> RunningWorker:
        """Start a worker. `non_finite`: its weights are not finite after each restore. `waits_for_release`:
        it waits for the end of a hold instead of ending."""
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
        loop = (NonFiniteLoop if non_finite else TrainLoop)(
            settings, samples.schema(), samples.MODEL, dependencies
        )
        worker = Worker(loop, outputs, self.store, identity, index)
        monitor = Monitor(worker, self.clock, CaughtUpLimits(lag_ms=5000))
        stop, stop_agent, clock = Stop(), threading.Event(), ShiftedClock()
        connect, budget = lambda: SocketTransport(self.server.address), StopBudget(stop, LONG_S)
        agent = ControllerAgent(
            connect,
            "worker",
            index,
            worker.submit,
            monitor.report,
            stop_agent,
            clock=clock,
            stop_budget=budget,
        )
        agent.start()
        health = Health(LONG_S)

        def run() -> None:
            try:
                train(worker, monitor, agent, health, budget, LONG_S)
            except HeldError as held:
                if not waits_for_release:
                    raise
                wait_for_release(held, agent, health, stop)

        thread = self._thread(run)

        def end() -> None:
            stop.set()
            thread.join(20)
            stop_agent.set()
            worker.close()
            agent.join()
            worker.loop.feed.close()
            batches.close()
            client.close()
            for transport in shards:
                transport.close()

        self.stops.append(end)
        return RunningWorker(monitor, stop, thread, clock, end, health, agent)

    def watch_idleness(self, source: MemoryConsumer) -> None:
        """Put training on a transient hold when `source` has had nothing to read for 0.2 s."""
        rule = IdleRule(hold_s=0.2, min_records=100, max_wait_s=0.2, min_held_s=0.2)
        watch = IdleHoldWatcher(self.controller, MemoryBacklogProbe(source), IdleDetector(rule), self.clock)  # type: ignore[arg-type]

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
        """Call the controller, and return its answer."""
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
def stack(tmp_path: Path) -> Iterator[InProcessStack]:
    running = InProcessStack(tmp_path)
    running.kills = [running.shard(index) for index in (0, 1)]
    yield running
    running.stop_all()


def test_g3_training_resumes_by_itself_after_a_shard_was_killed(stack: InProcessStack) -> None:
    source = MemoryConsumer(PARTITIONS, samples.records(list(range(1, 21))))
    monitor = stack.worker(source, staleness=1).monitor
    stack.wait_for(lambda: stack.committed(20))
    stack.kills[0]()
    stack.shard(0)
    source.append(samples.records(list(range(1, 41)))[20:])
    stack.wait_for(lambda: stack.committed(40))
    last = manifests.newest(stack.store)
    assert last is not None and last.manifest.workers[0].metrics["requests"] == 40
    assert last.manifest.workers[0].dedupe == 40
    assert stack.controller.status()["incarnation"] >= 2
    stack.wait_for(lambda: monitor.progress.overall.state is TrainingState.CAUGHT_UP)
    shown = {family.name: family for family in MetricsCollector(monitor.metrics, WORKER).collect()}
    assert shown["roostream_worker_lag_records"].samples[0].value == 0
    states = {s.labels["state"]: s.value for s in shown["roostream_worker_state"].samples}
    assert states["caught_up"] == 1 and sum(states.values()) == 1


@pytest.mark.parametrize("role", ["worker", "controller"])
def test_a_preempted_job_exits_after_the_commit(stack: InProcessStack, role: str) -> None:
    trainer = stack.worker(eight_samples())
    stack.wait_for(lambda: trainer.monitor.worker.loop.num_steps >= 1)
    answer = stack.call("preempt", role=role, index=0, notice_s=LONG_S)
    assert answer["committed"] is True
    last, loop = manifests.newest(stack.store), trainer.monitor.worker.loop
    assert last is not None and (last.manifest.seq, last.manifest.step) == (answer["seq"], loop.num_steps)
    ended = trainer.thread if role == "worker" else stack.control
    ended.join(LONG_S)
    assert not ended.is_alive() and stack.failures.empty()
    assert stack.controller.coordinator.num_rollbacks == 0


def test_a_pausing_stream_holds_training_until_the_next_record(stack: InProcessStack) -> None:
    source = eight_samples()
    first = stack.worker(source)
    stack.wait_for(lambda: stack.committed(8))
    stack.watch_idleness(source)
    first.thread.join(LONG_S)
    failure = stack.failures.get(timeout=LONG_S)
    assert isinstance(failure, HeldError) and "nothing to read for 0.2 s; it ends by itself" in str(failure)
    assert first.monitor.progress.overall.state is TrainingState.HELD
    status = stack.controller.status()
    assert status["holds"][0]["kind"] == "transient" and status["state"] == "held"
    assert status["rollbacks"] == 0
    first.end()
    stack.stops.remove(first.end)
    source.append(samples.records(list(range(1, 10)))[8:])
    stack.wait_for(lambda: stack.controller.status()["holds"] == [])
    stack.worker(source)
    stack.wait_for(lambda: stack.committed(9))
    last = manifests.newest(stack.store)
    assert last is not None and last.manifest.workers[0].metrics["requests"] == 9, (
        "each of the nine samples must be trained once"
    )
    assert stack.controller.status()["device_s"]["transient_hold"] > 0


def test_persistent_non_finite_numbers_hold_training_and_name_the_batch(
    stack: InProcessStack, tmp_path: Path
) -> None:
    trainer = stack.worker(eight_samples(), home=tmp_path / "worker", non_finite=True)
    trainer.thread.join(LONG_S)
    assert isinstance(stack.failures.get(timeout=LONG_S), HeldError)
    (hold,) = stack.controller.status()["holds"]
    found = re.search(r"dense weights.* 3 times .*`roostream inspect batch (\S+)` shows", hold["reason"])
    assert hold["kind"] == "permanent" and hold["member"] == "worker 0" and found, hold
    description = describe_batch(decode(Path(found[1]).read_bytes(), found[1]))
    assert description["requests"] == 4 and description["findings"][0].startswith("dense weight ")
    assert manifests.newest(stack.store) is None


def test_a_worker_on_standby_is_ready(stack: InProcessStack) -> None:
    """If it were not ready, its pod would block the roll-out of its StatefulSet."""
    source = eight_samples()
    spare = stack.worker(source, index=1)
    stack.wait_for(lambda: not spare.health.unready())
    assert not spare.monitor.worker.incarnation
    needed = stack.worker(source)
    stack.wait_for(lambda: stack.committed(8) and not needed.health.unready())
    assert needed.monitor.worker.incarnation and not spare.monitor.worker.incarnation


def test_a_worker_may_wait_for_the_end_of_a_hold(stack: InProcessStack) -> None:
    trainer = stack.worker(eight_samples(), non_finite=True, waits_for_release=True)
    stack.wait_for(lambda: stack.controller.status()["state"] == "held" and trainer.agent.hold)
    stack.wait_for(lambda: not trainer.health.unready())  # so that a roll-out with the repair can continue
    assert trainer.thread.is_alive()
    stack.call("release")
    trainer.thread.join(LONG_S)
    failure = stack.failures.get(timeout=LONG_S)
    assert isinstance(failure, UnavailableError) and "the hold is over" in str(failure)


def test_a_worker_without_a_controller_stops(stack: InProcessStack) -> None:
    trainer = stack.worker(eight_samples())
    worker = trainer.monitor.worker
    stack.wait_for(lambda: stack.committed(8) and worker.training and not worker.is_cut)
    stack.server.stop()

    def advance_clock() -> bool:
        """Move the clock until the worker gives up. One call may not suffice, because an answer may still
        arrive."""
        trainer.clock.ahead_s += 2 * LONG_S
        return not stack.failures.empty()

    stack.wait_for(advance_clock)
    failure = stack.failures.get(timeout=LONG_S)
    assert isinstance(failure, UnavailableError) and "the controller has not answered for" in str(failure)
