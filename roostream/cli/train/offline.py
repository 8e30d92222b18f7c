"""`roostream train`: train a model from the warehouse, with the controller, shards and worker of a stack but
without Kafka.

One worker runs in this process. Several workers are separate programs, which the supervisor of a stack
starts.

The commits are those of a stack: `roostream up` continues from them, and an interrupted run resumes at its
last commit. Nothing is published or predicted. The model has no offsets in the stream yet, as after
`roostream checkpoint import`.

With `rows = torchrec`, the workers own the rows while they train, and owner N keeps its segments where shard
N would. A last commit then moves the buckets to `num_shards` shards, as `placement apply` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.child import Program, StopRank
from infra.home import Home
from infra.supervisor import Supervisor
from param_server.client import Client
from param_server.key_value_store import RocksDbStore
from param_server.server import Shard, ShardRpcHandler
from roostream.cli.checkpoint.move_buckets import move
from roostream.cli.controller_commands import read_link_security
from roostream.cli.output import UpdateProgress
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline_readers import (
    OfflineReaders,
    child_program,
    link_table,
    reader_actors,
    reader_programs,
)
from roostream.cli.train.offline_worker import NUM_BUCKETS, TrainingParts, WorkerTask
from roostream.errors import ConfigError, UnavailableError
from roostream.models.build import load_model_config
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.manifest import Manifest
from roostream.runtime.program import REFUSED_CODE, Stop
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import open_registry
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.sessions.sample_table import SampleTable
from trainer.config import LoopConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.reader_master import ReaderMaster
from trainer.control.types import CoordinatorConfig, Key, State, worker_keys
from trainer.monitoring.progressive_metrics import summarize
from trainer.partitions import PartitionSnapshot, metrics_of_snapshots, read_partitions
from trainer.rows import ShardRows
from trainer.selection.outcomes import RequestCounts
from trainer.worker import Worker

if TYPE_CHECKING:
    from trainer.torchrec_plan import TablePlacement

log = logging.getLogger("roostream.train")

# Rows of each partition in a work unit; large, because no other work unit waits for rows.
_UNIT_ROWS = 1 << 20
_PROGRESS_INTERVAL_S = 2.0
_POLL_S = 0.1
_LAST_COMMIT_S = 3.0
_THREADS_LOST_AFTER_S = 120.0  # all members are threads of this process, so a silent one is slow, not dead
_SNAPSHOT_HOLD_MS = 7 * 86_400_000


def train_offline(
    config: TrainConfig,
    settings: LoopConfig,
    stop: Stop,
    report_progress: UpdateProgress = lambda done, rows: None,
) -> dict[str, Any]:
    """Train until everything is committed; returns the report: what was trained, the speed and the quality.

    Raises:
        RoostreamError: the warehouse, the home or a setting cannot be used.
        UnavailableError: `stop` was set. What is committed stays, and the same call resumes from there.
    """
    if config.rows == "torchrec":
        check_torchrec(config)
    home = Home(Path(config.home))
    if not home.store.exists():
        _check_new(config)
    home.make()
    home.lock()
    try:
        home.make()  # again: a `reset` may have ended in between
        return _OfflineTraining(config, settings, home, stop).run(report_progress)
    finally:
        home.unlock()


def check_torchrec(config: TrainConfig) -> None:
    """Raises ConfigError: TorchRec is not installed, or the placement file is none. SchemaError: a table that
    TorchRec cannot hold, or not where the placement says."""
    try:
        from trainer.torchrec_rows import check_tables, read_placement
    except ImportError as error:
        raise ConfigError(f"rows = torchrec needs {error.name}; pip install 'roostream[torchrec]'") from None
    schema = load_schema(config.schema_path)
    check_tables(schema, read_placement(config.placement, schema, config.workers))


def _check_new(config: TrainConfig) -> None:
    """Raises RoostreamError: a new training cannot begin with these settings, so no home is made for it."""
    schema, table = load_schema(config.schema_path), SampleTable(config.warehouse_url)
    load_model_config(config.model)
    _check_session(config, table, schema, _new_session(config, table))


def _new_session(config: TrainConfig, table: SampleTable) -> TableInput:
    """Raises ConfigError: the warehouse has no samples of these days. CheckpointError: it is none."""
    session = table.newest(config.session, {})
    if session is None or not sum(session.rows.values()):
        raise ConfigError(
            f"{config.warehouse_url}: expected samples of {config.days or 'any day'}, got none; `roostream "
            "inspect table` shows the days"
        )
    return session


def _check_session(config: TrainConfig, table: SampleTable, schema: Schema, session: TableInput) -> None:
    if (newest := max(session.rows)) >= config.partitions:
        raise ConfigError(
            f"expected partitions = {newest + 1} or more, as in the archive, got {config.partitions}"
        )
    if not config.schema and open_registry(table.warehouse.store)(schema.fingerprint) is None:
        raise ConfigError(
            f"{config.warehouse_url}: expected --schema FILE, because no sample there has the demo's schema; "
            "give the schema that the samples were written with, or one that follows it"
        )
    table.check_reader(session, schema)


class _OfflineTraining:
    """One run. `opened` is closed when the training ends."""

    def __init__(self, config: TrainConfig, settings: LoopConfig, home: Home, stop: Stop) -> None:
        self.config, self.settings, self.home, self.stop = config, settings, home, stop
        self.opened = contextlib.ExitStack()
        self.parts = TrainingParts(config, settings)
        self.schema, self.store, self.clock = self.parts.schema, self.parts.store, self.parts.clock
        self.table = SampleTable(config.warehouse_url)
        self.session = self._open_session()
        self.placement: dict[str, TablePlacement] = {}
        if config.rows == "torchrec" and self.session is not None:
            from trainer.torchrec_rows import planned_placement

            profiles = open_checkpoint_store(config.profiles) if config.profiles else self.store
            # Planned once: all workers of a run place tables alike, though profiles are written meanwhile.
            self.placement = planned_placement(
                config.placement,
                self.schema,
                config.workers,
                profiles,
                batch=settings.in_phase(initial=True).batch_requests,
                now_ms=self.clock.now_ms(),
            )

    def _open_session(self) -> TableInput | None:
        """The session to train. An interrupted run continues with the one that it began with. None: all of it
        is trained, and only the move of the rows from the workers to the shards is left.

        Raises:
            ConfigError: the home has another model, or the warehouse has no samples of these days.
        """
        last = manifests.newest(self.store)
        session = last.manifest.input if last else _new_session(self.config, self.table)
        if session is None:
            assert last is not None
            rows_are_at_workers = last.manifest.num_shards == self.config.workers != self.config.num_shards
            if self.config.rows == "torchrec" and rows_are_at_workers:
                return None
            raise ConfigError(
                f"{self.home.root} has a trained model; choose another --home, or continue with "
                "`roostream up`"
            )
        if session.spec != {**self.config.session.plain(), "version": session.version}:
            raise ConfigError(
                f"{self.home.root} has an interrupted training of "
                f"{session.spec['first_day'] or 'the first day'}.."
                f"{session.spec['last_day'] or 'the last'} of {session.table}; use the same settings, or "
                "another --home"
            )
        _check_session(self.config, self.table, self.schema, session)
        self.table.pin_session(session, f"train-{session.digest}", self.clock.now_ms() + _SNAPSHOT_HOLD_MS)
        return session

    def run(self, report_progress: UpdateProgress) -> dict[str, Any]:
        began_s, counts, reading = time.monotonic(), dataclasses.asdict(RequestCounts()), dict[str, float]()
        if self.session is not None:
            self._move_rows(self.config.num_owners)
            self._release()
            with self.opened:
                controller = self._controller(self.session)
                readers = self._readers(controller)
                progress = _Progress(self.session, report_progress)
                if self.config.uses_worker_processes:
                    counts = self._train_in_processes(controller, readers, progress)
                else:
                    counts, reading = self._train_here(controller, readers, progress)
        trained_s = time.monotonic() - began_s
        self._move_rows(self.config.num_shards)
        last = manifests.newest(self.store)
        assert last is not None
        return {
            "table": self.session.table if self.session else "",
            "version": self.session.version if self.session else 0,
            "rows": sum(self.session.rows.values()) if self.session else 0,
            "days": self.config.days,
            "wall_s": trained_s,
            "requests_s": counts["requests"] / trained_s,
            "steps": last.manifest.step,
            **counts,
            "version_of_model": last.manifest.version,
            "metrics": self._metrics(last.manifest),
            **({"reading": reading} if reading else {}),
        }

    def _release(self) -> None:
        """End the hold of an earlier run: whoever repeats the command has repaired its cause. Nothing else
        could end it, because `roostream trainer release` does not reach this controller."""
        purpose = manifests.newest_purpose(self.store)
        if purpose.pop("hold", None):
            manifests.claim_incarnation(self.store, self.clock.now_ms(), purpose)

    def _move_rows(self, num_owners: int) -> None:
        """Distribute the rows of the last commit over this many owners; no process may have them open."""
        last = manifests.newest(self.store)
        if last is None or last.manifest.num_shards == num_owners:
            return
        with contextlib.ExitStack() as opened:
            stores = {}
            for owner in range(max(last.manifest.num_shards, num_owners)):
                stores[owner] = RocksDbStore(self.parts.segments_of(owner)).open()
                opened.callback(stores[owner].close)
            move(self.store, BucketMap.modulo(NUM_BUCKETS, num_owners), stores, self.clock.now_ms())

    def _metrics(self, manifest: Manifest) -> dict[str, Any]:
        """Metrics of all workers together, from their files."""
        snapshots: list[PartitionSnapshot] = []
        for part in manifest.workers.values():
            snapshots += read_partitions(self.store, part, ids=False).values()
        return summarize(metrics_of_snapshots(snapshots, self.schema.labels).report())

    def _controller(self, session: TableInput) -> Controller:
        in_threads = not self.config.uses_worker_processes
        coordinator_config = CoordinatorConfig(
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
            lost_after_s=_THREADS_LOST_AFTER_S if in_threads else CoordinatorConfig.lost_after_s,
        )
        return Controller(
            Coordinator(coordinator_config, self.clock.monotonic_s()),
            self.store,
            self.clock,
            check=self.parts.identity.check,
            open_session=lambda: session,
            long_poll_s=0.1,
        )

    def _readers(self, controller: Controller) -> OfflineReaders | None:
        """The pool of reader programs, if one is configured."""
        if not self.config.uses_readers:
            return None
        master = ReaderMaster(controller.session_now, self.schema, self.clock, self.config.reader_count)
        credentials = LinkCredentials(read_link_security(self.config.link), insecure=self.config.insecure)
        table = link_table(credentials)
        pool = reader_actors(table) if self.config.pool == "ray" else reader_programs(self.home, table)
        readers = OfflineReaders(
            master, self.config.reader_count, pool, self.store, self.config.readers_listen, credentials
        ).open()
        self.opened.callback(readers.close)
        return readers

    def _shards(self) -> list[Shard]:
        """The shards in this process; none where the workers own the rows."""
        count = self.config.num_shards if self.config.rows == "shards" else 0
        return [self.parts.shard(index, self.opened) for index in range(count)]

    def _train_here(
        self, controller: Controller, readers: OfflineReaders | None, progress: _Progress
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Train with one worker in this process; returns its counts and the statistics of reading."""
        shards = self._shards()
        transports = [InMemoryTransport(ShardRpcHandler(shard).handle) for shard in shards]
        client = Client(self.schema, transports, worker=0)
        self.opened.callback(client.close)
        opener = (
            readers.session_opener(ReadersConfig(by="programs"), lambda: worker.incarnation)
            if readers
            else None
        )
        worker: Worker = self.parts.worker(ShardRows(client), opener, self.opened)
        errors = self._start_threads(controller, shards, worker)
        while not _is_complete(controller):
            self._check(errors, controller)
            worker.serve_inbox()
            worker.turn()
            if worker.fatal:
                raise ConfigError(worker.fatal)
            progress.update(lambda: sum(worker.loop.partitions.progress.values()))
        ends_s = time.monotonic() + _LAST_COMMIT_S
        while worker.is_cut and time.monotonic() < ends_s:  # until the worker learns of the last commit
            worker.serve_inbox()
        return dataclasses.asdict(worker.loop.counts), opener.report() if opener else {}

    def _train_in_processes(
        self, controller: Controller, readers: OfflineReaders | None, progress: _Progress
    ) -> dict[str, Any]:
        """Train with worker programs; returns the sums of their counts since their last start, and what
        workers that hold rows have exchanged."""
        shards = self._shards()
        processes = contextlib.ExitStack()
        self.opened.callback(processes.close)  # after the controller has ended, so that it does not react
        errors = self._start_threads(controller, shards, None)
        reader_master = readers.server.address if readers else ""
        supervisor = self._start_workers(controller, shards, reader_master, processes)
        coordinator = controller.coordinator
        while not _is_complete(controller):
            self._check(errors, controller)
            for name, slot in supervisor.slots.items():
                if slot.state == "failed":
                    raise ConfigError(f"{name} failed: {slot.last_error}; its log is in {self.home.logs}")
            time.sleep(_POLL_S)
            progress.update(
                lambda: sum(last.manifest.positions.values()) if (last := coordinator.last) else 0
            )
        ends_s = time.monotonic() + _LAST_COMMIT_S
        while coordinator.state is State.COMMITTING and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        reports = [
            m.report for key in worker_keys(self.config.workers) if (m := coordinator.members.get(key))
        ]
        counts: dict[str, Any] = {
            f.name: sum(report.get(f.name, 0) for report in reports)
            for f in dataclasses.fields(RequestCounts)
        }
        if self.config.rows == "torchrec":
            owners = [coordinator.members.get(Key("shard", index)) for index in range(self.config.workers)]
            counts["exchange"] = {
                name: sum(owner.report.get(name, 0) for owner in owners if owner)
                for name in ("exchanged_bytes", "impression_bytes")
            }
        return counts

    def _check(self, errors: list[BaseException], controller: Controller) -> None:
        if errors:
            raise errors[0]
        if hold := controller.coordinator.holds.now:
            raise ConfigError(
                f"training is held: {hold.reason}; when the cause is repaired, the same command goes on"
            )
        if self.stop.is_set():
            raise UnavailableError("stopped before the end; the same command resumes from the last commit")

    def _start_threads(
        self, controller: Controller, shards: Sequence[Shard], worker: Worker | None
    ) -> list[BaseException]:
        """Start the controller, and the agents of shards and worker, as threads; errors of the controller are
        appended."""
        errors: list[BaseException] = []
        controller_stop, ended = Stop(), threading.Event()

        def run_controller() -> None:
            try:
                controller.run(controller_stop)
            except BaseException as error:
                errors.append(error)

        def dial() -> InMemoryTransport:
            return InMemoryTransport(controller.handle)

        thread = threading.Thread(target=run_controller, name="controller", daemon=True)
        agents = [
            ControllerAgent(dial, "shard", i, shard.execute, shard.stats, ended)
            for i, shard in enumerate(shards)
        ]
        if worker:
            agents.append(
                ControllerAgent(
                    dial, "worker", 0, worker.submit, worker.report, ended, on_received=worker.hear
                )
            )

        def end() -> None:
            if worker:
                worker.close()
            ended.set()
            for agent in agents:
                agent.join(5.0)
            controller_stop.set()
            thread.join(5.0)

        self.opened.callback(end)
        thread.start()
        for agent in agents:
            agent.start()
        return errors

    def _start_workers(
        self,
        controller: Controller,
        shards: Sequence[Shard],
        reader_master: str,
        opened: contextlib.ExitStack,
    ) -> Supervisor:
        """Serve the controller and the shards by RPC, and start the worker programs. `reader_master`: "" = no
        readers."""
        server = RpcServer(controller.handle).start()
        shard_servers = [RpcServer(ShardRpcHandler(shard).handle).start() for shard in shards]
        for shard_server in shard_servers:
            opened.callback(shard_server.stop)

        def program(index: int) -> Program:
            task = WorkerTask(
                train=dataclasses.asdict(self.config),
                loop=dataclasses.asdict(self.settings),
                index=index,
                controller=server.address,
                readers=reader_master,
                shards=[shard_server.address for shard_server in shard_servers],
                placement=self.placement,
            )
            return child_program(
                self.home,
                f"worker-{index}",
                ("roostream.cli.train.offline_worker",),
                f"worker-{index}.json",
                json.dumps(dataclasses.asdict(task)),
                stop_rank=StopRank.WORKER,
                refused_code=REFUSED_CODE,
            )

        supervisor = Supervisor()

        def end() -> None:
            supervisor.stop(list(supervisor.slots))
            supervisor.close()

        opened.callback(end)
        opened.callback(server.stop)  # first, because the workers that stop last would report the others lost
        supervisor.open()
        supervisor.start([program(index) for index in range(self.config.workers)])
        return supervisor


def _is_complete(controller: Controller) -> bool:
    """Whether the commit that includes all input exists."""
    last = controller.coordinator.last
    return last is not None and last.manifest.input is None


class _Progress:
    """Reports progress every two seconds."""

    def __init__(self, session: TableInput, report_progress: UpdateProgress) -> None:
        self.rows, self.report_progress = sum(session.rows.values()), report_progress
        self._reported_s = time.monotonic()

    def update(self, count_trained: Callable[[], int]) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _PROGRESS_INTERVAL_S:
            self.report_progress(count_trained(), self.rows)
            self._reported_s = now_s
