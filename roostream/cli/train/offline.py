"""Training from the warehouse: the controller, the shards and the worker that a stack has, called directly, or with several
workers that are programs beside this one.

What is committed is what a stack commits, so a stack can go on with it (`roostream up`), and a killed run goes on at its last
commit. There is no Kafka: nothing is published or predicted, and the model has no place in any stream yet, as one that
`roostream checkpoint import` brought.

Where workers hold the rows, owners 0..W-1 of the commits are they, and each has its segments where a shard of its number would.
The hand-over is a commit of its own behind the last one: buckets go to the map of `num_shards`, as `placement apply` moves them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infra.child import Program, StopRank
from infra.home import Home
from infra.options import ROOT
from infra.supervisor import Supervisor
from param_server.client import Client
from param_server.key_value_store import RocksDbStore
from param_server.server import Shard, ShardRpcHandler
from roostream.cli.checkpoint.move_buckets import move
from roostream.cli.controller_commands import read_link_security
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline_readers import OfflineReaders, linked, reader_actors, reader_programs
from roostream.cli.train.offline_worker import NUM_BUCKETS, OfflineParts, WorkerTask
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.manifest import Manifest
from roostream.runtime.program import REFUSED_CODE, Stop
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.runtime.work_unit import TableInput
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.readers.remote_rows import RemoteSessionOpener
from roostream.warehouse.sessions.sample_table import SampleTable
from trainer.config import LoopConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.reader_master import ReaderMaster
from trainer.control.types import CoordinatorConfig, State, worker_keys
from trainer.monitoring.progressive_metrics import summarize
from trainer.partitions import PartitionSnapshot, decode_partitions, report_of_snapshots
from trainer.rows import ShardRows
from trainer.selection.outcomes import RequestCounts
from trainer.worker import Worker

_UNIT_ROWS = 1 << 20  # of each partition between two ends of an epoch, for which nobody has anything in hand
_TELL_S = 2.0
_LOOK_S = 0.1
_SETTLE_S = 3.0
_SLOW_S = 120.0  # where all members are threads of this process: who is silent is slow (kernels compile, readers start), not dead
_HELD_MS = 7 * 86_400_000

Tell = Callable[[int, int, float], None]
"""(rows trained, of so many, rows a second)"""


def train_offline(
    config: TrainConfig, settings: LoopConfig, stop: Stop, tell: Tell = lambda done, rows, rate: None
) -> dict[str, Any]:
    """Until all is trained and committed; what was trained, how fast and how well.

    Raises:
        RoostreamError: the warehouse, the home or a setting can't be used. UnavailableError: `stop` was set; what is committed
            stays, and the same call goes on from there.
    """
    if config.rows == "workers" and settings.device != "cpu":
        raise ConfigError(
            f"expected worker.device = cpu with rows = workers, got {settings.device}: they swap rows on the host"
        )
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
        self.config, self.settings, self.home = config, settings, home
        self.parts = OfflineParts(config, settings)
        self.schema, self.store, self.clock = self.parts.schema, self.parts.store, self.parts.clock
        self.table = SampleTable(config.place)
        self.session = self._session()
        self._read_by: RemoteSessionOpener | None = None

    def _session(self) -> TableInput | None:
        """What is to be trained: as it was fixed where training was interrupted. None: all is trained, and the rows are still at
        the workers.

        Raises:
            ConfigError: the home has another model, or the warehouse nothing of these days.
        """
        last = manifests.newest(self.store)
        found = last.manifest.input if last else self.table.newest(self.config.session, {})
        if last is not None and found is None:
            if (
                self.config.rows == "workers"
                and last.manifest.num_shards == self.config.workers != self.config.num_shards
            ):
                return None
            raise ConfigError(
                f"{self.home.root} has a model that is trained; give another --home, or go on with `roostream up`"
            )
        if found is None or not sum(found.rows.values()):
            raise ConfigError(
                f"{self.config.place}: expected samples of {self.config.days or 'some day'}, got none"
            )
        wanted = {**self.config.session.plain(), "version": found.version}
        if found.spec != wanted:
            raise ConfigError(
                f"{self.home.root} has training that was interrupted of {found.spec['first_day'] or 'the first day'}.."
                f"{found.spec['last_day'] or 'the last'} of {found.table}; give the same settings again, or another --home"
            )
        if (most := max(found.rows)) >= self.config.partitions:
            raise ConfigError(
                f"expected partitions = {most + 1} or more, got {self.config.partitions}: the archive has as many"
            )
        self.table.check_reader(found, self.schema)
        self.table.pin_session(found, f"train-{found.digest}", self.clock.now_ms() + _HELD_MS)
        return found

    def run(self, stop: Stop, tell: Tell) -> dict[str, Any]:
        began_s, counts, reading = time.monotonic(), dataclasses.asdict(RequestCounts()), dict[str, float]()
        if self.session is not None:
            self._lay_out(self.config.num_owners)
            with contextlib.ExitStack() as opened:
                controller = self._controller(self.session)
                readers = self._readers(controller, opened)
                shards = [
                    self.parts.shard(index, opened)
                    for index in range(self.config.num_shards if self.config.rows == "shards" else 0)
                ]
                if self.config.by_processes:
                    counts = self._train_by_processes(controller, shards, readers, stop, tell, opened)
                else:
                    worker = self._worker(shards, readers, opened)
                    failed = self._start(controller, shards, worker, opened)
                    self._train(controller, worker, stop, failed, tell)
                    counts = dataclasses.asdict(worker.loop.counts)
                reading = self._read_by.shown() if self._read_by else {}
        trained_s = time.monotonic() - began_s
        self._lay_out(self.config.num_shards)
        last = manifests.newest(self.store)
        assert last is not None
        session = (
            {"table": self.session.table, "version": self.session.version}
            if self.session
            else {"table": "", "version": 0}
        )
        seen = {
            **session,
            "rows": sum(self.session.rows.values()) if self.session else 0,
            "days": self.config.days,
        }
        return {
            **seen,
            "wall_s": trained_s,
            "requests_s": counts["requests"] / trained_s,
            "steps": last.manifest.step,
            **counts,
            "version_of_model": last.manifest.version,
            "metrics": self._metrics(last.manifest),
            **({"reading": reading} if reading else {}),
        }

    def _lay_out(self, num_owners: int) -> None:
        """The rows of the last commit lie at so many: workers and shards have theirs alike. Nobody has them open."""
        last = manifests.newest(self.store)
        if last is None or last.manifest.num_shards == num_owners:
            return
        with contextlib.ExitStack() as opened:
            blobs = {}
            for owner in range(max(last.manifest.num_shards, num_owners)):
                blobs[owner] = RocksDbStore(self.parts.segments_of(owner)).open()
                opened.callback(blobs[owner].close)
            move(self.store, BucketMap.modulo(NUM_BUCKETS, num_owners), blobs, self.clock.now_ms())

    def _metrics(self, manifest: Manifest) -> dict[str, Any]:
        """Of all workers together, as their files have them."""
        own: list[PartitionSnapshot] = []
        for part in manifest.workers.values():
            own += decode_partitions(manifests.read_file(self.store, part.file), part.offsets).values()
        return summarize(report_of_snapshots(own, self.schema.tasks))

    def _controller(self, session: TableInput) -> Controller:
        facts = CoordinatorConfig(
            schema=f"{self.schema.fingerprint:016x}",
            seed=self.config.seed,
            num_shards=self.config.num_owners,
            num_workers=self.config.workers,
            from_table=True,
            unit_records=_UNIT_ROWS,
            num_buckets=NUM_BUCKETS,
            num_partitions=self.config.partitions,
            kafka={},
            commit_interval_s=self.config.commit_interval_ms / 1000,
            lost_after_s=CoordinatorConfig.lost_after_s if self.config.by_processes else _SLOW_S,
        )
        coordinator = Coordinator(facts, self.clock.monotonic_s())
        check = self.parts.identity.check
        return Controller(
            coordinator, self.store, self.clock, check=check, open_session=lambda: session, long_poll_s=0.1
        )

    def _readers(self, controller: Controller, opened: contextlib.ExitStack) -> OfflineReaders | None:
        if not self.config.reads_by_programs:
            return None
        master = ReaderMaster(controller.session_now, self.schema, self.clock, self.config.reader_count)
        keys = LinkCredentials(read_link_security(self.config.link), insecure=self.config.insecure)
        pool = (
            reader_actors(linked(keys))
            if self.config.pool == "ray"
            else reader_programs(self.home, linked(keys))
        )
        readers = OfflineReaders(
            master, self.config.reader_count, pool, self.store, self.config.ask_at, keys
        ).open()
        opened.callback(readers.close)
        return readers

    # In this process

    def _worker(
        self, shards: Sequence[Shard], readers: OfflineReaders | None, opened: contextlib.ExitStack
    ) -> Worker:
        self._read_by = (
            readers.reading(ReadersConfig(by="programs"), lambda: worker.incarnation) if readers else None
        )
        client = Client(
            self.schema, [InMemoryTransport(ShardRpcHandler(shard).handle) for shard in shards], worker=0
        )
        opened.callback(client.close)
        worker = self.parts.worker(ShardRows(client), self._read_by, opened)
        return worker

    def _start(
        self,
        controller: Controller,
        shards: Sequence[Shard],
        worker: Worker | None,
        opened: contextlib.ExitStack,
    ) -> list[BaseException]:
        """The threads that a stack's programs have; the list gets what ends the controller. `worker`: None where they are
        processes."""
        failed: list[BaseException] = []
        over, ended = Stop(), threading.Event()

        def control() -> None:
            try:
                controller.run(over)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=control, name="controller", daemon=True)

        def dial() -> InMemoryTransport:
            return InMemoryTransport(controller.handle)

        members = [
            ControllerAgent(dial, "shard", i, shard.execute, shard.stats, ended)
            for i, shard in enumerate(shards)
        ]
        if worker:
            members.append(
                ControllerAgent(dial, "worker", 0, worker.submit, worker.report, ended, hear=worker.hear)
            )

        def end() -> None:
            if worker:
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

    def _train(
        self, controller: Controller, worker: Worker, stop: Stop, failed: list[BaseException], tell: Tell
    ) -> None:
        progress = _Progress(self.session, tell)
        while not self._is_over(controller):
            self._check(stop, failed)
            worker.serve_inbox()
            worker.turn()
            if worker.fatal:
                raise ConfigError(worker.fatal)
            progress.at(lambda: sum(worker.loop.partitions.progress.values()))
        ends_s = time.monotonic() + _SETTLE_S
        while worker.is_cut and time.monotonic() < ends_s:  # it hears of the last commit, too
            worker.serve_inbox()

    # By processes

    def _train_by_processes(
        self,
        controller: Controller,
        shards: Sequence[Shard],
        readers: OfflineReaders | None,
        stop: Stop,
        tell: Tell,
        opened: contextlib.ExitStack,
    ) -> dict[str, Any]:
        """What the workers have counted together, since each was started last."""
        told_by = readers.server.address if readers else ""
        processes = WorkerProcesses(self.config, self.settings, self.home, controller, told_by)
        opened.callback(processes.close)
        failed = self._start(controller, shards, None, opened)
        processes.open(shards)
        progress, coordinator = _Progress(self.session, tell), controller.coordinator
        while not self._is_over(controller):
            self._check(stop, failed)
            if coordinator.holds.now is not None:
                raise ConfigError(f"training is held: {coordinator.holds.now.reason}")
            if down := processes.failed():
                raise ConfigError(f"{down}; its log is in {self.home.logs}")
            time.sleep(_LOOK_S)
            progress.at(lambda: sum(last.manifest.positions.values()) if (last := coordinator.last) else 0)
        ends_s = time.monotonic() + _SETTLE_S
        while coordinator.state is State.COMMITTING and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
        reports = [
            m.report for key in worker_keys(self.config.workers) if (m := coordinator.members.get(key))
        ]
        return {
            f.name: sum(report.get(f.name, 0) for report in reports)
            for f in dataclasses.fields(RequestCounts)
        }

    def _check(self, stop: Stop, failed: list[BaseException]) -> None:
        if failed:
            raise failed[0]
        if stop.is_set():
            raise UnavailableError("stopped before the end; the same command goes on from the last commit")

    def _is_over(self, controller: Controller) -> bool:
        """The commit that has everything is there."""
        last = controller.coordinator.last
        return last is not None and last.manifest.input is None


class _Progress:
    """Told now and then."""

    def __init__(self, session: TableInput | None, tell: Tell) -> None:
        self.rows, self.tell = sum(session.rows.values()) if session else 0, tell
        self._told_s, self._before = time.monotonic(), 0

    def at(self, done: Callable[[], int]) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_S:
            so_far = done()
            self.tell(so_far, self.rows, max(so_far - self._before, 0) / (now_s - self._told_s))
            self._told_s, self._before = now_s, so_far


_STOP_S = 10.0


class WorkerProcesses:
    """From `open` to `close`."""

    def __init__(
        self, config: TrainConfig, settings: LoopConfig, home: Home, controller: Controller, readers: str
    ) -> None:
        """`readers`: where whoever reads for workers is told of; "" = they read for themselves."""
        self.config, self.settings, self.home, self.readers = config, settings, home, readers
        self.server = RpcServer(controller.handle)
        self.shards: list[RpcServer] = []
        self.supervisor = Supervisor()

    def open(self, shards: Sequence[Shard]) -> WorkerProcesses:
        """`shards`: those of this process; none where workers hold the rows."""
        self.server.start()
        self.shards = [RpcServer(ShardRpcHandler(shard).handle).start() for shard in shards]
        self.supervisor.open()
        self.supervisor.start([self._program(index) for index in range(self.config.workers)])
        return self

    def close(self) -> None:
        """Ends them, by force those that don't. Idempotent."""
        self.supervisor.stop(list(self.supervisor.slots))
        self.supervisor.close()
        for server in (*self.shards, self.server):
            server.stop()

    def failed(self) -> str:
        """Who stays down, and why; "" = nobody."""
        return ", ".join(
            f"{name} failed: {slot.last_error}"
            for name, slot in self.supervisor.slots.items()
            if slot.state == "failed"
        )

    def _program(self, index: int) -> Program:
        name = f"worker-{index}"
        conf = self.home.conf / f"{name}.json"
        task = WorkerTask(
            train=dataclasses.asdict(self.config),
            loop=dataclasses.asdict(self.settings),
            index=index,
            controller=self.server.address,
            readers=self.readers,
            shards=[server.address for server in self.shards],
        )

        def prepare() -> None:
            conf.parent.mkdir(parents=True, exist_ok=True)
            conf.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")

        return Program(
            name=name,
            command=(sys.executable, "-m", "roostream.cli.train.offline_worker", str(conf)),
            log=self.home.log(name),
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
            },
            prepare=prepare,
            stop_rank=StopRank.WORKER,
            stop_timeout_s=_STOP_S,
            refused_code=REFUSED_CODE,
        )
