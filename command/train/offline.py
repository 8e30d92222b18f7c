"""Training from the warehouse in one process: the controller, the shards and the worker that a stack has, called directly.

What is committed is what a stack commits, so a stack can go on with it (`roostream up`), and a killed run goes on at its last
commit. There is no Kafka: nothing is published or predicted, and the model has no place in any stream yet, as one that
`roostream checkpoint import` brought.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command.train.config import TrainConfig
from command.train.offline_readers import OfflineReaders
from infra.home import Home
from models.build import load_model_config
from param_server.blobs import RocksBlobs
from param_server.calls import Calls
from param_server.client import Client
from param_server.config import ShardConfig
from param_server.main import build_shard
from param_server.server import Shard
from roo import roo_pb2 as pb
from roo.decode import Decoder
from roo.errors import ConfigError, UnavailableError
from roo.schema import Schema
from roo.schema_file import load_schema
from roo.schema_registry import open_registry, register
from runtime import manifest as manifests
from runtime.checkpoint_store import CheckpointStore, open_store
from runtime.clock import SystemClock
from runtime.kafka.record_reader import MemoryReader
from runtime.kafka.topics import SAMPLES, all_partitions
from runtime.member import Member
from runtime.program import Stop
from runtime.transport import InMemoryTransport
from runtime.work_unit import TableInput
from trainer.config import LoopConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.protocol import Facts
from trainer.device.numerics import set_numerics
from trainer.identity import Identity
from trainer.loop import TrainLoop, Wiring
from trainer.pipeline.pipelined_feed import connected
from trainer.pipeline.stages import Stages
from trainer.predictions import Prediction
from trainer.record_batches import RecordBatches
from trainer.rows import ShardRows
from trainer.sessions.phased_source import PhasedSource
from trainer.sessions.table_source import local_rows, open_session
from trainer.worker import Worker
from warehouse.readers.config import ReadersConfig
from warehouse.readers.remote_rows import ReadByPrograms
from warehouse.readers.table_session import SampleTable

_READ_AHEAD = 2
_UNIT_ROWS = 1 << 20  # of each partition between two ends of an epoch, for which nobody has anything in hand
_TELL_S = 2.0
_SETTLE_S = 3.0
_NOWHERE = "127.0.0.1:1"  # nobody dials
_HELD_MS = 7 * 86_400_000

Tell = Callable[[int, int, float], None]
"""(rows trained, of so many, rows a second)"""


class NoOutputs:
    """See `SafeOutputs`: nobody is told of predictions; dead letters are counted by the loop."""

    def begin(self) -> None: ...

    def refused(self) -> str:
        return ""

    def flush(self) -> None: ...

    def interrupt(self) -> None: ...

    def prediction(self, prediction: Prediction) -> None: ...

    def dead_letter(self, letter: pb.DeadLetter) -> None: ...


def train_offline(
    config: TrainConfig, settings: LoopConfig, stop: Stop, tell: Tell = lambda done, rows, rate: None
) -> dict[str, Any]:
    """Until all is trained and committed; what was trained, how fast and how well.

    Raises:
        RoostreamError: the warehouse, the home or a setting can't be used. UnavailableError: `stop` was set; what is committed
            stays, and the same call goes on from there.
    """
    home = Home(Path(config.home))
    home.make()
    home.lock()
    try:
        return _Offline(config, settings, home).run(stop, tell)
    finally:
        home.unlock()


class _Offline:
    """The parts, wired."""

    def __init__(self, config: TrainConfig, settings: LoopConfig, home: Home) -> None:
        self.config, self.settings, self.home, self.clock = config, settings, home, SystemClock()
        self.schema: Schema = load_schema(Path(config.schema))
        self.store: CheckpointStore = open_store(str(home.store))
        register(self.store, self.schema)
        self.table = SampleTable(config.place)
        self.session = self._session()
        self._read_by: ReadByPrograms | None = None
        self.identity = Identity(
            schema=self.schema,
            registry=open_registry(self.store),
            kafka={},
            num_shards=config.num_shards,
            num_buckets=64,
            num_partitions=config.partitions,
            seed=config.seed,
        )

    def _session(self) -> TableInput:
        """What is to be trained: as it was fixed where training was interrupted.

        Raises:
            ConfigError: the home has another model, or the warehouse nothing of these days.
        """
        last = manifests.newest(self.store)
        found = last.manifest.input if last else self.table.newest(self.config.session, {})
        if last is not None and found is None:
            raise ConfigError(f"{self.home.root} has a model that is trained; give another --home, or go on with `roostream up`")
        if found is None or not sum(found.rows.values()):
            raise ConfigError(f"{self.config.place}: expected samples of {self.config.days or 'some day'}, got none")
        wanted = {**self.config.session.plain(), "version": found.version}
        if found.spec != wanted:
            raise ConfigError(
                f"{self.home.root} has training that was interrupted of {found.spec['first_day'] or 'the first day'}.."
                f"{found.spec['last_day'] or 'the last'} of {found.table}; give the same settings again, or another --home"
            )
        if (most := max(found.rows)) >= self.config.partitions:
            raise ConfigError(f"expected partitions = {most + 1} or more, got {self.config.partitions}: the archive has as many")
        self.table.hold(found, f"train-{found.digest}", self.clock.now_ms() + _HELD_MS)
        return found

    def run(self, stop: Stop, tell: Tell) -> dict[str, Any]:
        began_s, ended = time.monotonic(), threading.Event()
        with contextlib.ExitStack() as opened:
            controller = self._controller()
            readers = self._readers(controller, opened)
            shards = [self._shard(index, opened) for index in range(self.config.num_shards)]
            worker = self._worker(shards, readers, opened)
            failed = self._start(controller, shards, worker, ended, opened)
            self._train(controller, worker, stop, failed, tell)
            rows, wall_s = sum(self.session.rows.values()), time.monotonic() - began_s
            counts = dataclasses.asdict(worker.loop.counts)
            reading = self._read_by.shown() if self._read_by else {}
        last = manifests.newest(self.store)
        assert last is not None
        metrics = next(iter(last.manifest.workers.values())).metrics
        seen = {"table": self.session.table, "version": self.session.version, "rows": rows, "days": self.config.days}
        return {**seen, "wall_s": wall_s, "requests_s": counts["requests"] / wall_s, "steps": last.manifest.step, **counts} | {
            "version_of_model": last.manifest.version,
            "metrics": metrics,
            **({"reading": reading} if reading else {}),
        }

    def _controller(self) -> Controller:
        facts = Facts(
            schema=f"{self.schema.fingerprint:016x}",
            seed=self.config.seed,
            num_shards=self.config.num_shards,
            from_table=True,
            unit_records=_UNIT_ROWS,
            num_buckets=self.identity.num_buckets,
            num_partitions=self.config.partitions,
            kafka={},
            commit_interval_s=self.config.commit_interval_ms / 1000,
        )
        coordinator = Coordinator(facts, self.clock.monotonic_s())
        return Controller(
            coordinator, self.store, self.clock, check=self.identity.check, open_session=lambda: self.session, hold_s=0.1
        )

    def _readers(self, controller: Controller, opened: contextlib.ExitStack) -> OfflineReaders | None:
        if not self.config.reads_by_programs:
            return None
        readers = OfflineReaders(self.config, self.home, controller, self.schema, self.clock).open()
        opened.callback(readers.close)
        return readers

    def _shard(self, index: int, opened: contextlib.ExitStack) -> Shard:
        home = self.home.root / f"shard-{index}"
        blobs = RocksBlobs(home / "segments")
        config = ShardConfig(
            schema=self.config.schema,
            store=str(self.home.store),
            controller=_NOWHERE,
            home=str(home),
            index=index,
            num_shards=self.config.num_shards,
            seed=self.config.seed,
            partitions=self.config.partitions,
        )
        shard = build_shard(config, blobs)
        blobs.open()
        opened.callback(blobs.close)
        opened.callback(shard.leave)
        return shard

    def _worker(self, shards: list[Shard], readers: OfflineReaders | None, opened: contextlib.ExitStack) -> Worker:
        set_numerics(self.settings)
        self._read_by = readers.reading(ReadersConfig(by="programs"), lambda: worker.incarnation) if readers else None
        stages = Stages(self.clock)
        client = Client(self.schema, [InMemoryTransport(Calls(shard).handle) for shard in shards], worker=0)
        opened.callback(client.close)
        source, rows, feed = connected(
            lambda: self._source(stages),
            ShardRows(client),
            stages,
            staleness=0,
            read_ahead=0 if self.settings.exact else _READ_AHEAD,
        )
        opened.callback(source.close)
        outputs = NoOutputs()
        model = load_model_config(self.config.model)
        wiring = Wiring(source=source, rows=rows, outputs=outputs, clock=self.clock, feed=feed, stages=stages)
        loop = TrainLoop(self.settings, self.schema, model, wiring)
        opened.callback(loop.feed.close)
        worker = Worker(loop, outputs, self.store, self.identity)
        return worker

    def _source(self, stages: Stages) -> PhasedSource:
        """Behind the session comes nothing."""
        partitions = all_partitions((SAMPLES,), self.config.partitions)
        nothing = RecordBatches(MemoryReader(partitions), Decoder(self.schema, self.identity.registry), self.clock, max_wait_ms=0)
        horizon_ms, read_by = self.settings.dedupe_horizon_ms, self._read_by or local_rows
        return PhasedSource(
            nothing, lambda told: open_session(told, self.schema, partitions, horizon_ms, self.clock, stages, read_by)
        )

    def _start(
        self,
        controller: Controller,
        shards: list[Shard],
        worker: Worker,
        ended: threading.Event,
        opened: contextlib.ExitStack,
    ) -> list[BaseException]:
        """The threads that a stack's programs have; the list gets what ends the controller."""
        failed: list[BaseException] = []
        over = Stop()

        def control() -> None:
            try:
                controller.run(over)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=control, name="controller", daemon=True)
        members = [
            Member(lambda: InMemoryTransport(controller.handle), "shard", i, shard.execute, shard.stats, ended)
            for i, shard in enumerate(shards)
        ]
        members.append(
            Member(
                lambda: InMemoryTransport(controller.handle), "worker", 0, worker.submit, worker.report, ended, hear=worker.hear
            )
        )

        def end() -> None:
            worker.close()
            ended.set()
            for member in members:
                member.join(5.0)
            over.set()
            thread.join(5.0)

        opened.callback(end)
        thread.start()
        for member in members:
            member.start()
        return failed

    def _train(self, controller: Controller, worker: Worker, stop: Stop, failed: list[BaseException], tell: Tell) -> None:
        told_s, before = time.monotonic(), 0
        while not self._is_over(controller):
            if failed:
                raise failed[0]
            if stop.is_set():
                raise UnavailableError("stopped before the end; the same command goes on from the last commit")
            worker.serve_inbox()
            worker.turn()
            if worker.fatal:
                raise ConfigError(worker.fatal)
            if (now_s := time.monotonic()) - told_s >= _TELL_S:
                done = sum(worker.loop.own.progress.values())
                tell(done, sum(self.session.rows.values()), max(done - before, 0) / (now_s - told_s))
                told_s, before = now_s, done
        self._settle(worker)

    def _settle(self, worker: Worker) -> None:
        """The worker hears of the last commit, too; what is committed doesn't depend on it."""
        ends_s = time.monotonic() + _SETTLE_S
        while worker.is_cut and time.monotonic() < ends_s:
            worker.serve_inbox()

    def _is_over(self, controller: Controller) -> bool:
        """The commit that has everything is there."""
        last = controller.coordinator.last
        return last is not None and last.manifest.input is None
